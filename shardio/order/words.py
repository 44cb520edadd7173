"""Random words: a counter-based generator that is a pure function of its rng key.

The words are SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014): word ``i`` of key ``k`` is ``mix64(k + (i + 1) * GAMMA)``. Words do not depend on each other,
so whole vectors are computed at once. numpy's own generators are not used because their streams may
change between releases, and an order must not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""Random words or rng keys, uint64."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The odd number nearest to 2**64 / golden ratio: the step between two counters."""

_DERIVE = np.uint64(0xD1B54A32D192ED03)
"""Keeps the rng keys derived from a key apart from the words of the key's own stream."""


def mix64(words: Words) -> Words:
    """Scramble each word with SplitMix64's finaliser, a bijection on 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive_rng_key(rng_key: Words, part: Words) -> Words:
    """Derive one rng key from each pair (rng_key, part); both broadcast, uint64 [n] with n >= 1."""
    return mix64(mix64(rng_key ^ _DERIVE) + part * GAMMA)


def make_rng_key(seed: int, *parts: int | str) -> Words:
    """Return the rng key of ``seed`` and ``parts``, uint64 [1].

    Args:
        seed: The user's seed, 0 <= seed < 2**64.
        parts: Integers below 2**64 (an epoch, a lane) or names of purposes, at most 8 ASCII characters each.
    """
    rng_key = np.array([seed], dtype=np.uint64)
    for part in parts:
        number = int.from_bytes(part.encode("ascii"), "little") if isinstance(part, str) else part
        rng_key = derive_rng_key(rng_key, np.array([number], dtype=np.uint64))
    return rng_key


def random_words(rng_key: Words, counters: Words) -> Words:
    """Return the words at ``counters`` in the streams of ``rng_key``; both broadcast, uint64."""
    return mix64(rng_key + (counters + np.uint64(1)) * GAMMA)


def augment_rng_keys(seed: int, epoch: int, indices: NDArray[np.int64], repetitions: Words | None = None) -> Words:
    """Return one rng key for each sample's transforms, uint64 [n].

    Args:
        seed: The seed of the order or of the dataset.
        epoch: The epoch's number.
        indices: int64 [n], the samples' indices.
        repetitions: uint64 [n], how often a sampler returned each sample earlier in the epoch; None if never.
    """
    rng_keys = derive_rng_key(make_rng_key(seed, epoch, "augment"), indices.astype(np.uint64))
    if repetitions is not None and repetitions.any():
        rng_keys = np.where(repetitions > 0, derive_rng_key(rng_keys, repetitions), rng_keys)
    return rng_keys


def to_unit(words: Words) -> NDArray[np.float64]:
    """Map the upper 53 bits of words to float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
