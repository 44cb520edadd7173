"""The command line as a whole: commands, imports, and output on stdout and stderr."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shardio
from shardio.cli import terminal
from shardio.cli.main import MODULES
from shardio.cli.terminal import ProgressReporter, printable
from shardio.shards import Manifest, open_table, write_manifest
from shardio.storage import parse_location
from tests.cli.commands import run, run_main
from tests.files import read_files
from tests.packing.packs import write_files
from tests.processes import run_python
from tests.sources import encode, write_images
from tests.tars import write_tar

FOR_TERMINALS_OR_PIXELS = {"torch", "matplotlib", "rich", "PIL", "cv2", "simplejpeg", "shardio.kernel.functions"}
"""Modules that commands for copying files do not import, unless they show a progress bar on a terminal."""


LOAD_EACH_COMMAND = """
import os, sys, numpy
from shardio.cli.main import MODULES, load_command
for name in MODULES:
    if os.fork() == 0:
        load_command(name)
        print(name, *sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""

RUN_COMMAND = """
import sys
from shardio.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code
print(*sys.modules)
"""


def run_code(code: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).splitlines()


@pytest.mark.slow
def test_a_command_imports_only_what_it_needs(packed: Path, tmp_path: Path) -> None:
    def modules_after_command(*arguments: object) -> set[str]:
        return set(run_code(RUN_COMMAND, *arguments)[-1].split())

    loaded = {name: set(modules) for name, *modules in map(str.split, run_code(LOAD_EACH_COMMAND))}
    assert list(loaded) == list(MODULES)
    files = {f"shardio.cli.{module}" for module in MODULES.values()}
    for name, modules in loaded.items():
        assert modules & files == {"shardio.cli.main", f"shardio.cli.{MODULES[name]}"}
        assert not modules & {"torch", "matplotlib", "rich"}, name
    for option in ("--version", "--help"):
        assert modules_after_command(option) & {*files, "numpy", "rich"} == {"shardio.cli.main"}
    write_images(tmp_path / "in", classes=1, per_class=2, width=8, height=8)
    modules = modules_after_command("pack", tmp_path / "in", tmp_path / "out", "--no-check")
    assert not modules & {*FOR_TERMINALS_OR_PIXELS, "multiprocessing.connection", "ray"}
    decoders = {"simplejpeg", "shardio.decoding"}
    assert not modules_after_command("verify", packed) & decoders
    assert modules_after_command("verify", packed, "--deep") >= decoders
    worker = run_code("import sys, shardio.packing.executors; print(*sys.modules)")[0].split()
    assert not {*worker} & {*FOR_TERMINALS_OR_PIXELS, "typer", "pydantic", "filelock", "shardio.packing.packer"}


CLEAR = "\x1b[2J\x1b]0;title\x07\x9b1m\x7f"
"""Control characters that clear the screen of a terminal and set its title."""


def test_control_characters_are_escaped_and_other_text_is_unchanged(tmp_path: Path) -> None:
    assert printable("größe 写真 👩‍🔬\t\n", keep="\t\n") == "größe 写真 👩‍🔬\t\n"
    assert printable(f"a{CLEAR}\n\u202eb") == "a\\x1b[2J\\x1b]0;title\\x07\\x9b1m\\x7f\\n\\u202eb"

    def assert_harmless(output: str, shown: str) -> None:
        assert all(character.isprintable() or character == "\n" for character in output)
        assert shown in output

    write_tar(tmp_path / "x.tar", [("a.jpg", encode(0)), (f"a.{CLEAR}", b"1")])
    shards = open_table(tmp_path / "x.tar").manifest.shards
    manifest = Manifest(shards=shards, fields=(CLEAR,), classes=(f"cat{CLEAR}", "a\nb"))
    write_manifest(parse_location(tmp_path / "shardio.json"), manifest)
    output = run("info", tmp_path).output
    assert_harmless(output, "cat\\x1b[2J\\x1b]0;title\\x07\\x9b1m\\x7f, a\\nb")
    assert output.count("fields") == 1
    write_images(tmp_path / "in", classes=1, per_class=1, width=8, height=8)
    (tmp_path / "in" / "class-0" / f"notes{CLEAR}\n.txt").write_text("no image")
    assert_harmless(run("pack", tmp_path / "in", tmp_path / "out").output, "notes\\x1b[2J")
    write_tar(tmp_path / "x.tar", [(f"a{CLEAR}.jpg", b"1"), (f"a{CLEAR}.jpg", b"2")])
    done = run_main("info", tmp_path / "x.tar")
    assert done.code == 1
    assert_harmless(done.stderr, "error: ")


@pytest.mark.slow
def test_a_pack_without_standard_streams_packs_the_same(tmp_path: Path) -> None:
    """A file that got the descriptor of a closed stream would also receive the output to that stream."""
    write_images(tmp_path / "in", classes=1, per_class=2, width=8, height=8)
    (tmp_path / "in" / "class-0" / "notes.txt").write_text("named in the summary")
    shardio.pack(tmp_path / "in", tmp_path / "expected")
    command = shlex.join([sys.executable, "-m", "shardio", "pack", str(tmp_path / "in"), str(tmp_path / "out")])
    assert subprocess.run(["sh", "-c", f"{command} <&- >&- 2>&-"], check=False).returncode == 0
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")


@pytest.mark.slow
def test_shardios_warnings_are_shown_without_their_location(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1, width=8, height=8)
    (tmp_path / "in" / "class-0" / "a.heic").touch()
    done = run_python("-m", "shardio", "bench", tmp_path / "in", "--num-workers", "0", "--json")
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {tmp_path}/in: left out images in other formats (1 .heic): ")
    assert done.stderr.count("\n") == 1


NAMES = ["Müller/größe.jpg", "Müller/b.jpg", "日本/写真.jpg", "日本/x.jpg", "plain/a.jpg", "plain/ü.jpg", "plain/é.txt"]
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

PROGRAM = """
import sys
from shardio.cli.main import main
assert sys.getfilesystemencoding() == "ascii" and sys.stdout.encoding == "ascii", sys.getfilesystemencoding()
for command in (
    "pack Bilder übung", "pack Bilder übung", "info übung",
    "bench übung --num-workers 1", "bench Bilder --num-workers 0"
):
    sys.argv = ["shardio", *command.encode().decode("ascii", "surrogateescape").split()]
    print("$", *sys.argv[1:], flush=True)
    try:
        main()
    except SystemExit as end:
        print("ended", end.code, flush=True)
import shardio
folder = shardio.ImageFolder("Bilder")  # In a script, names are plain text.
shards = shardio.ShardMapDataset("übung", fields=("image", "key", "label"), classes=folder)
packed = shardio.pack("Bilder", "weitere/übung")
assert len(shardio.ShardDataset("weitere/übung/shard-{000000..000000}.tar")) == 6
print(ascii([folder.digest, folder.classes, shards.classes, sorted(shards[n][1:] for n in range(6))]))
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS names files in UTF-8 under every locale")
@pytest.mark.slow
def test_the_c_locale_changes_nothing(tmp_path: Path) -> None:
    root, environment = tmp_path, {**os.environ, **C_LOCALE}
    write_files(root / "Bilder", {name: encode(i) for i, name in enumerate(NAMES)})
    (root / "commands.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "commands.py"]
    found = subprocess.run(command, cwd=root, env=environment, check=False, capture_output=True, timeout=300)
    output, errors = found.stdout.decode(), found.stderr.decode()  # Both are valid UTF-8.
    assert found.returncode == 0, errors
    _, packed, refused, info, *benches = output.split("$ ")
    assert re.fullmatch("(?s)pack Bilder übung\npacked 6 samples of 3 classes.*ended 0\n", packed)
    assert "ignored (not part of any sample):\n  Bilder/plain/é.txt" in errors
    assert refused.endswith("ended 1\n")
    assert "übung already holds a packed dataset" in errors
    assert "classes  3: Müller, plain, 日本" in info
    assert ["6 samples in 1 batch" in bench for bench in benches] == [True, True]
    assert "Traceback" not in errors
    folder = shardio.ImageFolder(root / "Bilder")
    shardio.pack(root / "Bilder", root / "expected")
    assert read_files(root / "übung") == read_files(root / "weitere" / "übung") == read_files(root / "expected")
    expected = shardio.ShardMapDataset(root / "expected", fields=("key", "label"))
    samples = sorted(expected[index] for index in range(6))
    assert output.splitlines()[-1] == ascii([folder.digest, folder.classes, folder.classes, samples])
    assert folder.classes == ["Müller", "plain", "日本"]


@pytest.mark.slow
def test_a_name_that_is_not_utf8_is_printed_as_its_bytes(tmp_path: Path) -> None:
    """In UTF-8 mode, Python's standard error writes surrogates as escape sequences by default."""
    write_files(tmp_path / "in", {"c/a.jpg": encode(1)})
    try:
        (tmp_path / "in" / "c" / os.fsdecode(b"gr\xfc\xdfe.txt")).write_text("Latin-1")
    except OSError:
        return  # macOS allows only names in UTF-8.
    command = [sys.executable, "-X", "utf8", "-m", "shardio", "pack", str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"in/c/gr\xfc\xdfe.txt\n" in done.stderr
    assert json.loads((tmp_path / "out" / "shardio.json").read_text())["classes"] == ["c"]


def test_reports_of_all_threads_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    with ProgressReporter("verifying", "shards") as reporter, ThreadPoolExecutor(4) as pool:
        reporter.start(100)
        list(pool.map(lambda number: reporter.advance(1, 2000 * number, 3), range(100)))
    assert (reporter.num_done, reporter.num_bytes, reporter.num_samples) == (100, 2000 * 4950, 300)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert (captured.out, len(lines)) == ("", 100)
    pattern = r"verifying: \d+ of 100 shards, .+ shards/s, .+/s, about \d+ s left"
    assert all(re.fullmatch(pattern, line) for line in lines[1:])
    assert re.fullmatch("verifying: 100 of 100 shards.*about 0 s left", lines[-1])


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(("num_total", "line_every_s"), [(20, 0.0), (2, 60.0), (0, 0.0)])
def test_long_work_shows_a_bar_on_a_terminal_and_short_work_shows_nothing(
    is_terminal: bool, num_total: int, line_every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", line_every_s)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter("packing", "images") as reporter:
        reporter.start(num_total)
        if num_total:
            reporter.advance(num_total)
    text = screen.getvalue()
    if is_terminal and num_total:
        assert "packing" in text
        assert f"{num_total}/{num_total}" in text
        assert "about" not in text
    else:
        assert ("about" in text) == (num_total == 20)
        assert num_total == 20 or text == ""
