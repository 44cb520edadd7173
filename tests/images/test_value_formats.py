"""A named field's image has exactly the values that its file stores, or decoding raises an error.

numpy, Pillow, OpenCV and the writer of the file are oracles.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shardio.images import ConvertedFormat, decode_image, decode_unconverted, decode_unconverted_pil
from shardio.images.formats import read_value_format
from tests.images.pictures import TURNS, convert, exif_of, open_by_pillow, save
from tests.images.stored_values import chunk, make_values, write_png, write_pnm, write_tiff
from tests.images.test_converting import CASES, IMAGES, make_palette
from tests.raising import assert_raises

SIZE = (9, 14)
TYPES = ["int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"]
COLORS = [(*SIZE, 3), (*SIZE, 4)]
NARROW = {"uint8", "int8"}


def _pnm(white: int, shape: tuple[int, ...], *, is_plain: bool) -> tuple[bytes, NDArray[Any]]:
    values = make_values("uint32", *shape) % (white + 1)
    return write_pnm(values, white, is_plain=is_plain), values.astype(np.uint8 if white < 256 else np.uint16)


def _tiff(dtype: str, shape: tuple[int, ...], **options: Any) -> tuple[bytes, NDArray[Any]]:
    return write_tiff(make_values(dtype, *shape), **options), make_values(dtype, *shape)


EXACT: dict[str, tuple[bytes, NDArray[Any]]] = {
    f"PNG {shape}": (write_png(make_values("uint16", *shape)), make_values("uint16", *shape))
    for shape in [SIZE, (*SIZE, 2), *COLORS]
}
for dtype, order in itertools.product(TYPES, "<>"):
    for shape in [SIZE, *(COLORS if dtype not in NARROW else COLORS[:1])]:
        EXACT[f"TIFF {dtype} {shape} {order}"] = _tiff(dtype, shape, order=order)
for white, shape, is_plain in itertools.product((20, 255, 1000, 65535), (SIZE, COLORS[0]), (False, True)):
    EXACT[f"PNM up to {white}{', plain' * is_plain} {shape}"] = _pnm(white, shape, is_plain=is_plain)
EXACT |= {
    "TIFF, deflated": _tiff("uint32", COLORS[0], deflates=True),
    "TIFF of 8 bits, unspecified fourth channel": _tiff("uint8", COLORS[1], extra=(0,)),
    "TIFF of 8 bits, multiplied by alpha": _tiff("uint8", COLORS[1], extra=(1,)),
    "TIFF of 16 bits, unspecified fourth channel": _tiff("uint16", COLORS[1], extra=(0,)),
}


def by_opencv(content: bytes) -> NDArray[Any]:
    values: NDArray[Any] | None = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    assert values is not None
    return values[..., [2, 1, 0, 3][: values.shape[2]]] if values.ndim == 3 else values


@pytest.mark.parametrize("name", EXACT)
def test_the_values_are_those_that_were_stored(name: str) -> None:
    content, stored = EXACT[name]
    found = decode_unconverted(content)
    expected = stored.astype(np.int32) if stored.dtype == np.int16 and stored.ndim == 2 else stored
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.dtype.isnative
    assert found.flags.writeable
    np.testing.assert_array_equal(found, expected)
    is_scaled_by_opencv = "up to 20, plain" in name
    if not is_scaled_by_opencv and (stored.ndim == 2 or stored.shape[2] >= 3):
        np.testing.assert_array_equal(found, by_opencv(content))
    if stored.dtype.itemsize > 4 or (stored.ndim == 3 and stored.dtype != np.uint8):
        with pytest.raises(ValueError, match=r"which a Pillow image cannot hold: use decode='array'"):
            decode_unconverted_pil(content)
    try:
        image = Image.open(io.BytesIO(content))
    except OSError:
        channels = "1 channel" if stored.ndim == 2 else f"{stored.shape[2]} channels"
        stores = f"it stores {channels} of {stored.dtype.name}, which cannot be converted to RGB"
        assert_raises(ValueError, stores, decode_image, content)
    else:
        np.testing.assert_array_equal(decode_image(content), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    ("name", "source"), [case for case in CASES if case[1] in ["PNG", "JPEG", "WEBP", "BMP", "TIFF"]]
)
def test_values_of_usual_images_are_those_of_numpy_and_pillow(name: str, source: str) -> None:
    image, content = IMAGES[name][0], save(IMAGES[name][0], source)
    expected = np.asarray(Image.open(io.BytesIO(content)))
    found = decode_unconverted(content)
    assert found.dtype == expected.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, expected)
    assert found.flags.writeable
    if source == "PNG":  # PNG is lossless, so these are the stored values.
        np.testing.assert_array_equal(found, np.asarray(image))
    pillow = decode_unconverted_pil(content)
    assert pillow.mode == Image.open(io.BytesIO(content)).mode
    np.testing.assert_array_equal(np.asarray(pillow), expected)
    if pillow.mode == "RGB":
        np.testing.assert_array_equal(found, decode_image(content))


INEXACT: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "TIFF of float16": ("float16", SIZE, {}),
    "TIFF of two channels": ("uint16", (*SIZE, 2), {}),
    "TIFF of two channels of 8 bits": ("uint8", (*SIZE, 2), {"extra": (0,)}),
    "TIFF of five channels": ("uint16", (*SIZE, 5), {}),
    "TIFF of five channels of 8 bits": ("uint8", (*SIZE, 5), {"extra": (0, 0)}),
    "TIFF of planes": ("uint16", (*SIZE, 3), {"planes": 2}),
    "TIFF of complex numbers": ("complex64", SIZE, {}),
    "TIFF of inverted bytes": ("int8", SIZE, {"photometric": 0}),
    "TIFF of CMYK of 16 bits": ("uint16", (*SIZE, 4), {"photometric": 5}),
}


@pytest.mark.parametrize("name", INEXACT)
def test_values_that_would_not_be_exact_are_refused(name: str) -> None:
    dtype, shape, options = INEXACT[name]
    content, _ = _tiff(dtype, shape, **options)
    assert_raises(ValueError, "in a form that none of shardio's decoders reads exactly", decode_unconverted, content)
    assert_raises(ValueError, "a Pillow image cannot hold", decode_unconverted_pil, content)
    formats: list[ConvertedFormat] = ["png", "jpeg", "webp"]
    pillow_takes_8_bits = any(word in name for word in ("8 bits", "CMYK", "planes"))
    for to in formats[: 1 if pillow_takes_8_bits else 3]:
        assert_raises(ValueError, r"stores|not an image in a known format", convert, content, to)


@pytest.mark.parametrize("orientation", TURNS)
def test_the_orientation_turns_values_of_every_type(orientation: int) -> None:
    values = make_values("uint16", *SIZE, 3)
    upright = TURNS[orientation](values)
    png = write_png(values, chunk(b"eXIf", exif_of(orientation).tobytes().removeprefix(b"Exif\0\0")))
    np.testing.assert_array_equal(decode_unconverted(png), values)
    np.testing.assert_array_equal(decode_unconverted(png, orientation="apply"), upright)
    np.testing.assert_array_equal(by_opencv(convert(write_tiff(values, orientation=orientation), "png")), upright)
    for dtype in ("uint16", "float64"):  # Pillow always turns TIFFs upright.
        tiff = write_tiff(values.astype(dtype), orientation=orientation)
        for option in ("ignore", "apply"):
            np.testing.assert_array_equal(decode_unconverted(tiff, orientation=option), upright)
    palette = save(make_palette(), "PNG", exif=exif_of(orientation))
    stored = np.asarray(make_palette())
    turned = TURNS[orientation](stored[..., np.newaxis])[..., 0]
    np.testing.assert_array_equal(decode_unconverted(palette), stored)
    np.testing.assert_array_equal(decode_unconverted(palette, orientation="apply"), turned)
    np.testing.assert_array_equal(np.asarray(decode_unconverted_pil(palette, orientation="apply")), turned)


def test_what_describes_the_pixels_of_a_png_does_not_change_them(capfd: pytest.CaptureFixture[str]) -> None:
    values = make_values("uint16", *SIZE, 3)
    for extra in (
        chunk(b"gAMA", (45_455).to_bytes(4, "big")),
        chunk(b"tRNS", values[0, 0].astype(">u2").tobytes()),
        chunk(b"iCCP", b"x\0\0no profile"),
        chunk(b"sBIT", b"\5\6\5"),
    ):
        np.testing.assert_array_equal(decode_unconverted(write_png(values, extra)), values)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("write", [write_png, write_tiff], ids=["PNG", "TIFF"])
def test_damaged_or_large_files_are_errors(write: Callable[..., bytes], capfd: pytest.CaptureFixture[str]) -> None:
    content = write(make_values("uint16", *SIZE, 3))
    for stop in range(0, len(content) - 12, 29):
        assert_raises(ValueError, ".+", decode_unconverted, content[:stop])
    files = (content, save(make_palette(), "PNG"))
    for decode, file in itertools.product((decode_unconverted, decode_unconverted_pil), files):
        assert_raises(ValueError, "more than max_pixels=125", decode, file, max_pixels=125)
        assert_raises(ValueError, ".+", decode, file[: len(file) // 2])
        assert_raises(ValueError, "it is not an image in a known format", decode, b"no image")
    for white, is_plain in itertools.product((20, 1000), (False, True)):
        content, _ = _pnm(white, SIZE, is_plain=is_plain)
        assert_raises(ValueError, "truncated or damaged: it declares 126 values", decode_unconverted, content[:-20])
    assert capfd.readouterr().err == "", "what libpng, libtiff and OpenCV print names no file"


@pytest.mark.parametrize("name", [name for name, (_, values) in EXACT.items() if values.dtype == np.uint16])
def test_a_conversion_to_png_keeps_16_bits(name: str) -> None:
    content, stored = EXACT[name]
    if "unspecified" in name:
        assert_raises(ValueError, "stores 4 channels of uint16, which PNG cannot store", convert, content, "png")
        return
    found = by_opencv(convert(content, "png"))
    if found.ndim == 3 and stored.shape[2:] == (2,):  # OpenCV copies gray to three channels.
        found = found[..., [0, 3]]
    scale = 65535 / 1000 if "1000" in name else 1  # Pillow scales Netpbm's values to the full range.
    np.testing.assert_array_equal(found, np.rint(stored * scale))
    if stored.ndim == 3 and stored.shape[2] != 2:
        np.testing.assert_array_equal(
            np.asarray(open_by_pillow(convert(content, "png")).convert("RGB")), found[..., :3] >> 8
        )


@pytest.mark.parametrize("to", ["jpeg", "webp"])
def test_lossy_formats_take_the_upper_8_bits_of_color_and_refuse_other_numbers(to: ConvertedFormat) -> None:
    values = make_values("uint16", *SIZE, 3)
    upper = (values >> 8).astype(np.uint8)
    assert convert(write_tiff(values), to) == convert(save(upper, "PNG"), to)
    for dtype in ("int8", "uint32", "float64"):
        assert_raises(ValueError, f"stores 1 channel of {dtype}", convert, write_tiff(make_values(dtype, *SIZE)), to)


def test_a_conversion_keeps_the_profile_and_the_transparent_color_of_16_bits() -> None:
    values = make_values("uint16", *SIZE, 3)
    other = save(Image.new("RGB", (2, 2)), "PNG", icc_profile=b"profile")
    profile = other[other.index(b"iCCP") - 4 : other.index(b"IDAT") - 4]
    # Packing does not convert a PNG, but ``convert`` encodes it again.
    content = write_png(values, profile, chunk(b"tRNS", values[0, 0].astype(">u2").tobytes()))
    found = open_by_pillow(convert(content, "png"))
    assert found.info["icc_profile"] == b"profile"
    assert found.info["transparency"] == tuple(values[0, 0].tolist())
    np.testing.assert_array_equal(decode_unconverted(convert(content, "png")), values)
    with pytest.raises(ValueError, match="more than 8 bits cannot be shrunk: leave out max_side"):
        convert(content, "png", max_side=10)
    assert_raises(ValueError, "more than 8 bits cannot be converted to sRGB", convert, content, "png", to_srgb=True)


def test_color_of_more_bits_in_jpeg_2000_and_avif_is_refused_where_it_would_lose_bits() -> None:
    for file_format in ("JPEG2000", "AVIF"):
        content = bytearray(save(make_values("uint8", 40, 30, 3), file_format))
        assert decode_unconverted(bytes(content)).shape == (40, 30, 3)
        if file_format == "AVIF":
            content[content.index(b"av1C") + 6] |= 0x40  # Set the flag for more than 8 bits; Pillow ignores it.
        else:
            start = content.index(b"\xff\x4f\xff\x51")
            content[start + 42 : start + 51 : 3] = bytes([11]) * 3
        assert getattr(read_value_format(bytes(content)), "shape", None) == (40, 30, 3)
        for decode in (decode_unconverted, lambda content: convert(content, "png")):
            assert_raises(ValueError, "3 channels of uint16", decode, bytes(content))
