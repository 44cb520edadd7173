"""Resizing: the one place that decides which pixels a resize gives."""

from __future__ import annotations

import cv2
import numpy as np

from shardio.images.decode import Pixels

cv2.setNumThreads(0)  # Images are decoded side by side already; threads inside one would only take turns.


def resize(image: Pixels, height: int, width: int) -> Pixels:
    """Resize bilinearly, without antialiasing (OpenCV's INTER_LINEAR).

    Args:
        image: uint8 [rows, columns, 3].
        height: The new number of rows.
        width: The new number of columns.

    Returns:
        uint8 [height, width, 3].
    """
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
