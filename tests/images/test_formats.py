"""Formats are found by content, never by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from shardio.images import IMAGE_FORMATS, read_format
from tests.images.pictures import make_picture, save

FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "TGA", "JPEG2000"]


@pytest.mark.parametrize("name", ["a", "a.txt", "a.png", "a.jpg", "a.webp"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_the_format_is_that_of_the_content_whatever_the_name(tmp_path: Path, file_format: str, name: str) -> None:
    (tmp_path / name).write_bytes(save(make_picture(20, 30), file_format))
    with Image.open(tmp_path / name) as image:
        assert read_format(tmp_path / name) == image.format == file_format


@pytest.mark.parametrize(("suffix", "promised"), IMAGE_FORMATS.items())
def test_a_suffix_promises_the_format_that_pillow_writes_under_it(tmp_path: Path, suffix: str, promised: str) -> None:
    Image.fromarray(make_picture(20, 30)).save(tmp_path / f"a.{suffix}")
    assert read_format(tmp_path / f"a.{suffix}") == promised


def test_both_byte_orders_of_tiff_are_known(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    for byte_order in (b"II*\x00", b"MM\x00*"):
        path.write_bytes(byte_order + bytes(20))
        assert read_format(path) == "TIFF"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"\xff\xd8",
        b"no image at all, whatever it is called\n" * 10,
        b"RIFF\x00\x00\x00\x00WAVEfmt ",
        b"%PDF-1.7\n",
        bytes(range(256)),
        b"BM is how this text begins, which no bitmap does\n",
    ],
)
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.txt"])
def test_content_that_is_not_an_image_has_no_format(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_format(tmp_path / name) is None


def test_only_the_header_is_read(tmp_path: Path) -> None:
    for file_format in ("JPEG", "PNG", "WEBP"):
        (tmp_path / "a").write_bytes(save(make_picture(60, 80), file_format)[:64])
        assert read_format(tmp_path / "a") == file_format


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_format(tmp_path / "a.jpg")
