"""Memory that a thread reuses for all images: allocating fresh pages costs more than filling them."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

MAX_KEPT = 64 * 2**20
"""The largest array to keep, in bytes."""


class _Arrays(threading.local):
    def __init__(self) -> None:
        self.by_purpose: dict[str, NDArray[np.uint8]] = {}


_arrays = _Arrays()


def scratch(purpose: str, num_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [num_bytes] with arbitrary content, valid until this thread calls again with the same purpose."""
    array = _arrays.by_purpose.get(purpose)
    if array is None or array.size < num_bytes:
        array = np.empty(num_bytes, np.uint8)
        if num_bytes <= MAX_KEPT:
            _arrays.by_purpose[purpose] = array
    return array[:num_bytes]


def scratch_pixels(purpose: str, height: int, width: int) -> NDArray[np.uint8]:
    """Return scratch memory as uint8 [height, width, 3]."""
    return scratch(purpose, height * width * 3).reshape(height, width, 3)
