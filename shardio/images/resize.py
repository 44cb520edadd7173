"""Resizing: the one place that decides which pixels a resize gives."""

from __future__ import annotations

import cv2
import numpy as np

from shardio.images.decode import Pixels


def use_one_thread() -> None:
    """Let OpenCV use one thread in this process: where images are decoded side by side, more would take turns."""
    cv2.setNumThreads(0)


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


def flip(image: Pixels) -> Pixels:
    """Mirror an image left to right; uint8 [height, width, 3]."""
    return np.asarray(cv2.flip(image, 1), dtype=np.uint8)
