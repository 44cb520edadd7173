"""The measures of a shuffle, compared with known values and with plain loops."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import isnan

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from shardio.order import EpochOrder, OrderQuality, choose_settings, measure_quality, shards_of
from shardio.order.quality import (
    count_open_shards,
    ideal_same_shard_chance,
    mean_displacement,
    mean_separation,
    read_factor,
    same_shard_chance,
    take_turns,
)

Integers = NDArray[np.int64]

SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any).map(np.array)
SHARDS = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(np.array)


def measure(order: Integers, sizes: Integers, world_size: int = 1, batch_size: int = 64) -> OrderQuality:
    ranks = [order[rank::world_size] for rank in range(world_size)]
    return measure_quality(ranks, sizes, sizes * 1000, world_size * batch_size)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Integers, Integers]:
    sizes = draw(SIZES)
    return sizes, np.array(draw(st.permutations(range(sizes.sum()))))


def test_a_global_shuffle_is_near_the_ideal_everywhere() -> None:
    sizes = np.full(50, 1000)
    order = np.random.default_rng(0).permutation(50_000)
    ours = EpochOrder(sizes, choose_settings(sizes, shuffle=True, seed=0, lanes=1, window=50_000), epoch=0)
    for samples in order, ours.samples_at(np.arange(50_000)):
        quality = measure(samples, sizes, world_size=4)
        assert quality.displacement == pytest.approx(1 / 3, abs=0.01)
        assert quality.separation == pytest.approx(1 / 3, abs=0.01)
        assert quality.same_shard == pytest.approx(quality.ideal_same_shard, rel=0.05)
        assert (quality.max_open, quality.read_factor) == (50, 4)


@given(sizes=SIZES, world_size=st.integers(1, 5))
def test_ranks_that_own_whole_shards_read_their_share(sizes: Integers, world_size: int) -> None:
    starts = np.cumsum(sizes) - sizes
    samples = [np.arange(size) + start for start, size in zip(starts, sizes, strict=True)]
    ranks = [np.concatenate([samples[0][:0], *samples[rank::world_size]]) for rank in range(world_size)]
    quality = measure_quality(ranks, sizes, sizes * 7 + 3, 4)
    assert quality.read_factor == pytest.approx(1)
    assert quality.max_open == 1


@given(orders(), st.integers(1, 5))
def test_ranks_read_between_their_share_and_everything(case: tuple[Integers, Integers], world_size: int) -> None:
    sizes, order = case
    quality = measure(order, sizes, world_size)
    assert 1 - 1e-9 <= quality.read_factor <= world_size + 1e-9
    assert 1 <= quality.mean_open <= quality.max_open <= np.count_nonzero(sizes)
    assert 0 <= quality.displacement <= 1 / 2


def test_lanes_keep_a_rank_in_its_shards() -> None:
    sizes = np.full(64, 100)
    own, shared = (
        measure(EpochOrder(sizes, settings, epoch=0).samples_at(np.arange(6400)), sizes, world_size=8)
        for settings in (choose_settings(sizes, shuffle=True, seed=0, lanes=lanes, window=400) for lanes in (8, 2))
    )
    assert (own.read_factor, shared.read_factor) == (1, 4)


def test_without_pairs_the_measures_are_nan() -> None:
    quality = measure(np.array([1, 0]), np.array([1, 1]), batch_size=1)
    assert isnan(quality.same_shard)
    assert isnan(quality.separation)
    assert quality.ideal_same_shard == 0
    assert isnan(measure(np.array([0]), np.array([1]), world_size=3).ideal_same_shard)


@given(orders())
def test_distances_are_those_of_a_plain_loop(case: tuple[Integers, Integers]) -> None:
    sizes, order = case
    num_samples = len(order)
    assert mean_displacement(order) == pytest.approx(
        sum(abs(position - sample) for position, sample in enumerate(order)) / num_samples**2
    )
    place = {sample: position for position, sample in enumerate(order.tolist())}
    shard = [number for number, size in enumerate(sizes) for _ in range(size)]
    assert shards_of(np.arange(num_samples), sizes).tolist() == shard
    apart = [abs(place[a] - place[b]) for a, b in pairwise(range(num_samples)) if shard[a] == shard[b]]
    expected = sum(apart) / len(apart) / num_samples if apart else float("nan")
    assert mean_separation(order, sizes) == pytest.approx(expected, nan_ok=True)


@given(SHARDS, st.integers(1, 10))
def test_the_chance_is_that_of_counting_all_pairs(shards: Integers, batch_size: int) -> None:
    batches = [shards[start : start + batch_size] for start in range(0, len(shards), batch_size)]
    chances = [np.mean([a == b for a, b in combinations(batch, 2)]) for batch in batches if len(batch) > 1]
    expected = np.mean(chances) if chances else float("nan")
    assert same_shard_chance(shards, batch_size) == pytest.approx(expected, nan_ok=True)
    if len(shards) > 1:
        sizes = np.bincount(shards)
        assert ideal_same_shard_chance(sizes) == pytest.approx(same_shard_chance(shards, len(shards)))


@given(SHARDS)
def test_a_shard_is_open_from_its_first_to_its_last_sample(shards: Integers) -> None:
    num_open = [len(set(shards[: step + 1]) & set(shards[step:])) for step in range(len(shards))]
    mean_open, max_open = count_open_shards(shards)
    assert mean_open == pytest.approx(np.mean(num_open))
    assert max_open == max(num_open)


@given(st.lists(SHARDS, min_size=1, max_size=4), st.lists(st.integers(1, 100), min_size=6, max_size=6))
def test_the_bytes_read_are_those_of_all_shards_read_from(ranks: list[Integers], num_bytes: list[int]) -> None:
    sizes = np.array([10, 20, 30, 10, 20, 30])
    read = sum(num_bytes[shard] for shards in ranks for shard in set(shards.tolist()))
    share = sum(num_bytes[shard] / sizes[shard] for shards in ranks for shard in shards)
    assert read_factor(ranks, sizes, np.array(num_bytes)) == pytest.approx(read / share)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=5))
def test_ranks_take_turns(ranks: list[list[int]]) -> None:
    expected = [rank[turn] for turn in range(9) for rank in ranks if turn < len(rank)]
    assert take_turns([np.array(rank) for rank in ranks]).tolist() == expected
