"""OpenCV decodes PNGs where its pixels are Pillow's."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from shardio.images import decode_image, opening
from shardio.images.value_formats import decode_by_opencv, is_for_opencv
from tests.images.jpeg_files import noise
from tests.images.pictures import Array, exif_of, make_picture, read_by_pillow


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _save(pixels: Array, file_format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, file_format, **options)
    return stream.getvalue()


def _with_chunk(name: bytes, data: bytes) -> bytes:
    """Return a PNG with another chunk, after its header."""
    content = _save(noise(20, 30), "PNG")
    return content[:33] + _chunk(name, data) + content[33:]


RGB, RGBA = noise(41, 67), np.dstack([noise(41, 67), noise(41, 67)[..., :1]])
GRAY, PALETTE = noise(41, 67)[..., 0].copy(), np.asarray(Image.fromarray(noise(41, 67)).quantize(64))

BY_OPENCV = {
    "PNG": _save(RGB, "PNG"),
    "smooth PNG": _save(make_picture(60, 50), "PNG", optimize=True),
    "PNG with transparency": _save(RGBA, "PNG"),
    "PNG with a transparent colour": _save(RGB, "PNG", transparency=tuple(RGB[0, 0].tolist())),
    "PNG with gamma": _with_chunk(b"gAMA", struct.pack(">I", 100_000)),
    "PNG with sRGB": _with_chunk(b"sRGB", b"\0"),
    "PNG with few significant bits": _with_chunk(b"sBIT", b"\5\6\5"),
    "PNG with a background": _with_chunk(b"bKGD", b"\0\1\0\2\0\3"),
    "PNG with an unknown chunk": _with_chunk(b"abCd", b"hello"),
    "turned PNG": _save(RGB, "PNG", exif=exif_of(6)),
    "PNG with chromaticities": _with_chunk(b"cHRM", struct.pack(">8I", *range(1, 9))),
    "PNG with a colour profile": _save(RGB, "PNG", icc_profile=b"abc" * 50),
}
BY_PILLOW = {
    "gray PNG": _save(GRAY, "PNG"),
    "PNG with a palette": _save(PALETTE, "PNG"),
    "animated PNG": _save(RGB, "PNG", save_all=True, append_images=[Image.fromarray(RGB[::-1])]),
    "lossy WebP": _save(RGB, "WEBP", quality=80),
    "lossless WebP": _save(RGB, "WEBP", lossless=True),
    "BMP": _save(RGB, "BMP"),
}


def _is_for_opencv(content: bytes) -> bool:
    with Image.open(io.BytesIO(content)) as image:
        return is_for_opencv(image, content)


@pytest.mark.parametrize("content", BY_OPENCV.values(), ids=BY_OPENCV)
def test_opencv_decodes_these_to_pillows_pixels(content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    assert _is_for_opencv(content)
    expected = read_by_pillow(content)
    np.testing.assert_array_equal(decode_by_opencv(content), expected)
    np.testing.assert_array_equal(decode_image(content), expected)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("content", BY_PILLOW.values(), ids=BY_PILLOW)
def test_pillow_decodes_all_others(content: bytes) -> None:
    assert not _is_for_opencv(content)
    with mock.patch.object(opening, "decode_by_opencv", side_effect=AssertionError):
        np.testing.assert_array_equal(decode_image(content), read_by_pillow(content))


def test_colours_of_16_bits_and_interlaced_pngs_are_left_to_pillow() -> None:
    pixels = np.random.default_rng(0).integers(0, 1 << 16, (6, 5, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    for depth, interlace in [(16, 0), (8, 1)]:
        head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 6, depth, 2, 0, 0, interlace))
        content = b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
        assert not _is_for_opencv(content)


def test_a_damaged_image_has_pillows_pixels_or_error(capfd: pytest.CaptureFixture[str]) -> None:
    """OpenCV refuses more files than Pillow, but never decodes one that Pillow refuses."""
    random, content = np.random.default_rng(0), BY_OPENCV["PNG"]
    for number in range(600):
        damaged = bytearray(content)
        if number % 3:
            damaged[random.integers(12, len(content))] ^= 1 << random.integers(8)
        else:
            del damaged[random.integers(30, len(content)) :]
        found = _decode_or_say_why(bytes(damaged))
        with mock.patch.object(opening, "is_for_opencv", return_value=False):
            expected = _decode_or_say_why(bytes(damaged))
        assert type(found) is type(expected), number
        np.testing.assert_array_equal(found, expected)
    assert capfd.readouterr().err == "", "libpng names no file"


def test_a_side_that_opencv_does_not_allow_is_left_to_pillow() -> None:
    pixels = np.zeros((1, (1 << 20) + 1, 3), np.uint8)
    pixels[0, -1] = 7
    content = _save(pixels, "PNG")
    assert decode_by_opencv(content) is None
    np.testing.assert_array_equal(decode_image(content), pixels)


def _decode_or_say_why(content: bytes) -> Array | str:
    try:
        return decode_image(content)
    except ValueError as error:
        return str(error)
