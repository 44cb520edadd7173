"""Draw random numbers for many images at once, each a function of its rng key."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.order import Words, derive_rng_key, random_words, to_unit


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


def draw_gammas(rng_keys: Words, shape: float, num_numbers: int) -> NDArray[np.float64]:
    """Return variates of the gamma distribution for each of n rng keys, float64 [n, num_numbers].

    The method is that of Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Args:
        rng_keys: uint64 [n].
        shape: The distribution's shape, positive. Its scale is 1.
        num_numbers: How many variates each rng key has.
    """
    keys = derive_rng_key(rng_keys[:, None], np.arange(num_numbers, dtype=np.uint64)).reshape(-1)
    d = (shape + 1 if shape < 1 else shape) - 1 / 3
    gammas, left, attempt = np.empty(len(keys)), np.arange(len(keys)), 0
    while left.size:
        counters = np.arange(3 * attempt, 3 * attempt + 3, dtype=np.uint64)
        unit = 1.0 - to_unit(random_words(keys[left, None], counters))  # Above 0, up to 1.
        normal = np.sqrt(-2 * np.log(unit[:, 0])) * np.cos(2 * np.pi * unit[:, 1])
        v = (1 + normal / np.sqrt(9 * d)) ** 3
        with np.errstate(invalid="ignore", divide="ignore"):  # Where v is not positive.
            is_accepted = (v > 0) & (np.log(unit[:, 2]) < 0.5 * normal**2 + d - d * v + d * np.log(v))
        gammas[left[is_accepted]] = d * v[is_accepted]
        left, attempt = left[~is_accepted], attempt + 1
    if shape < 1:
        last = derive_rng_key(keys, np.array([1], np.uint64))
        gammas *= (1.0 - to_unit(random_words(last, np.zeros(1, np.uint64)))) ** (1 / shape)
    return gammas.reshape(len(rng_keys), num_numbers)
