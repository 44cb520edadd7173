from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from shardio.cli.main import app
from shardio.errors import PackError
from shardio.images.jpeg import has_tiles
from shardio.images.tiling import tile_jpeg, untile_jpeg
from tests.images.kernel_machines import _not_built, folder
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.tars import read_members

__all__ = ["_not_built", "folder"]

PLAIN = save(make_picture(70, 130), "JPEG")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(PLAIN)
    return path


def test_without_out_tile_only_reports(photo: Path) -> None:
    done = run("tile", photo)
    assert done.exit_code == 0
    assert f"{photo}: 130×70, no restart markers → 130×70, 15 tiles of 3 MCUs" in done.stdout
    assert "nothing was written" in done.stderr
    assert photo.read_bytes() == PLAIN
    assert [path.name for path in photo.parent.iterdir()] == ["photo.jpg"]


def test_tile_and_untile_write_the_files_to_out(photo: Path, tmp_path: Path) -> None:
    assert run("tile", photo, "--out", tmp_path / "tiled").exit_code == 0
    tiled = tmp_path / "tiled" / "photo.jpg"
    assert tiled.read_bytes() == tile_jpeg(PLAIN)
    done = run("untile", tiled, "--out", tmp_path / "plain")
    assert "15 tiles of 3 MCUs → 130×70, no restart markers" in done.stdout
    plain = (tmp_path / "plain" / "photo.jpg").read_bytes()
    assert plain == untile_jpeg(PLAIN)
    assert not has_tiles(plain)
    np.testing.assert_array_equal(read_by_pillow(plain), read_by_pillow(PLAIN))


def test_tile_shows_existing_restart_markers(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(save(make_picture(70, 130), "JPEG", restart_marker_blocks=7))
    assert "restart markers every 7 MCUs → " in run("tile", path).stdout


def test_a_file_that_cannot_be_tiled_is_reported_and_the_others_are_written(photo: Path, tmp_path: Path) -> None:
    progressive = tmp_path / "progressive.jpg"
    progressive.write_bytes(save(make_picture(70, 130), "JPEG", progressive=True))
    done = run("tile", progressive, photo, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert f"{progressive}: not rewritten: progressive" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["photo.jpg"]


def test_a_file_of_another_format_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.webp"
    path.write_bytes(save(make_picture(70, 130), "WEBP"))
    assert f"{path}: not rewritten: not a JPEG" in run("untile", path).stderr


def test_files_with_the_same_name_are_refused(photo: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").write_bytes(PLAIN)
    done = run("tile", photo, tmp_path / "other" / "photo.jpg", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "two files are named photo.jpg" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["tile", "untile"])
def test_an_original_is_never_overwritten(photo: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for out in tmp_path, tmp_path / "link":
        done = run(command, photo, "--out", out)
        assert done.exit_code == 2
        assert "would be overwritten" in " ".join(done.stderr.split())
    assert photo.read_bytes() == PLAIN


@pytest.mark.usefixtures("folder", "_not_built")
def test_without_compiled_functions_and_numba_the_error_says_what_to_install(
    photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    done = run("tile", photo)
    assert isinstance(done.exception, PackError)
    assert "pip install numba" in str(done.exception)


def test_pack_reports_how_many_jpegs_are_tiled_and_why_others_are_not(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.jpg").write_bytes(PLAIN)
    (source / "p.jpg").write_bytes(save(make_picture(70, 130), "JPEG", progressive=True))
    (source / "b.jpg").write_bytes(PLAIN[:-100])
    done = run("pack", source, tmp_path / "out", "--jpeg", "tile", "--no-check")
    assert done.exit_code == 0, done.output
    assert "JPEGs: 3 tiled; " in done.stdout
    assert "JPEGs stored unchanged: 2 (1 × " in done.stdout
    assert "1 × progressive" in done.stdout
    assert f"{source / 'b.jpg'} is damaged" in done.stderr
    assert "tiled    3 of 5 samples" in run("info", tmp_path / "out").stdout
    again = run("pack", source, tmp_path / "smaller", "--jpeg", "reencode", "--quality", 50, "--no-check")
    assert "JPEGs: 4 re-encoded and tiled; " in again.stdout


def test_a_damaged_header_is_reported_in_a_sentence(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jpg").write_bytes(PLAIN)
    (source / "b.jpg").write_bytes(PLAIN[:60])
    done = run("pack", source, tmp_path / "out", "--jpeg", "tile", "--no-check")
    assert f"{source / 'b.jpg'} has a damaged header (" in done.stderr


def test_reencode_accepts_a_size_and_a_quality(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(save(make_picture(300, 200), "JPEG"))
    arguments = ["--jpeg", "reencode", "--max-side", "100", "--quality", "50"]
    done = run("pack", tmp_path / "in", tmp_path / "out", *arguments)
    assert done.exit_code == 0, done.output
    assert "JPEGs: 1 re-encoded and tiled" in done.stdout
    stored = dict(read_members(tmp_path / "out" / "shard-000000.tar"))["a.jpg"]
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == (67, 100)


@pytest.mark.parametrize("arguments", [["--max-side", "100"], ["--jpeg", "tile", "--quality", "50"]])
def test_reencode_options_without_reencode_are_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "in").mkdir()
    done = run("pack", tmp_path / "in", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert "applies only with --jpeg reencode" in " ".join(done.stderr.replace("│", " ").split())
