"""Whole images match those of other decoders, and are upright on request. Damaged and huge images raise errors."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import cv2
import numpy as np
import PIL.Image
import pytest
import simplejpeg
from PIL import Image, features

from shardio.images import (
    DECODER_DESCRIPTIONS,
    DEFAULT_MAX_PIXELS,
    CropPlan,
    DecoderName,
    Orientation,
    decode_image,
    decode_pil,
    open_image,
    opening,
    render_chunk,
    why_not_by_kernel,
)
from shardio.images.formats import decode_by_opencv, is_for_opencv
from shardio.images.tiling import tile_jpeg
from tests.images.jpeg_files import by_cv2, noise
from tests.images.pictures import SIZES, Array, exif_of, make_picture, read_by_pillow, save
from tests.images.stored_values import chunk, make_values, write_png
from tests.raising import assert_raises

JPEGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True},
    "restarts": {"restart_marker_blocks": 3},
    "low quality": {"quality": 10},
    "stored as RGB": {"keep_rgb": True, "quality": 95},
}
RARE = {"4:4:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440, "4:1:1": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411}
PICTURE = make_picture(33, 47)
IMAGE = Image.fromarray(PICTURE)
NO_IMAGES = [b"", b"\xff", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0" + bytes(100), b"\x89PNG\r\n\x1a\n", b"no image" * 50]

each_choice = pytest.mark.parametrize("orientation", ["ignore", "apply"])


@pytest.mark.parametrize("size", SIZES)
def test_jpegs_decode_to_the_pixels_of_pillow_and_of_opencv(size: tuple[int, int]) -> None:
    picture = make_picture(*size)
    files = {name: save(picture, "JPEG", **options) for name, options in JPEGS.items()}
    files |= {name: by_cv2(picture, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, value) for name, value in RARE.items()}
    gray = Image.fromarray(picture).convert("L")
    files |= {"gray": save(gray, "JPEG"), "progressive gray": save(gray, "JPEG", progressive=True)}
    for name, content in files.items():
        decoded = decode_image(content)
        np.testing.assert_array_equal(decoded, read_by_pillow(content), name)
        by_opencv: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
        if name not in RARE:
            np.testing.assert_array_equal(decoded, by_opencv[..., ::-1], name)
    for file_format in ("PNG", "BMP", "TIFF", "PPM"):
        np.testing.assert_array_equal(decode_image(save(picture, file_format)), picture, file_format)


@pytest.mark.parametrize("name", ["sequential", "progressive"])  # Processes SOF9 and SOF10.
def test_arithmetic_coding_needs_no_pillow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow may be built without arithmetic coding, and the kernel does not support it."""
    content = Path(__file__).with_name(f"arithmetic-{name}.jpg").read_bytes()
    expected = simplejpeg.decode_jpeg(content)
    monkeypatch.setattr(Image, "open", None)
    picture = open_image(content)
    assert picture.decoder_name == "libjpeg"
    np.testing.assert_array_equal(decode_image(content), expected)
    plan = CropPlan.whole(np.array([picture.size])).crop(np.array([[3, 5, 16, 8]]))
    np.testing.assert_array_equal(render_chunk([picture], plan).images[0], expected[3:19, 5:13])
    assert str(why_not_by_kernel(content)).startswith("coded by process SOF")


def test_every_decoder_has_a_description_and_the_default_limit_is_pillows() -> None:
    assert set(DECODER_DESCRIPTIONS) == set(get_args(DecoderName))
    assert 2 * (PIL.Image.MAX_IMAGE_PIXELS or 0) == DEFAULT_MAX_PIXELS, "Pillow warns at half as many pixels"


# PNGs, which OpenCV or Pillow decodes, and other formats


def _with_chunk(name: bytes, data: bytes) -> bytes:
    content = save(noise(20, 30), "PNG")
    return content[:33] + chunk(name, data) + content[33:]


RGB, RGBA = noise(41, 67), np.dstack([noise(41, 67), noise(41, 67)[..., :1]])

