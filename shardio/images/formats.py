"""Which format an image file has: by its first bytes, never by its name."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import BinaryIO

import PIL.Image

from shardio.images.errors_of_pillow import PILLOW_ERRORS
from shardio.images.jpeg.standard import JPEG_START
from shardio.interruptions import let_through

_SIGNATURES = {
    JPEG_START: "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
}


def read_format(path: Path) -> str | None:
    """Return an image file's format (``"JPEG"``, ``"PNG"``, as Pillow names them), or None if it is no image.

    Only the header is looked at.
    """
    with path.open("rb") as file:
        return _find_format(file)


def find_format(content: bytes) -> str | None:
    """Return the format of an image file's bytes, as :func:`read_format`."""
    return _find_format(io.BytesIO(content))


def _find_format(file: BinaryIO) -> str | None:
    start = file.read(16)
    file.seek(0)
    for signature, name in _SIGNATURES.items():
        if start.startswith(signature):
            return name
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What a header makes Pillow warn of comes up again at decoding.
            with PIL.Image.open(file) as image:
                return image.format
    except PILLOW_ERRORS as error:  # Whatever one of Pillow's many readers says, they are not its image's bytes.
        let_through(error)
        return None
