"""Find all pairs of 64-bit hashes that differ in few bits, without comparing each hash with each other one.

The bits are split into bands. If two hashes differ in at most t bits, and there are t + k bands, then at least k bands
are equal, because each differing bit spoils one band at most (the pigeonhole principle). So the pairs are among those
that agree on some choice of k bands; sorting by these bands finds them. Manku, Jain and Das Sarma, "Detecting
Near-Duplicates for Web Crawling", 2007, search one table for each choice in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from shardio.looking.perceptual import count_bits

NUM_BITS = 64

MAX_KEPT_BANDS = 4

SORT_COST = 20
"""How much longer it takes to sort a hash than to compare a pair."""

Indices = NDArray[np.int64]


def find_near_pairs(hashes: NDArray[np.uint64], threshold: int) -> Iterator[tuple[Indices, Indices]]:
    """Find all pairs of hashes that differ in at most ``threshold`` bits.

    Args:
        hashes: uint64 [n], all different.
        threshold: At most :data:`shardio.looking.MAX_THRESHOLD`.

    Yields:
        The indices of the first and the second hashes of some pairs. A pair may come several times.
    """
    num_kept = _choose_num_kept(len(hashes), threshold)
    masks = _make_masks(threshold + num_kept)
    for kept in combinations(masks, num_kept):
        key = hashes & np.bitwise_or.reduce(np.array(kept, np.uint64))
        order = np.argsort(key)
        for first, second in _pairs_in_runs(key[order]):
            pair = order[first], order[second]
            is_near = count_bits(hashes[pair[0]] ^ hashes[pair[1]]) <= threshold
            yield pair[0][is_near], pair[1][is_near]


def join_groups(num_items: int, pairs: Iterator[tuple[Indices, Indices]]) -> Indices:
    """Return the group of each item, given pairs of items that belong together: the smallest index in the group.

    Returns:
        int64 [num_items].
    """
    groups = np.arange(num_items)
    for first, second in pairs:
        while True:
            of_first, of_second = groups[first], groups[second]
            differ = of_first != of_second
            if not differ.any():
                break
            first, second, of_first, of_second = (part[differ] for part in (first, second, of_first, of_second))
            np.minimum.at(groups, np.maximum(of_first, of_second), np.minimum(of_first, of_second))
            while not np.array_equal(groups, above := groups[groups]):  # Each item refers to its group's first one.
                groups = above
    return groups


def _choose_num_kept(num_hashes: int, threshold: int) -> int:
    """Return how many bands must agree: more of them mean more sorts, and fewer pairs to compare.

    The estimate assumes that hashes are evenly distributed.
    """

    def cost(num_kept: int) -> float:
        num_bands = threshold + num_kept
        num_pairs = num_hashes**2 / 2 / 2 ** (NUM_BITS * num_kept / num_bands)
        return comb(num_bands, num_kept) * (SORT_COST * num_hashes + num_pairs)

    return min(range(1, MAX_KEPT_BANDS + 1), key=cost)


def _make_masks(num_bands: int) -> list[int]:
    """Return the bits of each band. Their widths differ by 1 at most."""
    bounds = [NUM_BITS * band // num_bands for band in range(num_bands + 1)]
    return [(1 << stop) - (1 << start) for start, stop in pairwise(bounds)]


def _pairs_in_runs(key: NDArray[np.uint64]) -> Iterator[tuple[Indices, Indices]]:
    """Yield all pairs of equal elements of a sorted array: neighbours first, then those two apart, and so on."""
    first, distance = np.arange(len(key)), 0
    while len(first):
        distance += 1
        first = first[: np.searchsorted(first, len(key) - distance)]
        first = first[key[first] == key[first + distance]]
        if len(first):
            yield first, first + distance
