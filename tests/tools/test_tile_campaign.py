from __future__ import annotations

import os
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from shardio.images.tiling import tile_jpeg
from tests.images import crop_laws
from tests.images.jpeg_files import by_pillow, noise
from tests.images.tiling_laws import check_file
from tests.processes import run_python

# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
tile_campaign = import_module("tools.tile_campaign")

SCRIPT = Path(__file__).parents[2] / "tools" / "tile_campaign.py"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two baseline JPEGs and a progressive one in two folders, and a file that is not a JPEG."""
    (tmp_path / "more").mkdir()
    (tmp_path / "a.jpg").write_bytes(by_pillow(noise(40, 60)))
    (tmp_path / "more" / "B.JPEG").write_bytes(by_pillow(noise(50, 30)))
    (tmp_path / "more" / "c.jpeg").write_bytes(by_pillow(noise(50, 30), progressive=True))
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.fixture
def fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a campaign that fails; return what it prints."""

    def run(exit_code: int = 1, **options: Any) -> str:
        with pytest.raises(typer.Exit) as exit_info:
            tile_campaign.main(**{"photos": tmp_path, "corpus": False, "broken": tmp_path / "found.bin", **options})
        assert exit_info.value.exit_code == exit_code
        return capsys.readouterr().out

    return run


def install_jpegtran(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    program = folder / "jpegtran"
    program.write_text(f"#!{sys.executable}\nimport sys\ncontent = sys.stdin.buffer.read()\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
def test_a_campaign_reports_the_outcomes(photos: Path) -> None:
    done = run_python(SCRIPT, "--limit", 20, "--photos", photos, "--crops", 5, cwd=SCRIPT.parent)
    (line,) = done.stdout.splitlines()
    assert line.startswith("the laws hold for all 23 files in ")
    assert line.endswith(" s: 22 tiled, 1 progressive")


@pytest.mark.parametrize("error", [AssertionError("a law does not hold"), IndexError("it is out of bounds")])
def test_a_file_that_breaks_a_law_is_named_and_saved(
    photos: Path, fail: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def check(name: str, content: bytes) -> str:
        if name.endswith("B.JPEG"):
            raise type(error)(f"{name}: {error}")
        return check_file(name, content)

    monkeypatch.setattr(tile_campaign, "check_file", check)
    assert f"B.JPEG: {error}" in fail()
    assert (photos / "found.bin").read_bytes() == (photos / "more" / "B.JPEG").read_bytes()


@pytest.mark.usefixtures("photos")
def test_a_crop_with_different_pixels_breaks_a_law(fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_decode(*arguments: Any) -> Any:
        return crop_laws.full_decode(*arguments) ^ 1

    monkeypatch.setattr(tile_campaign, "full_decode", full_decode)
    assert "has other pixels" in fail(crops=1)


def test_a_campaign_without_files_or_without_jpegtran_is_refused(
    tmp_path: Path, fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no files" in fail(2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "libjpeg-turbo-progs" in fail(2, photos=None, corpus=True, jpegtran=True)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("sys.stdout.buffer.write(content)", "2 other scan, same pixels"),
        ("sys.exit(1)", "2 not read"),
        ("import pathlib, pickle\ntiled = pickle.loads(pathlib.Path(__file__).with_name('tiled').read_bytes())\n"
         "sys.stdout.buffer.write(tiled[content])", "2 same scan"),
    ],
    ids=["other scan", "not read", "same scan"],
)  # fmt: skip
def test_tiled_files_are_compared_with_jpegtrans(
    answer: str, outcome: str, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = [path.read_bytes() for path in (photos / "a.jpg", photos / "more" / "B.JPEG")]
    (photos / "tiled").write_bytes(pickle.dumps({content: tile_jpeg(content) for content in contents}))
    install_jpegtran(photos, monkeypatch, answer)
    tile_campaign.main(photos=photos, corpus=False, jpegtran=True)
    assert f"jpegtran: {outcome}; " in capsys.readouterr().out


def test_different_pixels_from_jpegtran_break_a_law(photos: Path, fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "other").write_bytes(by_pillow(noise(8, 8)))
    install_jpegtran(photos, monkeypatch, f"sys.stdout.buffer.write(open({str(photos / 'other')!r}, 'rb').read())")
    assert "the pixels of jpegtran's file differ" in fail(jpegtran=True)