BY_OPENCV = {
    "PNG": save(RGB, "PNG"),
    "smooth PNG": save(make_picture(60, 50), "PNG", optimize=True),
    "PNG with transparency": save(RGBA, "PNG"),
    "PNG with a transparent color": save(RGB, "PNG", transparency=tuple(RGB[0, 0].tolist())),
    "PNG with gamma": _with_chunk(b"gAMA", struct.pack(">I", 100_000)),
    "PNG with sRGB": _with_chunk(b"sRGB", b"\0"),
    "PNG with few significant bits": _with_chunk(b"sBIT", b"\5\6\5"),
    "PNG with a background": _with_chunk(b"bKGD", b"\0\1\0\2\0\3"),
    "PNG with an unknown chunk": _with_chunk(b"abCd", b"hello"),
    "turned PNG": save(RGB, "PNG", exif=exif_of(6)),
    "PNG with chromaticities": _with_chunk(b"cHRM", struct.pack(">8I", *range(1, 9))),
    "PNG with a color profile": save(RGB, "PNG", icc_profile=b"abc" * 50),
}
BY_PILLOW = {
    **{f"PNG of mode {mode}": save(IMAGE.convert(mode), "PNG") for mode in ("L", "LA", "P", "1")},
    "gray PNG of 16 bits": save(Image.fromarray(PICTURE[..., 0].astype(np.uint16) * 257), "PNG"),
    "PNG of 16 bits": write_png(make_values("uint16", 6, 5, 3)),
    "PNG of a transparent palette": save(IMAGE.quantize(16), "PNG", transparency=3),
    "animated PNG": save(RGB, "PNG", save_all=True, append_images=[Image.fromarray(RGB[::-1])]),
    "lossy WebP": save(RGB, "WEBP", quality=80),
    "lossless WebP": save(RGB, "WEBP", lossless=True),
    "BMP": save(RGB, "BMP"),
    "GIF": save(PICTURE, "GIF"),
    "LZW TIFF": save(PICTURE, "TIFF", compression="tiff_lzw"),
    "CMYK JPEG": save(IMAGE.convert("CMYK"), "JPEG"),
    "CMYK TIFF": save(IMAGE.convert("CMYK"), "TIFF"),
}


def _is_for_opencv(content: bytes) -> bool:
    with Image.open(io.BytesIO(content)) as image:
        return is_for_opencv(image, content)


@pytest.mark.parametrize("name", BY_OPENCV)
def test_opencv_decodes_these_to_pillows_pixels(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = BY_OPENCV[name]
    assert _is_for_opencv(content)
    expected = read_by_pillow(content)
    np.testing.assert_array_equal(decode_by_opencv(content), expected)
    np.testing.assert_array_equal(decode_image(content), expected)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", BY_PILLOW)
def test_pillow_decodes_all_others(name: str) -> None:
    content = BY_PILLOW[name]
    assert not _is_for_opencv(content)
    with mock.patch.object(opening, "decode_by_opencv", side_effect=AssertionError):
        np.testing.assert_array_equal(decode_image(content), read_by_pillow(content))


def test_interlaced_pngs_are_left_to_pillow() -> None:
    content = BY_OPENCV["PNG"]
    assert not _is_for_opencv(content[:8] + chunk(b"IHDR", content[16:28] + b"\1") + content[33:])


def _decode_or_say_why(content: bytes) -> Array | str:
    try:
        return decode_image(content)
    except ValueError as error:
        return str(error)


def test_a_damaged_image_has_pillows_pixels_or_error(capfd: pytest.CaptureFixture[str]) -> None:
    random, content = np.random.default_rng(0), BY_OPENCV["PNG"]
    for number in range(300):
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
    content = save(pixels, "PNG")
    assert decode_by_opencv(content) is None
    np.testing.assert_array_equal(decode_image(content), pixels)


# Orientation.


@pytest.mark.parametrize(
    ("tag", "field_type"), [(296, 2), (270, 11), (282, 2)], ids=["text as unit", "float as text", "text as resolution"]
)
def test_another_tag_of_a_wrong_type_does_not_hide_the_orientation(tag: int, field_type: int) -> None:
    """Cameras and editors write such tags, of which only the orientation matters."""
    entries = [(274, 3, 1, struct.pack("<HH", 6, 0)), (tag, field_type, 1, struct.pack("<f", 1))]
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries))
    exif += b"".join(struct.pack("<HHI4s", *entry) for entry in entries) + struct.pack("<I", 0)
    content = save(PICTURE, "JPEG", exif=exif)
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), np.rot90(decode_image(content), -1))


# Damage.


