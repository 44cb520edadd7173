"""Images are decoded to the values that their files store: those of numpy and Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest

from shardio.images import decode_image, decode_unconverted, decode_unconverted_pil

RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 256, (9, 14), np.uint8)
WIDE = RNG.integers(0, 1 << 16, (9, 14), np.uint16)
COLOURS = RNG.integers(0, 256, (9, 14, 4), np.uint8)


def make_palette() -> PIL.Image.Image:
    image = PIL.Image.fromarray(GREY % 7, "P")
    image.putpalette(RNG.integers(0, 256, 21, np.uint8).tolist())
    return image


IMAGES: dict[str, tuple[PIL.Image.Image, list[str]]] = {
    "grey": (PIL.Image.fromarray(GREY), ["PNG", "JPEG", "BMP", "TIFF"]),
    "palette": (make_palette(), ["PNG", "BMP", "TIFF"]),
    "16 bits": (PIL.Image.fromarray(WIDE), ["PNG", "TIFF"]),
    "one bit": (PIL.Image.fromarray(GREY > 99), ["PNG", "TIFF"]),
    "int32": (PIL.Image.fromarray(WIDE.astype(np.int32) - 9), ["TIFF"]),
    "float32": (PIL.Image.fromarray(WIDE.astype(np.float32) / 3), ["TIFF"]),
    "grey and alpha": (PIL.Image.fromarray(COLOURS[..., :2], "LA"), ["PNG"]),
    "alpha": (PIL.Image.fromarray(COLOURS), ["PNG", "WEBP", "TIFF"]),
    "colours": (PIL.Image.fromarray(COLOURS[..., :3]), ["PNG", "JPEG", "WEBP", "BMP", "TIFF"]),
    "CMYK": (PIL.Image.fromarray(COLOURS, "CMYK"), ["JPEG", "TIFF"]),
}
CASES = [(name, format_) for name, (_, formats) in IMAGES.items() for format_ in formats]


def save(image: PIL.Image.Image, format_: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


@pytest.mark.parametrize(("name", "format_"), CASES)
def test_values_are_those_of_numpy_and_pillow(name: str, format_: str) -> None:
    image, _ = IMAGES[name]
    content = save(image, format_)
    expected = np.asarray(PIL.Image.open(io.BytesIO(content)))
    found = decode_unconverted(content)
    assert (found.dtype, found.shape) == (expected.dtype.newbyteorder("="), expected.shape)
    assert np.array_equal(found, expected)
    assert found.flags.writeable
    if format_ == "PNG":  # Lossless, so these are the values that were stored.
        assert np.array_equal(found, np.asarray(image))
    pillow = decode_unconverted_pil(content)
    assert pillow.mode == PIL.Image.open(io.BytesIO(content)).mode
    assert np.array_equal(np.asarray(pillow), expected)
    if expected.ndim == 3 and expected.shape[2] == 3:
        assert np.array_equal(found, decode_image(content))


def test_big_endian_tiffs_become_native() -> None:
    content = save(PIL.Image.frombytes("I;16B", WIDE.shape[::-1], WIDE.astype(">u2").tobytes()), "TIFF")
    assert np.array_equal(decode_unconverted(content), WIDE)
    assert decode_unconverted(content).dtype.isnative


@pytest.mark.parametrize("name", ["palette", "colours"])
def test_the_orientation_is_applied_on_demand(name: str) -> None:
    image, _ = IMAGES[name]
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    content, stored = save(image, "PNG", exif=exif), np.asarray(image)
    assert np.array_equal(decode_unconverted(content), stored)
    assert np.array_equal(decode_unconverted(content, orientation="apply"), np.rot90(stored, -1))
    assert np.array_equal(np.asarray(decode_unconverted_pil(content, orientation="apply")), np.rot90(stored, -1))


@pytest.mark.parametrize("decode", [decode_unconverted, decode_unconverted_pil])
@pytest.mark.parametrize("name", ["grey", "colours"])
def test_bad_images_are_refused(name: str, decode: Any) -> None:
    content = save(IMAGES[name][0], "PNG")
    with pytest.raises(ValueError, match="14×9 pixels, more than max_pixels=125"):
        decode(content, max_pixels=125)
    decode(content, max_pixels=126)
    with pytest.raises(ValueError, match=r"truncated|broken|damaged"):
        decode(content[: len(content) // 2])
    with pytest.raises(ValueError, match="it is not an image in a known format"):
        decode(b"no image")
