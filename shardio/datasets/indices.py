"""Indices as users and samplers give them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.values import check_integer


def check_indices(indices: Any, num_samples: int) -> NDArray[np.int64]:
    """Return indices as int64 [n], negative ones counted from the end.

    Args:
        indices: n integers of Python, numpy or torch; also as one array or tensor.
        num_samples: The size of the dataset.

    Raises:
        TypeError: If one of them is not an integer. A float would name the sample below it.
        IndexError: If one of them is outside of the dataset.
    """
    numbers = check_integers(indices)
    outside = (numbers < -num_samples) | (numbers >= num_samples)
    if outside.any():
        raise IndexError(f"index {numbers[np.argmax(outside)]} is outside of a dataset of {num_samples} samples")
    return np.where(numbers < 0, numbers + num_samples, numbers).astype(np.int64)


def check_integers(indices: Any) -> NDArray[Any]:
    """Return indices as an array [n] of integers: signed ones, or Python's own where those are not wide enough.

    Raises:
        TypeError: If one of them is not an integer.
    """
    with suppress(ValueError):  # Numpy's for indices among which there are sequences.
        numbers = np.asarray(indices)
        if numbers.ndim == 1 and numbers.dtype.kind == "i":
            return numbers
    # Everything else is looked at one by one: truth values, floats and strings, unsigned and very large integers.
    return np.array([check_integer("an index", index) for index in indices], object)
