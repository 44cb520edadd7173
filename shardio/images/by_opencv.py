"""Decoding by OpenCV: plain PNGs with Pillow's pixels in 0.84 of Pillow's time, and values that Pillow cannot hold.

WebP images are left to Pillow, which takes 1.2 to 1.6 times as long as OpenCV: OpenCV decodes one in sixteen of those
damaged WebP images that Pillow refuses. PNGs have checksums, and OpenCV refuses all that Pillow refuses.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardio.images.pixels import Pixels
from shardio.images.png import strip_png

if TYPE_CHECKING:
    import PIL.Image

_DEPTH = 24
"""The offset of the bit depth in a PNG (PNG specification, 11.2.2)."""


def is_for_opencv(image: PIL.Image.Image, content: bytes) -> bool:
    """Return whether OpenCV decodes an image that Pillow opened to the same pixels: a PNG with colours of 8 bits."""
    if image.format != "PNG" or image.mode not in ("RGB", "RGBA") or getattr(image, "is_animated", False):
        return False
    return content[_DEPTH] == 8 and "interlace" not in image.info


def decode_by_opencv(content: bytes) -> Pixels | None:
    """Decode a whole PNG, without transparency and not turned. Return None if it is damaged or too large."""
    import cv2

    if (stripped := strip_png(content)) is None:
        return None
    try:
        pixels = cv2.imdecode(np.frombuffer(stripped, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # A side is longer than OpenCV allows.
        return None
    return None if pixels is None else np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels), np.uint8)


def decode_unchanged(content: bytes) -> NDArray[Any] | None:
    """Decode an image to the values that it stores, with red before blue. Return None if it is damaged or too large.

    OpenCV logs what it finds odd in a TIFF without the file's name, so it logs nothing meanwhile.
    """
    import cv2

    with _LOG_LEVEL:
        level = cv2.utils.logging.setLogLevel(_SILENT)
        try:
            values = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
        except cv2.error:
            return None
        finally:
            cv2.utils.logging.setLogLevel(level)
    if values is None or values.ndim == 2:
        return values
    order = {3: [2, 1, 0], 4: [2, 1, 0, 3]}
    return np.ascontiguousarray(values[..., order[values.shape[2]]])


_SILENT = 0
_LOG_LEVEL = Lock()
