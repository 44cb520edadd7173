"""Indices as users give them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def check_indices(indices: Sequence[int] | NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Return indices as int64 [n] with negative ones counted from the end; raise IndexError outside of the dataset."""
    numbers = np.array(indices, dtype=np.int64)
    numbers = np.where(numbers < 0, numbers + num_samples, numbers)
    outside = (numbers < 0) | (numbers >= num_samples)
    if outside.any():
        raise IndexError(f"index {indices[int(np.argmax(outside))]} is outside of a dataset of {num_samples} samples")
    return numbers
