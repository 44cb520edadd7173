"""Image formats: names, suffixes, signatures, PNG chunks, and the errors that readers raise."""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.standard import JPEG_START
from shardio.process import let_through

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

IHDR = struct.Struct(">IIBBBBB")
"""The data of the first chunk: width, height, bit depth, colour type, compression, filter, interlace (11.2.1)."""

COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""The colour type of gray, gray and alpha, RGB, RGBA, by the number of channels."""

_CHUNK_HEAD = struct.Struct(">I4s")

_CRITICAL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))

_PAETH = 4


class _Format(NamedTuple):
    name: str
    suffixes: tuple[str, ...]
    signature: re.Pattern[bytes] | None


_FORMATS = (
    _Format("JPEG", ("jpg", "jpeg"), re.compile(re.escape(JPEG_START))),
    _Format("PNG", ("png",), re.compile(re.escape(PNG_SIGNATURE))),
    _Format("WEBP", ("webp",), re.compile(rb"RIFF.{4}WEBP", re.DOTALL)),
    _Format("BMP", ("bmp",), None),
    _Format("TIFF", ("tif", "tiff"), re.compile(rb"II\*\x00|MM\x00\*")),
    _Format("PPM", ("ppm", "pgm"), None),
)
"""The formats that shardio packs and reads: Pillow's name, the suffixes and the file signature of each.

To add a format that Pillow reads, add a line here. Without a signature, Pillow identifies the format, more slowly.
"""

IMAGE_FORMATS = {suffix: image_format.name for image_format in _FORMATS for suffix in image_format.suffixes}
"""The format of each suffix. The suffix is also the name of the sample's field."""

IMAGE_FIELDS = tuple(IMAGE_FORMATS)
"""The fields that contain an image."""

UNCOMPRESSED = frozenset(("bmp", "ppm", "pgm"))
"""Fields of formats that are hardly ever compressed."""

_CAMERA_IMAGES = ("arw", "cr2", "cr3", "dng", "heic", "heif", "hif", "nef")

_JPEG_VARIANTS = ("j2k", "jfif", "jp2", "jpe", "jpf", "jpx", "jxl")

_FURTHER_IMAGES = ("avif", "dib", "gif", "ico", "pbm", "pcx", "pnm", "qoi", "svg", "tga")

_OTHER_IMAGES = frozenset((*_CAMERA_IMAGES, *_JPEG_VARIANTS, *_FURTHER_IMAGES)).difference(IMAGE_FORMATS)
"""Suffixes of image formats that shardio neither packs nor reads."""

ConvertedFormat = Literal["jpeg", "png", "webp"]
"""The formats that images can be converted to."""

CONVERTIBLE = frozenset(("avif", "dib", "gif", "ico", "j2k", "jfif", "jp2", "jpe", "jpf", "jpx")).union(
    ("pbm", "pcx", "pnm", "qoi", "tga")
)
"""Suffixes of further formats that Pillow reads. shardio packs such images only if it converts them."""


def is_convertible(field: str) -> bool:
    """Return whether a field holds images that may be converted: of any format, but not masks such as ``mask.png``."""
    return field == "image" or field in IMAGE_FORMATS or field in CONVERTIBLE


def holds_images(field: str) -> bool:
    """Return whether a field holds images: ``image``, for any format, or a name with an image's suffix."""
    return field == "image" or field.rpartition(".")[2] in IMAGE_FORMATS


def read_format(path: Path) -> str | None:
    """Return an image file's format (``"JPEG"``, ``"PNG"``, as Pillow names them), or None if it is not an image.

    Only the header is read. The file's name is ignored.
    """
    with path.open("rb") as file:
        return _find_format(file)


def find_format(content: bytes) -> str | None:
    """Return the format of an image file's bytes, as :func:`read_format` does."""
    return _find_format(io.BytesIO(content))


def find_field(content: bytes) -> str:
    """Return the name of the field for an image: its format's first suffix, or ``image`` if it has none."""
    found = find_format(content)
    return next((suffix for suffix, name in IMAGE_FORMATS.items() if name == found), "image")


def describe_other_images(paths: Iterable[Path]) -> str:
    """Return a message that counts the images in unsupported formats by suffix, or "" if there are none.

    Args:
        paths: The files that were left out.
    """
    counts = Counter(path.suffix.lower() for path in paths if path.suffix[1:].lower() in _OTHER_IMAGES)
    if not counts:
        return ""
    return (
        f"left out images in other formats ({', '.join(f'{counts[suffix]} {suffix}' for suffix in sorted(counts))}): "
        f"only .{', .'.join(IMAGE_FIELDS)} files are read. Convert the others, as shardio pack --convert-to does. If "
        "only a file's suffix is unusual (such as .jfif), rename it"
    )


