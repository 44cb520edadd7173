"""Decoding of plain PNGs by OpenCV, with Pillow's pixels in 0.84 of Pillow's time.

WebP images are left to Pillow, which takes 1.2 to 1.6 times as long as OpenCV: OpenCV decodes one in sixteen of those
damaged WebP images that Pillow refuses. PNGs have checksums, and OpenCV refuses all that Pillow refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardio.images.pixels import Pixels

if TYPE_CHECKING:
    import PIL.Image

_DEPTH = 24
"""The offset of the bit depth in a PNG (PNG specification, 11.2.2)."""


def is_for_opencv(image: PIL.Image.Image, content: bytes) -> bool:
    """Return whether OpenCV decodes an image that Pillow opened to the same pixels: a PNG with colours of 8 bits.

    OpenCV's libpng prints warnings about many colour profiles and some chromaticities, so PNGs that have them are left
    to Pillow, too.
    """
    if image.format != "PNG" or image.mode not in ("RGB", "RGBA") or getattr(image, "is_animated", False):
        return False
    return content[_DEPTH] == 8 and not image.info.keys() & {"chromaticity", "icc_profile", "interlace"}


def decode_by_opencv(content: bytes) -> Pixels | None:
    """Decode a whole image, without transparency and not turned. Return None if it is damaged or too large."""
    import cv2

    try:
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # A side is longer than OpenCV allows.
        return None
    return None if pixels is None else np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels), np.uint8)
