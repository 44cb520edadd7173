"""Open an image's bytes as a picture, with the first decoder that reads them."""

from __future__ import annotations

from collections.abc import Callable

from shardio.images.by_libjpeg import open_by_libjpeg
from shardio.images.orientation import Orientation
from shardio.images.pictures import DEFAULT_MAX_PIXELS, Picture

_OPENERS: tuple[Callable[[bytes, Orientation, int], Picture | None], ...] = (open_by_libjpeg,)
"""Decoders, tried in this order. Each returns None for images that it does not read. Pillow opens the others.

To add a decoder, add its function here and its name to :data:`shardio.images.pictures.DecoderName`.
"""


def open_image(content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """Open an image of any common format.

    libjpeg-turbo decodes JPEGs. It refuses damaged data, and decodes only the parts that are read. Pillow decodes CMYK
    JPEGs and all other formats whole, with the pixels of its ``convert("RGB")``.

    Args:
        content: The bytes of an image file.
        orientation: Whether to apply the EXIF orientation. Pillow always applies that of TIFFs.
        max_pixels: The largest permitted number of pixels.

    Raises:
        ValueError: If the image is damaged, too large, or of an unknown format.
    """
    for open_picture in _OPENERS:
        if (picture := open_picture(content, orientation, max_pixels)) is not None:
            return picture
    from shardio.images.by_pillow import open_by_pillow  # Not before an image needs Pillow: see resizing.py.

    return open_by_pillow(content, orientation, max_pixels)