def _find_format(file: BinaryIO) -> str | None:
    start = file.read(16)
    file.seek(0)
    for image_format in _FORMATS:
        if image_format.signature is not None and image_format.signature.match(start):
            return image_format.name
    import PIL.Image  # Not before an image needs it: see crop_plan.py.

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Decoding gives the same warnings again.
            with PIL.Image.open(file) as image:
                return image.format
    except pillow_errors() as error:  # Pillow's readers raise all of these for bytes that are not an image.
        let_through(error)
        return None


@cache
def pillow_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Pillow raises for damaged files.

    They do not include MemoryError, which says nothing about the file, or user classes, which a signal handler may
    raise.
    """
    import PIL.Image  # Not before an image needs it: see crop_plan.py.

    return (
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
        Warning,  # The user may turn warnings into errors.
        struct.error,
        zlib.error,
        PIL.Image.DecompressionBombError,
    )


@contextmanager
def errors_of_pillow() -> Iterator[None]:
    """Convert any error that Pillow raises for a damaged file to ValueError."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except pillow_errors() as error:
        let_through(error)
        if isinstance(error, ValueError):
            raise
        if isinstance(error, UnidentifiedImageError):  # Its message contains a memory address.
            raise ValueError("it is not an image in a known format") from error
        raise ValueError(str(error) or repr(error)) from error


def strip_png(content: bytes) -> bytes | None:
    """Return a PNG without the chunks that describe its pixels, such as profiles; None if any chunk is damaged.

    libpng prints warnings about such chunks, and OpenCV adds an alpha channel for a transparent colour. libpng also
    prints errors for damaged chunks, so this function compares their checksums.
    """
    view, offset = memoryview(content), len(PNG_SIGNATURE)
    kept: list[bytes | memoryview] = [PNG_SIGNATURE]
    while offset + 12 <= len(content):
        length, name = _CHUNK_HEAD.unpack_from(content, offset)
        stop = offset + 12 + length
        if stop > len(content) or zlib.crc32(view[offset + 4 : stop - 4]) != int.from_bytes(view[stop - 4 : stop]):
            return None
        if name in _CRITICAL_CHUNKS:
            kept.append(view[offset:stop])
        if name == b"IEND":
            return b"".join(kept)
        offset = stop
    return None


def encode_png(
    values: NDArray[Any], *, icc_profile: bytes | None = None, transparency: tuple[int, ...] | None = None
) -> bytes:
    """Encode values without loss as a PNG of 16 bits.

    Pillow cannot do this: its images have at most 8 bits of colour.

    Args:
        values: uint16 [height, width] or [height, width, channels], 1 to 4 channels.
        icc_profile: The colour profile.
        transparency: The transparent colour, one value for each channel.
    """
    height, width = values.shape[:2]
    num_channels = values.shape[2] if values.ndim == 3 else 1
    big_endian = np.ascontiguousarray(values.reshape(height, width * num_channels), ">u2")
    head = IHDR.pack(width, height, 16, COLOUR_TYPES[num_channels], 0, 0, 0)
    chunks = [_write_chunk(b"IHDR", head)]
    if icc_profile is not None:
        chunks.append(_write_chunk(b"iCCP", b"ICC Profile\0\0" + zlib.compress(icc_profile)))
    if transparency is not None:
        chunks.append(_write_chunk(b"tRNS", struct.pack(f">{num_channels}H", *transparency)))
    rows = _filter_by_paeth(big_endian.view(np.uint8), 2 * num_channels)
    chunks += [_write_chunk(b"IDAT", zlib.compress(rows)), _write_chunk(b"IEND", b"")]
    return PNG_SIGNATURE + b"".join(chunks)


def _write_chunk(name: bytes, data: bytes) -> bytes:
    return _CHUNK_HEAD.pack(len(data), name) + data + zlib.crc32(name + data).to_bytes(4)


def _filter_by_paeth(rows: NDArray[np.uint8], stride: int) -> bytes:
    """Filter rows of bytes by Paeth's predictor, with the bytes of a pixel ``stride`` apart (clause 9.4)."""
    padded = np.zeros((rows.shape[0] + 1, rows.shape[1] + stride), np.int16)
    padded[1:, stride:] = rows
    left, above, corner = padded[1:, :-stride], padded[:-1, stride:], padded[:-1, :-stride]
    by_left, by_above, by_corner = np.abs(above - corner), np.abs(left - corner), np.abs(left + above - 2 * corner)
    predicted = np.where(by_above <= by_corner, above, corner)
    predicted = np.where((by_left <= by_above) & (by_left <= by_corner), left, predicted)
    filtered = np.full((len(rows), rows.shape[1] + 1), _PAETH, np.uint8)
    filtered[:, 1:] = rows - predicted.astype(np.uint8)
    return filtered.tobytes()
