"""What the command line and worker processes import: only what the command needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardio.cli.main import PANELS, app
from tests.sources import write_images

COMMANDS = [name for names in PANELS.values() for name in names]
COMMAND_MODULES = {f"shardio.cli.{name.replace('-', '_')}" for name in COMMANDS}

FOR_TERMINALS_OR_PIXELS = {"torch", "matplotlib", "rich", "PIL", "cv2", "simplejpeg", "shardio.images.kernel"}
"""Copying files needs none of these, unless it shows a bar on a terminal."""

LOAD_EACH_COMMAND = """
import os, sys, typer, numpy
from shardio.cli.main import app
commands = typer.main.get_command(app).commands
for name in commands:
    if os.fork() == 0:
        commands[name]
        print(name, *sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""


def run_python(code: str, *arguments: object) -> list[str]:
    """Run code in a new process; return the lines that it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def modules_after_command(*arguments: object) -> set[str]:
    """Return the modules that a new process has loaded after a command."""
    code = (
        "import sys\nfrom shardio.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\nprint(*sys.modules)"
    )
    return set(run_python(code, *arguments)[-1].split())


def test_a_command_imports_no_other_commands_module() -> None:
    loaded = {name: set(modules) for name, *modules in map(str.split, run_python(LOAD_EACH_COMMAND))}
    assert list(loaded) == COMMANDS
    for name, modules in loaded.items():
        assert modules & COMMAND_MODULES == {f"shardio.cli.{name.replace('-', '_')}"}
        assert not modules & {"torch", "matplotlib", "rich"}, name


def test_the_version_loads_no_command_and_no_numpy() -> None:
    assert not modules_after_command("--version") & {*COMMAND_MODULES, "numpy", "rich"}


def test_packing_copies_without_decoders_and_progress_bars(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=2, width=8, height=8)
    modules = modules_after_command("pack", tmp_path / "in", tmp_path / "out", "--no-check")
    assert not modules & {*FOR_TERMINALS_OR_PIXELS, "multiprocessing.connection", "shardio.packing.on_ray"}


def test_verifying_loads_no_decoders_unless_it_is_deep(packed: Path) -> None:
    decoders = {"simplejpeg", "shardio.decoding"}
    assert not modules_after_command("verify", packed) & decoders
    assert modules_after_command("verify", packed, "--deep") >= decoders


def test_worker_processes_of_a_pack_start_without_the_command_line() -> None:
    modules = run_python("import sys, shardio.packing.executors; print(*sys.modules)")[0].split()
    assert not set(modules) & {*FOR_TERMINALS_OR_PIXELS, "typer", "pydantic", "filelock", "shardio.packing.packer"}


@pytest.mark.parametrize(
    ("word", "message"), [("pakc", "No such command 'pakc'. Did you mean 'pack'?"), ("xyz", "No such command 'xyz'.")]
)
def test_an_unknown_command_is_a_usage_error_that_suggests_similar_ones(word: str, message: str) -> None:
    done = CliRunner().invoke(app, [word])
    assert done.exit_code == 2
    assert message in done.stderr


def test_the_help_lists_each_command_once_in_its_panel() -> None:
    lines = [line.strip("│╭─╮ ") for line in CliRunner().invoke(app, ["--help"]).stdout.splitlines()]
    found = [line.split()[0] for line in lines if line and (line in PANELS or line.split()[0] in COMMANDS)]
    assert found == [word for panel, names in PANELS.items() for word in (panel.split()[0], *names)]