@each_choice
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_truncated_or_pierced_jpeg_never_gives_pixels(mode: str, orientation: Orientation) -> None:
    for progressive in (False, True):
        content = save(Image.fromarray(make_picture(110, 150)).convert(mode), "JPEG", progressive=progressive)
        stops = [*range(0, len(content) - 2, 97), len(content) - 2, len(content) - 1]
        assert len(stops) > 20
        middle = len(content) // 2
        holes = [content[:middle] + content[middle + 50 :]] if mode == "RGB" else []
        for damaged in [*holes, *(content[:stop] for stop in stops)]:
            assert_raises(ValueError, ".+", decode_image, damaged, orientation=orientation)


@pytest.mark.skipif("avif" not in features.get_supported(), reason="this Pillow was built without AVIF")
def test_a_damaged_avif_is_a_value_error() -> None:
    content = save(make_picture(60, 80), "AVIF")
    start = content.index(b"mdat") + 4
    assert_raises(ValueError, ".+", decode_image, content[:start] + bytes(len(content) - start))


@each_choice
@pytest.mark.parametrize("decode", [decode_image, decode_pil])
def test_content_that_is_not_an_image_is_a_value_error(decode: Callable[..., Any], orientation: Orientation) -> None:
    random = [b"\xff\xd8\xff" + np.random.default_rng(seed).bytes(500) for seed in range(20)]
    for content in [*NO_IMAGES, *random]:
        assert_raises(ValueError, ".+", decode, content, orientation=orientation)


# Files that claim to be huge are rejected before memory is allocated for them.

TOO_LARGE = "max_pixels|decompression bomb"
"""The error for a file that claims to be huge. For the largest files, Pillow raises the error."""


def _bombs(height: int, width: int) -> dict[str, bytes]:
    """Return small files whose headers claim a given size."""
    picture = make_picture(20, 30)
    png, jpeg = save(picture, "PNG"), save(picture, "JPEG")
    header = struct.pack(">II", width, height) + png[24:29]
    tiff = bytearray(save(picture, "TIFF", compression="raw"))
    directory = struct.unpack_from("<I", tiff, 4)[0]
    (count,) = struct.unpack_from("<H", tiff, directory)
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, _ = struct.unpack_from("<HHI", tiff, entry)
        if tag in (256, 257):  # ImageWidth, ImageLength (TIFF 6.0)
            struct.pack_into("<H" if kind == 3 else "<I", tiff, entry + 8, width if tag == 256 else height)
    bitmap = bytearray(save(picture, "BMP"))
    struct.pack_into("<ii", bitmap, 18, width, height)
    claim = rb"\g<1>" + struct.pack(">HH", height, width)
    jpegs = {
        "jpeg": jpeg,
        "tiled jpeg": tile_jpeg(jpeg),
        "gray jpeg": save(picture[..., 0].copy(), "JPEG"),
        "progressive jpeg": save(picture, "JPEG", progressive=True),
        "cmyk jpeg": save(Image.fromarray(picture).convert("CMYK"), "JPEG"),
        "turned jpeg": save(picture, "JPEG", exif=exif_of(6)),
    }
    return {
        **{name: re.sub(rb"(\xff[\xc0\xc2]\0.\x08)\0.\0.", claim, content) for name, content in jpegs.items()},
        "png": png[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + png[33:],
        "tiff": bytes(tiff),
        "bmp": bytes(bitmap),
        "gif": b"GIF89a" + struct.pack("<HH", width, height) + save(picture, "GIF")[10:],
    }


def refuse(bombs: dict[str, bytes], message: str, **options: Any) -> None:
    for content in bombs.values():
        assert_raises(ValueError, message, open_image, content, **options)


@each_choice
@pytest.mark.parametrize(
    ("side", "options", "message"),
    [(65500, {}, TOO_LARGE), (4000, {"max_pixels": 10**6}, "4000×4000 pixels, more than max_pixels=1000000")],
)
def test_small_files_of_huge_claims(side: int, options: dict[str, Any], message: str, orientation: Orientation) -> None:
    refuse(_bombs(side, side), message, orientation=orientation, **options)


REFUSE = """
import resource
from pathlib import Path
from tests.images import test_decode
bombs = test_decode._bombs(65500, 65500)
limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 100 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
test_decode.refuse(bombs, test_decode.TOO_LARGE)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the address space from /proc")
def test_no_memory_is_allocated_for_the_claimed_size() -> None:
    subprocess.run([sys.executable, "-c", REFUSE], check=True, timeout=120, cwd=Path(__file__).parents[2])
