"""Noise, rng keys and sizes for tests of transforms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def make_noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return noise, uint8 [height, width, 3]."""
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_rng_keys(num_keys: int, seed: int = 0) -> NDArray[np.uint64]:
    """Return rng keys, uint64 [num_keys]."""
    return np.random.default_rng(seed).integers(0, 2**64, num_keys, dtype=np.uint64)


def repeat_size(height: int, width: int, times: int) -> NDArray[np.int64]:
    """Return one size several times, int64 [times, 2]."""
    return np.tile(np.array([height, width], dtype=np.int64), (times, 1))
