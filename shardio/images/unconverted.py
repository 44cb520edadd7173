"""Decode whole images to what their files store, without a conversion to RGB: masks, depth maps, grey pictures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardio.images.decode import decode_image, decode_pil
from shardio.images.errors_of_pillow import errors_of_pillow
from shardio.images.orientation import Orientation
from shardio.images.pictures import DEFAULT_MAX_PIXELS, check_size

if TYPE_CHECKING:
    import PIL.Image


def decode_unconverted(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> NDArray[Any]:
    """Decode a whole image to the values that its file stores. Arguments and errors are those of :func:`open_image`.

    Returns:
        What numpy makes of Pillow's image, writable: uint8 [height, width] for grey pictures and palettes (their
        indices), uint16 for 16 bits, bool for one bit, int32 or float32 for such TIFFs; uint8 [height, width, channels]
        for all others.
    """
    if _is_rgb(content, max_pixels):
        return decode_image(content, orientation=orientation, max_pixels=max_pixels)
    pixels = np.array(_load(content, orientation))
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)  # TIFFs may be big-endian.


def decode_unconverted_pil(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> PIL.Image.Image:
    """Decode an image to a Pillow image of its own mode, with the values of :func:`decode_unconverted`."""
    if _is_rgb(content, max_pixels):
        return decode_pil(content, orientation=orientation, max_pixels=max_pixels)
    return _load(content, orientation)


def _is_rgb(content: bytes, max_pixels: int) -> bool:
    """Return whether a conversion to RGB would change nothing."""
    import PIL.Image  # Not before an image needs it: see resizing.py.

    with errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as image:
        check_size(image.height, image.width, max_pixels)
        return image.mode == "RGB"


def _load(content: bytes, orientation: Orientation) -> PIL.Image.Image:
    import PIL.Image
    import PIL.ImageOps

    with errors_of_pillow():
        image = PIL.Image.open(io.BytesIO(content))
        image.load()
        return PIL.ImageOps.exif_transpose(image) if orientation == "apply" else image
