"""JPEG files for tests: the encoders that write them, the contents of their images, and their segments."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from tests.images.jpeg_writer import write_jpeg
from tests.images.pictures import Array, make_picture

Factors = tuple[tuple[int, int], ...]
BOTH = ("simplejpeg", "pillow")

GRAY: Factors = ((1, 1),)
SAMPLINGS: dict[str, Factors] = {
    "gray": GRAY,
    "4:4:4": ((1, 1), (1, 1), (1, 1)),
    "4:2:2": ((2, 1), (1, 1), (1, 1)),
    "4:4:0": ((1, 2), (1, 1), (1, 1)),
    "4:2:0": ((2, 2), (1, 1), (1, 1)),
    "4:1:1": ((4, 1), (1, 1), (1, 1)),
}
CV2_SAMPLINGS = {
    "4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "4:2:2": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "4:4:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    "4:1:1": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
}
PILLOW_SAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}

KNOWN_TO_TURBOJPEG = {
    *(((h, v), (h, v)) for h, v in [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)]),
    *((luma, (1, 1)) for luma in [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]),
    ((2, 2), (1, 2)),
    ((2, 2), (2, 1)),
}
"""The sampling factors of luma and of both chroma components that TurboJPEG's API, and so simplejpeg, supports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegFile:
    """A file (named after its feature), whether it can be tiled, and the libraries that support its sampling.

    A tileable file has SOF0, SOF1 or SOF2, 8 bits, and 1 or 3 components, all in one scan or, if the file is
    progressive, in a complete series of scans. The file has no DNL, its entropy-coded data contains every MCU, and EOI
    ends both the data and the file.
    """

    name: str
    content: bytes
    tileable: bool = True
    readers: tuple[str, ...] = BOTH


def readers_of(factors: Factors) -> tuple[str, ...]:
    if len(factors) == 1:
        return BOTH
    if any(max(column) % factor for column in zip(*factors, strict=True) for factor in column):
        return ()  # libjpeg: "Fractional sampling not implemented yet"
    known = factors[1] == factors[2] and factors[:2] in KNOWN_TO_TURBOJPEG
    return BOTH if known else ("pillow",)


def gray_or_color(factors: Factors, picture: Array) -> Array:
    return np.ascontiguousarray(picture[..., 0] if len(factors) == 1 else picture)


def make_jpeg(name: str, picture: Array, *, factors: Factors = SAMPLINGS["4:4:4"], **options: Any) -> JpegFile:
    content = write_jpeg(gray_or_color(factors, picture), factors=factors, **options)
    return JpegFile(name=name, content=content, readers=readers_of(factors))


def by_pillow(picture: Array, **options: Any) -> bytes:
    file = io.BytesIO()
    mode = "CMYK" if picture.shape[2:] == (4,) else None
    image = Image.fromarray(picture) if mode is None else Image.frombytes(mode, picture.shape[1::-1], picture.tobytes())
    image.save(file, "JPEG", **options)
    return file.getvalue()


def by_cv2(picture: Array, *options: int) -> bytes:
    """Encode with OpenCV, whose options alternate between names and values."""
    return cv2.imencode(".jpg", picture, list(options))[1].tobytes()


def by_simplejpeg(picture: Array, sampling: str, quality: int = 85) -> bytes:
    if sampling == "gray":
        return bytes(simplejpeg.encode_jpeg(picture[..., :1].copy(), quality, "GRAY", "Gray"))
    return bytes(simplejpeg.encode_jpeg(picture, quality, "RGB", sampling.replace(":", "")))


def flat(height: int, width: int) -> Array:
    return np.full((height, width, 3), (200, 90, 30), np.uint8)


def noise(height: int, width: int) -> Array:
    return np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def extremes(height: int, width: int) -> Array:
    """Return random black and white pixels, whose coefficients reach the limits of their range."""
    return np.where(noise(height, width) < 128, 0, 255).astype(np.uint8)


def waves(height: int, width: int) -> Array:
    """Return blocks whose pixels have the signs of a DCT basis function.

    These blocks have the largest possible coefficient at that function's frequency.
    """
    random = np.random.default_rng([2, height, width])
    rows, columns = np.indices((height, width))
    shape = (-(-height // 8), -(-width // 8))
    # Half of the frequencies are 0, so many blocks are flat, and many differences are large.
    v, u = random.integers(-7, 8, (2, *shape)).clip(0)
    sign = random.choice([-1, 1], shape)
    block = (rows // 8, columns // 8)
    down = np.cos((2 * (rows % 8) + 1) * v[block] * np.pi / 16)
    along = np.cos((2 * (columns % 8) + 1) * u[block] * np.pi / 16)
    return np.repeat(np.where(down * along * sign[block] > 0, 255, 0).astype(np.uint8)[..., None], 3, axis=2)


def chessboard(height: int, width: int) -> Array:
    """Return an image of the highest frequency, whose blocks have long runs of zeros before the last coefficient."""
    rows, columns = np.indices((height, width))
    return np.repeat(((rows + columns) % 2 * 40 + 100).astype(np.uint8)[..., None], 3, axis=2)


def split_picture(height: int, width: int) -> Array:
    """Return noise next to a single color, so that adjacent blocks differ greatly in length."""
    picture = flat(height, width)
    picture[:, width // 2 :] = noise(height, width)[:, width // 2 :]
    return picture


CONTENTS = {
    "photo": make_picture,
    "flat": flat,
    "noise": noise,
    "extremes": extremes,
    "waves": waves,
    "chessboard": chessboard,
    "split": split_picture,
}


def exif_with_thumbnail(thumbnail: bytes) -> bytes:
    first = struct.pack("<HHHIII", 1, 274, 3, 1, 6, 26)
    second = struct.pack("<HHHIIHHIII", 2, 0x201, 4, 1, 56, 0x202, 4, 1, len(thumbnail), 0)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + first + second + thumbnail


def segments_of(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each segment's type (its marker's second byte), its start and its end, up to the first scan's header."""
    start = 2
    while True:
        end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
        yield content[start + 1], start, end
        if content[start + 1] == 0xDA:
            return
        start = end


def patch(content: bytes, marker: int, offset: int, value: int) -> bytes:
    """Return the file with one byte changed, at the given offset in the payload of the first segment with the given
    marker."""
    index = next(start for kind, start, _ in segments_of(content) if kind == marker) + 4 + offset
    return content[:index] + bytes([value]) + content[index + 1 :]


def scan_start(content: bytes) -> int:
    return list(segments_of(content))[-1][2]
