"""From an image's bytes to RGB pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import PIL.Image
import simplejpeg
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3], RGB."""

Orientation = Literal["ignore", "apply"]
"""Whether the EXIF orientation turns the image. torchvision and Pillow ignore it by default."""

_JPEG_START = b"\xff\xd8\xff"
_ORIENTATION_TAG = 0x0112  # Exif 2.32, table 4


def check_orientation(orientation: str) -> Orientation:
    """Return ``orientation`` if it is a choice; raise ValueError otherwise."""
    for choice in get_args(Orientation):
        if orientation == choice:
            return choice  # type: ignore[no-any-return]  # get_args is typed to return Any
    raise ValueError(f"orientation must be 'ignore' or 'apply', got {orientation!r}")


def decode_image(content: bytes, *, orientation: Orientation = "ignore") -> Pixels:
    """Decode an image of any common format to RGB.

    JPEGs go to libjpeg-turbo (by simplejpeg), which must find nothing wrong with them; CMYK ones and all
    other formats to Pillow's ``convert("RGB")``.

    Args:
        content: The bytes of an image file.
        orientation: Whether to honour the EXIF orientation. TIFFs are always turned, by Pillow.

    Returns:
        uint8 [height, width, 3], contiguous and writable.

    Raises:
        ValueError: If the image is truncated, damaged, or of a format that nobody here reads.
    """
    if content.startswith(_JPEG_START) and simplejpeg.decode_jpeg_header(content)[2] not in ("CMYK", "YCCK"):
        pixels: Pixels = simplejpeg.decode_jpeg(content)
        if orientation == "ignore":
            return pixels
        with _errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as image:
            return _turn(pixels, image.getexif().get(_ORIENTATION_TAG, 1))
    with _errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as image:
        pixels = np.array(image.convert("RGB"))
        return pixels if orientation == "ignore" else _turn(pixels, image.getexif().get(_ORIENTATION_TAG, 1))


def decode_pil(content: bytes, *, orientation: Orientation = "ignore") -> PIL.Image.Image:
    """Decode an image to a Pillow image in RGB, with the pixels and the errors of :func:`decode_image`."""
    return PIL.Image.fromarray(decode_image(content, orientation=orientation))


@contextmanager
def _errors_of_pillow() -> Iterator[None]:
    """Raise ValueError for whatever Pillow's many readers raise for a damaged file."""
    try:
        yield
    except Exception as error:
        raise ValueError(str(error) or repr(error)) from error


def _turn(pixels: Pixels, orientation: int) -> Pixels:
    """Turn pixels upright by the value of the EXIF tag Orientation; unknown values leave them as they are."""
    across = pixels.transpose(1, 0, 2)
    turned = {
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: across,
        6: across[:, ::-1],
        7: across[::-1, ::-1],
        8: across[::-1],
    }
    return np.ascontiguousarray(turned.get(orientation, pixels))
