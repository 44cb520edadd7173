"""The random words are SplitMix64's, and keys do not collide."""

from __future__ import annotations

import numpy as np
import pytest

from shardio.order import derive_rng_key, make_rng_key, random_words, to_unit


def test_words_are_those_of_splitmix64() -> None:
    # The first outputs for seed 1234567, from the public test vectors of the reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    key = np.array([1234567], dtype=np.uint64)
    assert random_words(key, np.arange(4, dtype=np.uint64)).tolist() == expected


def test_each_word_is_computed_independently() -> None:
    key = make_rng_key(5, "test")
    together = random_words(key, np.arange(100, dtype=np.uint64))
    assert [random_words(key, np.array([i], dtype=np.uint64))[0] for i in range(100)] == together.tolist()


def test_keys_differ_by_seed_epoch_purpose_and_order_of_parts() -> None:
    keys = {
        int(make_rng_key(seed, *parts)[0])
        for seed in range(20)
        for parts in ((), (0,), (1,), (0, 1), (1, 0), ("shards",), ("windows",), (0, "shards"), ("shards", 0))
    }
    assert len(keys) == 20 * 9


def test_seed_and_epoch_are_not_added() -> None:
    assert make_rng_key(1, 2) != make_rng_key(2, 1)
    assert make_rng_key(0, 3) != make_rng_key(3, 0)


def test_derived_keys_differ_from_the_words_of_the_same_key() -> None:
    key, numbers = make_rng_key(0), np.arange(1000, dtype=np.uint64)
    assert not set(derive_rng_key(key, numbers).tolist()) & set(random_words(key, numbers).tolist())


def test_unit_numbers_are_even_and_below_one() -> None:
    unit = to_unit(random_words(make_rng_key(0), np.arange(200_000, dtype=np.uint64)))
    assert unit.min() >= 0
    assert unit.max() < 1
    counts, _ = np.histogram(unit, bins=100, range=(0, 1))
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_square < 150  # 99 degrees of freedom: exceeded once in a thousand keys, and this key is fixed.
    assert to_unit(np.array([2**64 - 1], dtype=np.uint64))[0] < 1


def test_a_purpose_is_ascii() -> None:
    with pytest.raises(UnicodeEncodeError):
        make_rng_key(0, "größe")
