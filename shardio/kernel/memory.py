"""Provide memory for temporary pixels and bytes, which each thread reuses."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

MAX_SCRATCH_BYTES = 64 * 2**20
"""The largest scratch array to keep, in bytes."""

_scratch_arrays = threading.local()


def scratch(purpose: str, num_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [num_bytes] with arbitrary content, valid until this thread's next call with the same purpose."""
    arrays: dict[str, NDArray[np.uint8]] = vars(_scratch_arrays)  # This thread's arrays.
    array = arrays.get(purpose)
    if array is None or array.size < num_bytes:
        array = np.empty(num_bytes, np.uint8)
        if num_bytes <= MAX_SCRATCH_BYTES:
            arrays[purpose] = array
    return array[:num_bytes]


def scratch_pixels(purpose: str, height: int, width: int) -> NDArray[np.uint8]:
    """Return scratch memory as uint8 [height, width, 3]."""
    return scratch(purpose, height * width * 3).reshape(height, width, 3)
