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


def test_a_campaign_reports_the_outcomes(photos: Path) -> None:
    done = run_python(SCRIPT, "--limit", 20, "--photos", photos, "--crops", 5, cwd=SCRIPT.parent)
    (line,) = done.stdout.splitlines()
    assert line.startswith("the laws hold for all 23 files in ")
    assert line.endswith(" s: 22 tiled, 1 progressive")


def test_a_file_that_breaks_a_law_is_named_and_saved(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(name: str, content: bytes) -> str:
        if name.endswith("B.JPEG"):
            raise AssertionError(f"{name}: a law does not hold")
        return check_file(name, content)

    monkeypatch.setattr(tile_campaign, "check_file", check)
    broken = tmp_path / "found.bin"
    with pytest.raises(typer.Exit) as exit_info:
        tile_campaign.main(photos=photos, corpus=False, broken=broken)
    assert exit_info.value.exit_code == 1
    assert "B.JPEG: a law does not hold" in capsys.readouterr().out
    assert broken.read_bytes() == (photos / "more" / "B.JPEG").read_bytes()


def test_a_crop_with_different_pixels_breaks_a_law(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_decode(*arguments: Any) -> Any:
        return crop_laws.full_decode(*arguments) ^ 1

    monkeypatch.setattr(tile_campaign, "full_decode", full_decode)
    with pytest.raises(typer.Exit) as exit_info:
        tile_campaign.main(photos=photos, corpus=False, crops=1, broken=tmp_path / "found.bin")
    assert exit_info.value.exit_code == 1
    assert "has other pixels" in capsys.readouterr().out


def test_a_crash_breaks_a_law(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(name: str, content: bytes) -> str:
        raise IndexError(f"{len(content)} bytes of {name} are out of bounds")

    monkeypatch.setattr(tile_campaign, "check_file", check)
    with pytest.raises(typer.Exit) as exit_info:
        tile_campaign.main(photos=photos, corpus=False, broken=tmp_path / "found.bin")
    assert exit_info.value.exit_code == 1
    output = capsys.readouterr().out
    assert "a.jpg" in output
    assert "IndexError" in output


def test_a_campaign_without_files_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_info:
        tile_campaign.main(photos=tmp_path, corpus=False)
    assert exit_info.value.exit_code == 2
    assert "no files" in capsys.readouterr().out


def _install_jpegtran(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Put a replacement for jpegtran first on the PATH."""
    program = folder / "jpegtran"
    program.write_text(f"#!{sys.executable}\nimport sys\ncontent = sys.stdin.buffer.read()\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


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
    answer: str,
    outcome: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contents = [path.read_bytes() for path in (photos / "a.jpg", photos / "more" / "B.JPEG")]
    (tmp_path / "tiled").write_bytes(pickle.dumps({content: tile_jpeg(content) for content in contents}))
    _install_jpegtran(tmp_path, monkeypatch, answer)
    tile_campaign.main(photos=photos, corpus=False, jpegtran=True)
    assert f"jpegtran: {outcome}; " in capsys.readouterr().out


def test_different_pixels_from_jpegtran_break_a_law(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").write_bytes(by_pillow(noise(8, 8)))
    answer = f"sys.stdout.buffer.write(open({str(tmp_path / 'other')!r}, 'rb').read())"
    _install_jpegtran(tmp_path, monkeypatch, answer)
    with pytest.raises(typer.Exit) as exit_info:
        tile_campaign.main(photos=photos, corpus=False, jpegtran=True, broken=tmp_path / "found.bin")
    assert exit_info.value.exit_code == 1
    assert "the pixels of jpegtran's file differ" in capsys.readouterr().out


def test_a_comparison_without_jpegtran_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(typer.Exit) as exit_info:
        tile_campaign.main(jpegtran=True)
    assert exit_info.value.exit_code == 2
    assert "libjpeg-turbo-progs" in capsys.readouterr().out
