"""Checks of the indices that users and samplers pass."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.values import check_integer


def check_indices(indices: Any, num_samples: int) -> NDArray[np.int64]:
    """Return indices as int64 [n]; negative ones count from the end.

    Args:
        indices: n integers of Python, numpy or torch, or one array or tensor of them.
        num_samples: The size of the dataset.

    Raises:
        TypeError: If one of them is not an integer: a float would select the sample below it.
        IndexError: If one of them is out of range.
    """
    integers = check_integers(indices)
    outside = (integers < -num_samples) | (integers >= num_samples)
    if outside.any():
        raise IndexError(f"index {integers[np.argmax(outside)]} is out of range for a dataset of {num_samples} samples")
    return np.where(integers < 0, integers + num_samples, integers).astype(np.int64)


def check_integers(indices: Any) -> NDArray[Any]:
    """Return indices as an array [n] of signed integers, or of Python integers if 64 bits are not enough.

    Raises:
        TypeError: If one of them is not an integer.
    """
    with suppress(ValueError):  # numpy raises it for indices that contain sequences.
        integers = np.asarray(indices)
        if integers.ndim == 1 and integers.dtype.kind == "i":
            return integers
    # Check everything else one by one: booleans, floats and strings, unsigned and very large integers.
    return np.array([check_integer("an index", index) for index in indices], object)
