"""Random words that are a pure function of their rng key, and permutations made of them.

The words are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014): word ``i`` of key ``k`` is ``mix64(k + (i + 1) * GAMMA)``. Words do not depend on each other, so whole vectors
are computed at once. numpy's own generators are not used because their streams may change between releases, and an
order must not.

An alternating Feistel network (Luby and Rackoff 1988; with halves of unequal width, Schneier and Kelsey 1996) permutes
0 … 2**bits - 1, where 2**bits >= n. Cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)
keeps the result below n. Nothing is stored, so a window may be as long as the dataset. Packing and the split into
training and validation data also use these permutations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""Random words or rng keys, uint64."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The odd number nearest to 2**64 / golden ratio: the step between two counters."""

_DERIVE = np.uint64(0xD1B54A32D192ED03)
"""The constant that keeps the rng keys derived from a key apart from the words of the key's own stream."""

NUM_ROUNDS = 12

MIN_BITS = np.uint64(6)
"""The width of the smallest network, in bits. In narrower ones, twelve rounds over halves of one or two bits
are visibly uneven (chi-square over keys at n = 5 and 6). A short window takes more steps of cycle walking instead."""


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
        repetitions: uint64 [n], the number of times that a sampler returned each sample earlier in the epoch; None if
            never.
    """
    rng_keys = derive_rng_key(make_rng_key(seed, epoch, "augment"), indices.astype(np.uint64))
    if repetitions is not None and repetitions.any():
        rng_keys = np.where(repetitions > 0, derive_rng_key(rng_keys, repetitions), rng_keys)
    return rng_keys


def to_unit(words: Words) -> NDArray[np.float64]:
    """Map the upper 53 bits of words to float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: NDArray[np.int64], size: NDArray[np.int64], rng_key: Words) -> NDArray[np.int64]:
    """Map each index by the permutation of 0 … size-1 that belongs to ``rng_key``.

    Args:
        index: int64 [n], 0 <= index < size.
        size: int64 [n] or [1].
        rng_key: uint64 [n] or [1]. Elements with the same key and size share one permutation.

    Returns:
        int64 [n], 0 <= result < size.
    """
    value = index.astype(np.uint64)
    size, rng_key = np.broadcast_to(size, value.shape), np.broadcast_to(rng_key, value.shape)
    bits = np.maximum(_bit_length(size - 1), MIN_BITS)
    walking = np.arange(len(value))
    while len(walking):
        value[walking] = _network(value[walking], bits[walking], rng_key[walking])
        walking = walking[value[walking] >= size[walking].astype(np.uint64)]
    return _swap_first_two(value, size, rng_key).astype(np.int64)


def _bit_length(numbers: NDArray[np.int64]) -> Words:
    """Return the bit length of each number (0 for 0), exact for all of int64."""
    powers = np.int64(1) << np.arange(63, dtype=np.int64)
    return np.searchsorted(powers, numbers, side="right").astype(np.uint64)


def _network(value: Words, bits: Words, rng_key: Words) -> Words:
    """Permute 0 … 2**bits - 1: each round XORs a hash of one half into the other."""
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    low: Words = value & low_mask
    high: Words = value >> low_bits
    for _ in range(NUM_ROUNDS // 2):
        rng_key = rng_key + GAMMA
        high = high ^ (mix64(low + rng_key) & high_mask)
        rng_key = rng_key + GAMMA
        low = low ^ (mix64(high + rng_key) & low_mask)
    joined: Words = (high << low_bits) | low
    return joined


def _swap_first_two(value: Words, size: NDArray[np.int64], rng_key: Words) -> Words:
    """Swap outputs 0 and 1 for half of the keys, because a Feistel network is always an even permutation."""
    coin: Words = mix64(~rng_key) & np.uint64(1)
    swapped = (value < np.uint64(2)) & (size > 1)
    swap: Words = swapped.astype(np.uint64) & coin
    return value ^ swap


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the global generators of torch (on the CPU), numpy and Python at the end of a ``with`` block."""
    torch = sys.modules.get("torch")
    torch_state = None if torch is None else torch.get_rng_state()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
