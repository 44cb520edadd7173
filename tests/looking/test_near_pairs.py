from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from shardio.viewer.duplicates import count_bits, find_near_pairs, join_groups


def all_pairs(hashes: NDArray[np.uint64], threshold: int) -> set[tuple[int, int]]:
    """Compare each hash with each other one."""
    numbers = hashes.tolist()
    return {
        (first, second)
        for first, second in combinations(range(len(numbers)), 2)
        if (numbers[first] ^ numbers[second]).bit_count() <= threshold
    }


def found_pairs(hashes: NDArray[np.uint64], threshold: int) -> set[tuple[int, int]]:
    return {
        (min(pair), max(pair))
        for first, second in find_near_pairs(hashes, threshold)
        for pair in zip(first.tolist(), second.tolist(), strict=True)
    }


@pytest.mark.parametrize("threshold", [0, 1, 4, 7, 16])
@pytest.mark.parametrize("num_hashes", [1, 2, 300])
def test_the_pairs_are_those_of_comparing_all(threshold: int, num_hashes: int) -> None:
    random = np.random.default_rng(threshold)
    centres = random.integers(0, 2**64, max(1, num_hashes // 6), dtype=np.uint64)
    flips = np.uint64(1) << random.integers(0, 64, (num_hashes, 10), dtype=np.uint64)
    flips[random.random(flips.shape) < 0.6] = 0
    hashes = np.unique(np.bitwise_xor.reduce(flips, axis=1) ^ random.choice(centres, num_hashes))
    assert found_pairs(hashes, threshold) == all_pairs(hashes, threshold)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=12), st.integers(0, 16))
def test_any_hashes(numbers: set[int], threshold: int) -> None:
    hashes = np.array(sorted(numbers), np.uint64)
    assert found_pairs(hashes, threshold) == all_pairs(hashes, threshold)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_bits_are_counted(numbers: list[int]) -> None:
    assert count_bits(np.array(numbers, np.uint64)).tolist() == [number.bit_count() for number in numbers]


@given(st.integers(1, 30), st.data())
def test_groups_are_the_connected_components(num_items: int, data: st.DataObject) -> None:
    item = st.integers(0, num_items - 1)
    batches = data.draw(st.lists(st.lists(st.tuples(item, item), max_size=8), max_size=4))
    expected = list(range(num_items))
    for first, second in (pair for batch in batches for pair in batch):
        old, new = sorted((expected[first], expected[second]), reverse=True)
        expected = [new if group == old else group for group in expected]
    arrays = (np.array(batch, np.int64).reshape(-1, 2).T for batch in batches)
    assert join_groups(num_items, ((first, second) for first, second in arrays)).tolist() == expected
