"""Every image format passes the conformance tests in all its modes, and no format is found for other content."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardio.datasets import map_datasets
from shardio.decoding import codecs
from shardio.images import IMAGE_FORMATS, DecodedPicture, Orientation, Pixels, formats, opening, read_format
from shardio.images.pictures import Picture, check_size
from shardio.images.tiling import tile_jpeg
from shardio.testing.image_format import ImageFormatTests
from tests.images.pictures import make_picture, save

PICTURE = Image.fromarray(make_picture(33, 47))
FILES: dict[str, tuple[str, Any]] = {
    **{suffix: (suffix, lambda suffix=suffix: save(PICTURE, IMAGE_FORMATS[suffix])) for suffix in IMAGE_FORMATS},
    "gray JPEG": ("jpg", lambda: save(PICTURE.convert("L"), "JPEG")),
    "CMYK JPEG": ("jpg", lambda: save(PICTURE.convert("CMYK"), "JPEG")),
    "progressive JPEG": ("jpg", lambda: save(PICTURE, "JPEG", progressive=True)),
    "tiled JPEG": ("jpg", lambda: tile_jpeg(save(make_picture(133, 247), "JPEG"))),
    "PNG with alpha": ("png", lambda: save(PICTURE.convert("RGBA"), "PNG")),
    "palette": ("png", lambda: save(PICTURE.quantize(16), "PNG")),
    "lossless WebP": ("webp", lambda: save(PICTURE, "WEBP", lossless=True)),
}


class TestFormats(ImageFormatTests):
    @pytest.fixture(params=FILES)
    def file(self, request: pytest.FixtureRequest) -> tuple[str, bytes]:
        suffix, make = FILES[request.param]
        return suffix, make()

    @pytest.fixture
    def suffix(self, file: tuple[str, bytes]) -> str:
        return file[0]

    @pytest.fixture
    def content(self, file: tuple[str, bytes]) -> bytes:
        return file[1]


def open_farbfeld(content: bytes, orientation: Orientation, max_pixels: int) -> Picture | None:
    if not content.startswith(b"farbfeld"):
        return None
    width, height = (int.from_bytes(content[start : start + 4], "big") for start in (8, 12))
    check_size(height, width, max_pixels)
    values = np.frombuffer(content, np.uint8, offset=16).reshape(height, width, 4, 2)
    return DecodedPicture(np.ascontiguousarray(values[:, :, :3, 0]), "pillow")


class TestFormatThatPillowLacks(ImageFormatTests):
    @pytest.fixture(autouse=True)
    def _added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        added = formats.ImageFormat("FARBFELD", ("ff",), re.compile(rb"farbfeld"))
        monkeypatch.setattr(formats, "_FORMATS", (*formats._FORMATS, added))
        monkeypatch.setitem(IMAGE_FORMATS, "ff", "FARBFELD")
        monkeypatch.setattr(map_datasets, "IMAGE_FIELDS", ("ff",))
        monkeypatch.setitem(codecs._STORED_FIELDS, "image", ("ff",))
        monkeypatch.setattr(opening, "_OPENERS", (*opening._OPENERS, open_farbfeld))

    @pytest.fixture
    def suffix(self) -> str:
        return "ff"

    @pytest.fixture
    def pixels(self) -> Pixels:
        return make_picture(33, 47)

    @pytest.fixture
    def content(self, pixels: Pixels) -> bytes:
        height, width, _ = pixels.shape
        values = np.full((height, width, 4, 2), 255, np.uint8)
        values[:, :, :3] = pixels[..., None]
        return b"".join([b"farbfeld", width.to_bytes(4, "big"), height.to_bytes(4, "big"), values.tobytes()])


@pytest.mark.parametrize("file_format", ["GIF", "TGA", "JPEG2000", "JPEG", "PNG", "WEBP"])
def test_formats_without_a_suffix_are_named_and_headers_of_common_ones_suffice(
    tmp_path: Path, file_format: str
) -> None:
    content = save(make_picture(60, 80), file_format)
    (tmp_path / "a.png").write_bytes(content[:64] if file_format in ("JPEG", "PNG", "WEBP") else content)
    assert read_format(tmp_path / "a.png") == file_format


def test_content_that_is_not_an_image_has_no_format(tmp_path: Path) -> None:
    others = [
        *(b"", b"\x00", b"\xff\xd8", b"no image at all, whatever it is called\n" * 10, b"RIFF\x00\x00\x00\x00WAVEfmt "),
        *(b"%PDF-1.7\n", bytes(range(256)), b"BM is how this text begins, which no bitmap does\n"),
    ]
    for content, name in itertools.product(others, ("a.jpg", "a.png", "a.bmp", "a.txt")):
        (tmp_path / name).write_bytes(content)
        assert read_format(tmp_path / name) is None
    for byte_order in (b"II*\x00", b"MM\x00*"):
        (tmp_path / "a.tif").write_bytes(byte_order + bytes(20))
        assert read_format(tmp_path / "a.tif") == "TIFF"
    with pytest.raises(FileNotFoundError):
        read_format(tmp_path / "missing.jpg")
