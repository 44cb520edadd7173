"""Image formats: names, suffixes and file signatures."""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from shardio.images.errors_of_pillow import pillow_errors
from shardio.images.jpeg.standard import JPEG_START
from shardio.interruptions import let_through


class _Format(NamedTuple):
    name: str
    suffixes: tuple[str, ...]
    signature: re.Pattern[bytes] | None


_FORMATS = (
    _Format("JPEG", ("jpg", "jpeg"), re.compile(re.escape(JPEG_START))),
    _Format("PNG", ("png",), re.compile(rb"\x89PNG\r\n\x1a\n")),
    _Format("WEBP", ("webp",), re.compile(rb"RIFF.{4}WEBP", re.DOTALL)),
    _Format("BMP", ("bmp",), None),
    _Format("TIFF", ("tif", "tiff"), re.compile(rb"II\*\x00|MM\x00\*")),
    _Format("PPM", ("ppm", "pgm"), None),
)
"""The formats that are packed and read: Pillow's name, the suffixes and the file signature of each.

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
"""Suffixes of image formats that are neither packed nor read."""


ConvertedFormat = Literal["jpeg", "png", "webp"]
"""The formats that images can be converted to."""

CONVERTIBLE = frozenset(("avif", "dib", "gif", "ico", "j2k", "jfif", "jp2", "jpe", "jpf", "jpx")).union(
    ("pbm", "pcx", "pnm", "qoi", "tga")
)
"""Suffixes of further formats that Pillow reads. Images in them are packed only if they are converted."""


def is_convertible(field: str) -> bool:
    """Return whether a field holds images that may be converted: any format's, but not masks such as ``mask.png``."""
    return field == "image" or field in IMAGE_FORMATS or field in CONVERTIBLE


def holds_images(field: str) -> bool:
    """Return whether a field holds images: ``image``, which is any format's, or a name with an image's suffix."""
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
    import PIL.Image  # Not before an image needs it: see resizing.py.

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Decoding gives the same warnings again.
            with PIL.Image.open(file) as image:
                return image.format
    except pillow_errors() as error:  # Pillow's readers raise all of these for bytes that are not an image.
        let_through(error)
        return None
