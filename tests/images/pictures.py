"""Detailed pictures, and files of them written by Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.images import ConvertedFormat
from shardio.images.converting import convert_image

Array = NDArray[np.uint8]

SIZES = [(1, 1), (2, 2), (3, 5), (1, 17), (17, 1), (32, 48), (101, 67), (375, 500)]
"""Heights and widths: smaller than a block, odd, a single row or column, and those of a photograph."""

TURNS: dict[int, Any] = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.transpose(1, 0, 2),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].transpose(1, 0, 2),
    8: lambda image: np.rot90(image),
}
"""The function that turns an image upright, for each EXIF orientation (EXIF 2.3, tag 274)."""


def make_picture(height: int, width: int, seed: int = 0) -> Array:
    random = np.random.default_rng([seed, height, width])
    coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int64)
    noisy = smooth + random.integers(-20, 21, smooth.shape)
    return np.asarray(np.clip(noisy, 0, 255), dtype=np.uint8)


def save(image: Image.Image | Array, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, file_format, **options)
    return file.getvalue()


def read_by_pillow(content: bytes) -> Array:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def open_by_pillow(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def convert(content: bytes, to: ConvertedFormat, **options: Any) -> bytes:
    return convert_image(content, to, **{"quality": 95, **options})


def psnr_db(image: Image.Image | Array, other: Image.Image | Array) -> float:
    """Return the peak signal-to-noise ratio of two images of the same shape; similar images have a high ratio."""
    one, two = np.asarray(image), np.asarray(other)
    assert one.shape == two.shape
    error = np.mean((one.astype(float) - two) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif
