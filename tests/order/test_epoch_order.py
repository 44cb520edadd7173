"""The epoch's order is a permutation that mixes within lanes and windows, and a pure function."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from shardio.order import EpochOrder, OrderSettings, choose_settings, make_rng_key, random_words

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


def order_of(sizes: list[int], *, epoch: int = 0, seed: int = 0, lanes: int = 1, window: int = 10) -> EpochOrder:
    settings = OrderSettings(shuffle=True, seed=seed, lanes=lanes, window=window)
    return EpochOrder(np.array(sizes), settings, epoch)


def everything(order: EpochOrder) -> NDArray[np.int64]:
    return order.samples_at(np.arange(order.num_samples))


@given(sizes=SIZES, epoch=st.integers(0, 1000), lanes=st.integers(1, 9), window=st.integers(1, 30))
def test_each_window_of_each_lane_holds_its_stretch_of_the_tape(
    sizes: list[int], epoch: int, lanes: int, window: int
) -> None:
    """The definition, written with plain lists: shards sorted by their words, laid end to end, cut twice."""
    words = random_words(make_rng_key(0, epoch, "shards"), np.arange(len(sizes), dtype=np.uint64)).tolist()
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    tape = [
        starts[shard] + index
        for shard in sorted(range(len(sizes)), key=lambda shard: words[shard])
        for index in range(sizes[shard])
    ]
    found = everything(order_of(sizes, epoch=epoch, lanes=lanes, window=window)).tolist()
    lane_start = 0
    for lane in range(lanes):
        in_lane = found[lane::lanes]
        for start in range(0, len(in_lane), window):
            stretch = tape[lane_start + start : lane_start + min(start + window, len(in_lane))]
            assert sorted(in_lane[start : start + window]) == sorted(stretch)
        lane_start += len(in_lane)


def test_epochs_and_seeds_differ() -> None:
    sizes = [30] * 4
    orders = {tuple(everything(order_of(sizes, epoch=e, seed=s)).tolist()) for e in range(6) for s in range(6)}
    assert len(orders) == 36


def test_one_lane_with_one_window_is_a_global_shuffle() -> None:
    samples = everything(order_of([500, 500], window=1000))
    # Each half of the epoch draws from each shard about evenly: 250 of 500, with a deviation of 11.
    assert 200 < (samples[:500] < 500).sum() < 300


def test_positions_take_turns_between_lanes() -> None:
    """With four lanes over four equal shards each lane is one shard, so each shard comes at one position in four."""
    samples = everything(order_of([100] * 4, lanes=4, window=100))
    shards = samples // 100
    assert all(len(set(shards[lane::4].tolist())) == 1 for lane in range(4))
    assert sorted(shards[:4].tolist()) == [0, 1, 2, 3]


def test_numbers_beyond_32_bits_are_exact() -> None:
    sizes = np.full(1000, 10**8)  # 10^11 samples.
    settings = replace(choose_settings(sizes, shuffle=True, seed=0), lanes=16, window=4 * 10**8)
    order = EpochOrder(sizes, settings, 0)
    positions = np.arange(10**11 - 4096, 10**11)
    samples = order.samples_at(positions)
    assert len(np.unique(samples)) == 4096
    assert samples.min() >= 0
    assert samples.max() < 10**11
