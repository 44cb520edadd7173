"""Keyed bijections on 0 … n-1: a shuffle whose elements are computed one by one, on demand.

An alternating Feistel network (Luby and Rackoff 1988; with halves of unequal width, Schneier and
Kelsey 1996) permutes 0 … 2**bits - 1, where 2**bits >= n. Cycle walking (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002) keeps the result below n. Nothing is stored, so a window may be as
long as the dataset. Packing and the split into training and validation data use it, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.order.words import GAMMA, Words, mix64

NUM_ROUNDS = 12

MIN_BITS = np.uint64(6)
"""The width of the smallest network, in bits. In narrower ones, twelve rounds over halves of one or two bits
are visibly uneven (chi-square over keys at n = 5 and 6). A short window takes more steps of cycle walking instead."""


def permute(index: NDArray[np.int64], size: NDArray[np.int64], rng_key: Words) -> NDArray[np.int64]:
    """Map each index by the bijection of ``rng_key`` on 0 … size-1.

    Args:
        index: int64 [n], 0 <= index < size.
        size: int64 [n] or [1].
        rng_key: uint64 [n] or [1]. Elements with the same key and size share one bijection.

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
