"""Decode whole images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardio.images.jpeg.regions import Box
from shardio.images.opening import open_image
from shardio.images.orientation import Orientation
from shardio.images.pictures import DEFAULT_MAX_PIXELS
from shardio.images.pixels import Pixels

if TYPE_CHECKING:
    import PIL.Image


def decode_image(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> Pixels:
    """Decode a whole image of any common format to RGB. Arguments and errors are those of :func:`open_image`.

    Returns:
        uint8 [height, width, 3], contiguous and writable.
    """
    picture = open_image(content, orientation=orientation, max_pixels=max_pixels)
    return np.array(picture.read(Box(0, 0, *picture.size)))


def decode_pil(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> PIL.Image.Image:
    """Decode an image to a Pillow image in RGB, with the pixels and the errors of :func:`decode_image`."""
    import PIL.Image  # Not before an image needs it: see resizing.py.

    return PIL.Image.fromarray(decode_image(content, orientation=orientation, max_pixels=max_pixels))
