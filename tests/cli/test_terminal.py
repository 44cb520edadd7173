"""Output to terminals, whose control characters are escaped, and to closed streams."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app, main
from shardio.cli.terminal import printable
from shardio.shards import Manifest, open_table, write_manifest
from shardio.storage import parse_location
from tests.files import read_files
from tests.processes import run_python
from tests.sources import encode, write_images
from tests.tars import write_tar

CLEAR = "\x1b[2J\x1b]0;title\x07\x9b1m\x7f"
"""Clears the screen of a terminal and sets its title."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_harmless(output: str, shown: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in output)
    assert shown in output


def test_printable_text_is_unchanged() -> None:
    assert printable("größe 写真 👩‍🔬\t\n", keep="\t\n") == "größe 写真 👩‍🔬\t\n"
    assert printable(f"a{CLEAR}\n\u202eb") == "a\\x1b[2J\\x1b]0;title\\x07\\x9b1m\\x7f\\n\\u202eb"


def test_info_escapes_control_characters_in_class_names_and_fields(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", encode(0)), (f"a.{CLEAR}", b"1")])
    shards = open_table(tmp_path / "x.tar").manifest.shards
    manifest = Manifest(shards=shards, fields=(CLEAR,), classes=(f"cat{CLEAR}", "a\nb"))
    write_manifest(parse_location(tmp_path / "shardio.json"), manifest)
    done = run("info", tmp_path)
    assert_harmless(done.output, "cat\\x1b[2J\\x1b]0;title\\x07\\x9b1m\\x7f, a\\nb")
    assert done.output.count("fields") == 1


def test_pack_escapes_control_characters_in_file_names(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1, width=8, height=8)
    (tmp_path / "in" / "class-0" / f"notes{CLEAR}\n.txt").write_text("no image")
    assert_harmless(run("pack", tmp_path / "in", tmp_path / "out").output, "notes\\x1b[2J")


def test_errors_escape_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(tmp_path / "x.tar", [(f"a{CLEAR}.jpg", b"1"), (f"a{CLEAR}.jpg", b"2")])
    monkeypatch.setattr(sys, "argv", ["shardio", "info", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert_harmless(capsys.readouterr().err, "error: ")


def test_an_empty_argument_is_not_the_working_directory(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(packed)
    monkeypatch.setattr(sys, "argv", ["shardio", "info", ""])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: an argument is empty: check that the shell variables in the command are set\n"
    )


def test_a_pack_without_standard_streams_packs_the_same(tmp_path: Path) -> None:
    """A file that got the descriptor of a closed stream would also receive the output to that stream."""
    write_images(tmp_path / "in", classes=1, per_class=2, width=8, height=8)
    (tmp_path / "in" / "class-0" / "notes.txt").write_text("named in the summary")
    shardio.pack(tmp_path / "in", tmp_path / "expected")
    command = shlex.join([sys.executable, "-m", "shardio", "pack", str(tmp_path / "in"), str(tmp_path / "out")])
    assert subprocess.run(["sh", "-c", f"{command} <&- >&- 2>&-"], check=False).returncode == 0
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")


def test_shardios_warnings_are_shown_without_their_location(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1, width=8, height=8)
    (tmp_path / "in" / "class-0" / "a.heic").touch()
    done = run_python("-m", "shardio", "bench", tmp_path / "in", "--num-workers", "0", "--json")
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {tmp_path}/in: left out images in other formats (1 .heic): ")
    assert done.stderr.count("\n") == 1
