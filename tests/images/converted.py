"""Images of every mode that Pillow writes, and what they are converted to."""

from __future__ import annotations

import io
import zlib
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from shardio.images import ConvertedFormat
from shardio.images.converting import convert_image
from tests.images.pictures import make_picture

HEIGHT, WIDTH = 30, 44
PIXELS = make_picture(HEIGHT, WIDTH)
SMOOTH = np.asarray(Image.fromarray(make_picture(5, 6)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.uint8)
ALPHA = make_picture(HEIGHT, WIDTH, seed=1)[..., :1]
OPAQUE = np.full_like(ALPHA, 255)
WIDE = PIXELS[..., 0].astype(np.uint16) * 257
INDICES = PIXELS[..., 0] % 7
FORMATS: tuple[ConvertedFormat, ...] = get_args(ConvertedFormat)

KEPT_BY_PNG = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}


def make_palette(transparency: int | None = None) -> Image.Image:
    """Return an image of seven colours, one of which may be transparent."""
    image = Image.fromarray(INDICES, "P")
    image.putpalette(make_picture(1, 7, seed=3).tobytes())
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


IMAGES: dict[str, tuple[Image.Image, list[str]]] = {
    "one bit": (Image.fromarray(PIXELS[..., 0] > 128), ["TIFF", "PNG", "BMP", "TGA", "PPM"]),
    "gray": (Image.fromarray(PIXELS[..., 0].copy()), ["TIFF", "PNG", "BMP", "TGA", "PPM", "JPEG", "GIF", "JPEG2000"]),
    "gray, alpha": (Image.fromarray(np.dstack([PIXELS[..., :1], ALPHA]), "LA"), ["TIFF", "PNG", "TGA"]),
    "palette": (make_palette(), ["TIFF", "PNG", "BMP", "GIF", "TGA", "PCX"]),
    "palette, transparent": (make_palette(transparency=3), ["PNG", "GIF"]),
    "RGB": (Image.fromarray(PIXELS), ["TIFF", "PNG", "BMP", "TGA", "PPM", "WEBP", "JPEG", "JPEG2000"]),
    "RGBA": (Image.fromarray(np.dstack([PIXELS, ALPHA])), ["TIFF", "PNG", "WEBP", "TGA", "DDS"]),
    "CMYK": (Image.fromarray(np.dstack([PIXELS, ALPHA]), "CMYK"), ["TIFF", "JPEG"]),
    "YCbCr": (Image.fromarray(PIXELS, "YCbCr"), ["TIFF"]),
    "LAB": (Image.fromarray(PIXELS, "LAB"), ["TIFF"]),
    "16 bits": (Image.fromarray(WIDE), ["TIFF", "PNG", "PPM"]),
    "16 bits, big-endian": (Image.frombytes("I;16B", (WIDTH, HEIGHT), WIDE.astype(">u2").tobytes()), ["TIFF"]),
    "32 bits": (Image.fromarray(WIDE.astype(np.int32)), ["TIFF"]),
}
CASES = [(name, source) for name, (_, sources) in IMAGES.items() for source in sources]


def convert(content: bytes, to: ConvertedFormat, **options: Any) -> bytes:
    """Convert an image at quality 95 unless the options say otherwise."""
    return convert_image(content, to, **{"quality": 95, **options})


def open_image(content: bytes) -> Image.Image:
    """Decode an image by Pillow."""
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def values_of(image: Image.Image) -> NDArray[Any]:
    """Return an image's values in native byte order."""
    values = np.asarray(image)
    return values.astype(values.dtype.newbyteorder("="))


def replace_chunk(content: bytes, name: bytes, data: bytes) -> bytes:
    """Return a PNG with other data in its first chunk of a name."""
    start = content.index(name) - 4
    stop = start + 12 + int.from_bytes(content[start : start + 4], "big")
    chunk = len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")
    return content[:start] + chunk + content[stop:]


def same(one: Image.Image | ArrayLike, other: Image.Image | ArrayLike) -> bool:
    """Return whether two images have the same shape and values."""
    return np.array_equal(np.asarray(one), np.asarray(other))
