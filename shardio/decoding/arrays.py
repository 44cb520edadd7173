"""Arrays in the npy format (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np


def decode_npy(content: bytes, *, trusted: bool = False) -> Any:
    """Return the array that an npy file holds.

    Args:
        content: The file. ``np.load`` would also take a zip of several arrays, or a pickle, under this name.
        trusted: Whether objects may be unpickled.

    Raises:
        ValueError: If it is damaged, holds objects and is not trusted, or declares more than it has: ``np.load`` makes
            an array as large as the header says before it reads the first value.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    # Version 3 differs from 2 only in how it encodes the names of fields.
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        if not trusted:
            raise ValueError("it holds Python objects, which unpickling may run as code: trusted=True allows that")
    elif min(shape, default=0) < 0 or math.prod(shape) * max(dtype.itemsize, 1) > len(content) - file.tell():
        raise ValueError(
            f"it declares an array of shape {shape!s:.200} and dtype {dtype!s:.200}, and {len(content) - file.tell()} "
            "bytes follow: it is damaged or truncated"
        )
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=trusted)
