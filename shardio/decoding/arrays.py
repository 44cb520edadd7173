"""Arrays in the npy format (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np


def decode_npy(content: bytes, *, trusted: bool = False) -> Any:
    """Return the array in an npy file.

    Unlike ``np.load``, refuse zips of arrays and bare pickles, and check that all declared values are there before
    allocating the array.

    Args:
        content: The file.
        trusted: Whether objects may be unpickled.

    Raises:
        ValueError: If the file is damaged, or holds objects and is not trusted.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    # Version 3 differs from 2 only in how it encodes the names of fields.
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        if not trusted:
            raise ValueError("it holds Python objects, which may run code when unpickled: trusted=True allows that")
    elif min(shape, default=0) < 0 or math.prod(shape) * max(dtype.itemsize, 1) > len(content) - file.tell():
        raise ValueError(
            f"it declares an array of shape {shape!s:.200} and dtype {dtype!s:.200}, but only "
            f"{len(content) - file.tell()} bytes follow: the file is damaged or truncated"
        )
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=trusted)
