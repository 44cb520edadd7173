"""The keyed bijection is a permutation for every size and key, and an even shuffle over keys."""

from __future__ import annotations

from itertools import permutations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from shardio.order import Words, make_rng_key, permute, random_words


def shuffle(size: int, key: Words) -> NDArray[np.int64]:
    return permute(np.arange(size), np.array([size]), key)


def test_it_is_a_permutation_for_every_small_size() -> None:
    for size in range(1, 300):
        assert np.array_equal(np.sort(shuffle(size, make_rng_key(size))), np.arange(size))


@given(size=st.integers(300, 100_000), seed=st.integers(0, 2**63 - 1))
def test_it_is_a_permutation_at_random_sizes(size: int, seed: int) -> None:
    assert np.bincount(shuffle(size, make_rng_key(seed)), minlength=size).max() == 1


@given(size=st.integers(2**32, 10**11), seed=st.integers(0, 2**63 - 1))
def test_it_is_one_to_one_at_sizes_beyond_32_bits(size: int, seed: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 5000).astype(np.int64))
    image = permute(index, np.array([size]), make_rng_key(seed))
    assert len(np.unique(image)) == len(index)
    assert image.min() >= 0
    assert image.max() < size


def test_elements_of_several_bijections_are_evaluated_together() -> None:
    sizes = np.array([1, 2, 3, 10, 64, 65, 1000])
    keys = random_words(make_rng_key(0), np.arange(len(sizes), dtype=np.uint64))
    index = np.concatenate([np.arange(size) for size in sizes])
    together = permute(index, np.repeat(sizes, sizes), np.repeat(keys, sizes))
    alone = [shuffle(int(size), keys[i : i + 1]) for i, size in enumerate(sizes)]
    assert np.array_equal(together, np.concatenate(alone))


def test_it_differs_for_every_key() -> None:
    seen = {tuple(shuffle(100, make_rng_key(seed)).tolist()) for seed in range(100)}
    assert len(seen) == 100


def images_over_keys(size: int, num_keys: int) -> NDArray[np.int64]:
    """Return the whole bijection for many keys, int64 [keys, size]."""
    keys = random_words(make_rng_key(7, size), np.arange(num_keys, dtype=np.uint64))
    return permute(np.tile(np.arange(size), num_keys), np.array([size]), np.repeat(keys, size)).reshape(num_keys, size)


def deviation(counts: NDArray[np.int64], freedom: int, scale: float = 1.0) -> float:
    """Return the distance of a chi-square over even counts from its mean, in standard deviations."""
    mean = counts.mean()
    return float((scale * ((counts - mean) ** 2 / mean).sum() - freedom) / sqrt(2 * freedom))


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 12, 16, 31, 64, 65])
def test_elements_land_evenly(size: int) -> None:
    images = images_over_keys(size, 20_000)
    counts = np.stack([np.bincount(images[:, i], minlength=size) for i in range(size)])
    # The counts of a permutation are bound in rows and columns: (n-1)^2 degrees of freedom, after this scale.
    assert abs(deviation(counts, (size - 1) ** 2, (size - 1) / size)) < 4


@pytest.mark.parametrize("size", [3, 5, 6, 8, 16, 33])
def test_neighbours_land_evenly(size: int) -> None:
    images = images_over_keys(size, 20_000)
    pairs = np.bincount(images[:, 0] * size + images[:, 1], minlength=size * size).reshape(size, size)
    assert abs(deviation(pairs[~np.eye(size, dtype=bool)], size * (size - 1) - 1)) < 4


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_elements_are_equally_likely(size: int) -> None:
    images = images_over_keys(size, 40_000)
    number = {permutation: i for i, permutation in enumerate(permutations(range(size)))}
    counts = np.bincount([number[tuple(row)] for row in images.tolist()], minlength=len(number))
    assert abs(deviation(counts, len(number) - 1)) < 4
