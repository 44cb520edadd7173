"""From an image's bytes to a picture: which decoder opens it."""

from __future__ import annotations

from collections.abc import Callable

from shardio.images.by_libjpeg import open_by_libjpeg
from shardio.images.by_pillow import open_by_pillow
from shardio.images.orientation import Orientation
from shardio.images.pictures import DEFAULT_MAX_PIXELS, Picture

_OPENERS: tuple[Callable[[bytes, Orientation, int], Picture | None], ...] = (open_by_libjpeg,)
"""Tried in this order. Each returns None for images that it does not read; Pillow opens those that are left.

Add a function here to add a decoder, and its name to :data:`shardio.images.pictures.DecoderName`.
"""


def open_image(content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """Open an image of any common format.

    libjpeg-turbo reads JPEGs, strictly, and only the parts that are asked for. Pillow reads CMYK JPEGs and all other
    formats whole, as its ``convert("RGB")`` does.

    Args:
        content: The bytes of an image file.
        orientation: Whether to honour the EXIF orientation. Pillow always turns TIFFs.
        max_pixels: An image with more pixels is an error.

    Raises:
        ValueError: If the image is damaged, too large, or of an unknown format.
    """
    for open_picture in _OPENERS:
        if (picture := open_picture(content, orientation, max_pixels)) is not None:
            return picture
    return open_by_pillow(content, orientation, max_pixels)
