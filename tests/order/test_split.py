"""Ranks are disjoint and together complete, for any world, batch size and place to go on from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from shardio.order import Remainder, Split

POLICIES: list[Remainder] = ["pad", "mask", "keep", "drop"]

SPLITS = st.builds(
    lambda num_samples, start, **rest: Split(num_samples=num_samples, start=min(start, num_samples), rank=0, **rest),
    num_samples=st.integers(1, 300),
    start=st.integers(0, 300),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 12),
    shuffled=st.booleans(),
    remainder=st.sampled_from(POLICIES),
)


def ranks_of(split: Split) -> list[Split]:
    return [replace(split, rank=rank) for rank in range(split.world_size)]


def delivered(split: Split) -> list[list[list[int]]]:
    """Return the positions of each rank's batches."""
    return [[rank.batch(step).tolist() for step in range(rank.num_batches)] for rank in ranks_of(split)]


@given(SPLITS)
def test_together_the_ranks_deliver_every_position_once(split: Split) -> None:
    positions = sorted(p for rank in delivered(split) for batch in rank for p in batch)
    assert positions == list(range(split.start, split.stop))


@given(SPLITS)
def test_what_is_delivered_is_what_the_policy_says(split: Split) -> None:
    left = split.num_samples - split.start
    samples = Counter(p % split.num_samples for rank in delivered(split) for batch in rank for p in batch)
    step = split.world_size * split.batch_size
    if split.remainder == "drop":
        assert samples.total() == left - left % step
        assert max(samples.values(), default=1) == 1
    elif split.remainder == "keep":
        assert samples == Counter(range(split.start, split.num_samples))
    else:
        assert samples.total() == left + -left % split.world_size
        assert set(range(split.start, split.num_samples)) <= set(samples)


@given(SPLITS)
def test_no_batch_is_empty_or_too_large_and_lengths_are_true(split: Split) -> None:
    for rank, batches in zip(ranks_of(split), delivered(split), strict=True):
        assert all(1 <= len(batch) <= split.batch_size for batch in batches)
        assert all(len(batch) == split.batch_size for batch in batches[:-1])
        assert rank.num_own_samples == sum(map(len, batches))
        assert rank.num_batches == len(batches)


@given(SPLITS)
def test_ranks_have_equally_many_samples_or_with_keep_one_more(split: Split) -> None:
    counts = [rank.num_own_samples for rank in ranks_of(split)]
    assert max(counts) - min(counts) <= (split.remainder == "keep")


@given(split=SPLITS, data=st.data())
def test_global_batches_do_not_depend_on_the_world(split: Split, data: st.DataObject) -> None:
    step = split.world_size * split.batch_size
    world_size = data.draw(st.sampled_from([n for n in range(1, step + 1) if step % n == 0]))
    other = replace(split, world_size=world_size, batch_size=step // world_size)
    for number in range((split.num_samples - split.start) // step):
        here = sorted(p for rank in ranks_of(split) for p in rank.batch(number).tolist())
        there = sorted(p for rank in ranks_of(other) for p in rank.batch(number).tolist())
        assert here == there


@given(split=SPLITS, data=st.data())
def test_stopped_and_resumed_on_another_world_is_the_epoch_once(split: Split, data: st.DataObject) -> None:
    assume(split.remainder in ("keep", "mask"))
    num_batches = data.draw(st.integers(0, max(rank.num_batches for rank in ranks_of(split))))
    position = split.position_after(num_batches)
    before = [p for rank in delivered(split) for batch in rank[:num_batches] for p in batch]
    resumed = replace(
        split, start=position, world_size=data.draw(st.integers(1, 9)), batch_size=data.draw(st.integers(1, 12))
    )
    after = [p for rank in delivered(resumed) for batch in rank for p in batch]
    # What lies past the end is a repeat that `mask` marks.
    valid = [p for p in before + after if p < split.num_samples]
    assert sorted(valid) == list(range(split.start, split.num_samples))


@given(SPLITS)
def test_the_cursor_moves_by_steps_to_the_end(split: Split) -> None:
    step = split.world_size * split.batch_size
    num_steps = max(rank.num_batches for rank in ranks_of(split))
    positions = [split.position_after(n) for n in range(num_steps + 1)]
    assert positions[-1] == split.num_samples
    assert positions[:-1] == [split.start + n * step for n in range(num_steps)]


@given(SPLITS.filter(lambda split: split.shuffled))
def test_shuffled_a_rank_stays_in_its_lanes(split: Split) -> None:
    for rank, batches in enumerate(delivered(split)):
        assert {p % split.world_size for batch in batches for p in batch} <= {rank}


@given(SPLITS.filter(lambda split: not split.shuffled))
def test_unshuffled_a_batch_is_a_run(split: Split) -> None:
    assert all(np.all(np.diff(batch) == 1) for rank in delivered(split) for batch in rank)
