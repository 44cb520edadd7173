"""Noise, rng keys and sizes for tests of transforms, and a test of the distributions of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_DRAWS = 20_000


def ks_limit(num_draws: int) -> float:
    """Return the Kolmogorov-Smirnov distance exceeded by 1 in 1,000 pairs of samples from the same distribution."""
    return float(1.95 * (2 / num_draws) ** 0.5)


THRESHOLD = ks_limit(NUM_DRAWS)


def make_noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_rng_keys(num_keys: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**64, num_keys, dtype=np.uint64)


def repeat_size(height: int, width: int, times: int) -> NDArray[np.int64]:
    return np.tile(np.array([height, width], dtype=np.int64), (times, 1))


def ks_distance(a: ArrayLike, b: ArrayLike) -> float:
    """Return the largest difference between two cumulative distributions (Kolmogorov-Smirnov)."""
    a, b = np.asarray(a), np.asarray(b)
    values = np.unique(np.concatenate([a, b]))
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def assert_uniform(values: Any, low: float, high: float, limit: float = 0.015) -> None:
    unit = (np.sort(values) - low) / (high - low)
    assert 0 <= unit[0] <= unit[-1] <= 1
    assert np.abs(unit - (np.arange(len(unit)) + 0.5) / len(unit)).max() < limit


def chi_square(values: Any, count: int) -> float:
    frequencies, expected = np.bincount(values.reshape(-1), minlength=count), values.size / count
    assert len(frequencies) == count
    return float(((frequencies - expected) ** 2 / expected).sum())
