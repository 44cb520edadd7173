"""From an image's bytes to RGB pixels."""

from __future__ import annotations

import io
from typing import Literal, get_args

import numpy as np
import PIL.Image
import PIL.ImageOps
import simplejpeg
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3], RGB."""

Orientation = Literal["ignore", "apply"]
"""Whether the EXIF orientation turns the image. torchvision and Pillow ignore it by default."""

_JPEG_START = b"\xff\xd8\xff"


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
        orientation: Whether to honour the EXIF orientation.

    Returns:
        uint8 [height, width, 3].

    Raises:
        ValueError: If the image is truncated, damaged, or of a format that nobody here reads.
    """
    if orientation == "ignore" and content.startswith(_JPEG_START):
        _, _, colour_space, _ = simplejpeg.decode_jpeg_header(content)
        if colour_space in ("CMYK", "YCCK"):
            return np.asarray(decode_pil(content))
        pixels: Pixels = simplejpeg.decode_jpeg(content)
        return pixels
    return np.array(decode_pil(content, orientation=orientation))


def decode_pil(content: bytes, *, orientation: Orientation = "ignore") -> PIL.Image.Image:
    """Decode an image to a Pillow image in RGB. As :func:`decode_image` otherwise."""
    try:
        with PIL.Image.open(io.BytesIO(content)) as image:
            if orientation == "apply":
                PIL.ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
