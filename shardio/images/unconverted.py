"""Decode whole images to what their files store, without a conversion to RGB: masks, depth maps, grey pictures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardio.images.decode import decode_image, decode_pil
from shardio.images.errors_of_pillow import errors_of_pillow
from shardio.images.orientation import Orientation, Turn, read_turn
from shardio.images.pictures import DEFAULT_MAX_PIXELS, check_size
from shardio.images.png import PNG_SIGNATURE
from shardio.images.value_formats import read_value_format

if TYPE_CHECKING:
    import PIL.Image


def decode_unconverted(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> NDArray[Any]:
    """Decode a whole image to the values that its file stores. Arguments and errors are those of :func:`open_image`.

    Returns:
        The stored values in native byte order, writable, [height, width] or [height, width, channels]. Their type is
        the stored one, with these exceptions: one bit becomes bool, gray of 2 or 4 bits is scaled to uint8, and signed
        16 bits of a TIFF become int32. Palettes give their indices.

    Raises:
        ValueError: If the values cannot be decoded exactly, too.
    """
    stored = read_value_format(content)
    if stored is not None and not stored.is_in_pillow:
        values = stored.decode_exactly(content, max_pixels)
        is_to_turn = orientation == "apply" and content.startswith(PNG_SIGNATURE)  # TIFFs are upright already.
        return _read_turn(content).apply(values) if is_to_turn else values
    if _is_rgb(content, max_pixels):
        return decode_image(content, orientation=orientation, max_pixels=max_pixels)
    pixels = np.array(_load(content, orientation))
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)  # TIFFs may be big-endian.


def decode_unconverted_pil(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> PIL.Image.Image:
    """Decode an image to a Pillow image of its own mode, with the values of :func:`decode_unconverted`.

    Raises:
        ValueError: If a Pillow image cannot hold the values, too.
    """
    stored = read_value_format(content)
    if stored is not None and not stored.is_in_pillow:
        check_size(stored.shape[0], stored.shape[1], max_pixels)
        raise ValueError(
            f"it stores {stored.describe()}, which a Pillow image cannot hold: use decode='array', or decoders= with a "
            "function of your own"
        )
    if _is_rgb(content, max_pixels):
        return decode_pil(content, orientation=orientation, max_pixels=max_pixels)
    return _load(content, orientation)


def _read_turn(content: bytes) -> Turn:
    import PIL.Image  # Not before an image needs it: see resizing.py.

    with errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as image:
        return read_turn(image)


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
