"""Draw random numbers for many images at once, each a function of its rng key."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.order import Words, random_words, to_unit


def draw_units(rng_keys: Words, num_numbers: int) -> NDArray[np.float64]:
    """Return random numbers from 0 to below 1 for each of n rng keys, float64 [n, num_numbers]."""
    return to_unit(random_words(rng_keys[:, None], np.arange(num_numbers, dtype=np.uint64)))


def draw_chance(rng_keys: Words, p: float) -> NDArray[np.bool_]:
    """Return true with probability p for each of n rng keys, bool [n]."""
    return np.asarray(draw_units(rng_keys, 1)[:, 0] < p)


def check_probability(p: float) -> float:
    """Return p if it is a probability, else raise ValueError."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be a probability from 0 to 1, got {p}")
    return p


def to_integers(unit: NDArray[np.float64], counts: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return integers from 0 to below ``counts`` for numbers from 0 to below 1."""
    integers: NDArray[np.int64] = np.minimum((unit * counts).astype(np.int64), np.asarray(counts) - 1)
    return integers
