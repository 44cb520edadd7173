"""Conformance tests of a remainder policy, with random numbers of ranks, batch sizes and cursors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, product

import numpy as np
import pytest

from shardio.order import Remainder, Split

SHARES = list(product(range(1, 61), range(1, 7)))
"""Numbers of samples and of ranks."""


class RemainderPolicyTests:
    """Tests of a remainder policy in ``shardio.order.POLICIES``.

    Override the fixture ``remainder``::

        class TestPad(RemainderPolicyTests):
            @pytest.fixture
            def remainder(self) -> Remainder:
                return "pad"
    """

    @pytest.fixture
    def remainder(self) -> Remainder:
        """The policy's name."""
        raise NotImplementedError("override this fixture: return the name of the policy")

    @pytest.fixture(params=[1, 8], ids=["consecutive", "by-stratum"])
    def worlds(self, remainder: Remainder, request: pytest.FixtureRequest) -> list[list[Split]]:
        """Return epochs that start at random cursors, each as the list of all ranks' shares."""
        return [make_world(random.Random(number), remainder, strata=request.param) for number in range(300)]

    def test_ranks_share_the_positions(self, worlds: list[list[Split]]) -> None:
        for ranks in worlds:
            check_shares(ranks)

    def test_the_attributes_describe_the_policy(self, worlds: list[list[Split]]) -> None:
        policy = worlds[0][0].remainder_policy
        extra = {ranks[0].stop - ranks[0].num_samples for ranks in worlds}
        assert policy.repeats == (max(extra) > 0), "repeats"
        assert policy.leaves_out == (min(extra) < 0), "leaves_out"
        assert policy.repeats or not policy.marks_repeats, "marks_repeats"
        counts = [{policy.count_dealt(left, world, size) for size in range(1, 7)} for left, world in SHARES]
        assert policy.uses_batch_size == any(len(each) > 1 for each in counts), "uses_batch_size"
        assert policy.effect

    def test_marks_are_false_for_repeats_alone(self, worlds: list[list[Split]]) -> None:
        for split in chain.from_iterable(worlds):
            positions = np.arange(split.start, split.stop + 1)
            valid = split.find_valid(positions)
            expected = (positions < split.num_samples).tolist() if split.remainder_policy.marks_repeats else None
            assert (None if valid is None else valid.tolist()) == expected

    def test_an_exact_policy_counts_each_sample_once_over_any_interruption(self, worlds: list[list[Split]]) -> None:
        for number, ranks in enumerate(worlds):
            first, rng = ranks[0], random.Random(number)
            found, cursor = list(range(first.start)), first.start
            while cursor < first.num_samples:
                ranks = make_world(rng, first.remainder, strata=first.strata, of=first.num_samples, start=cursor)
                num_steps = rng.randint(1, 9)
                found += chain.from_iterable(chain.from_iterable(own[:num_steps] for own in check_shares(ranks)))
                cursor = ranks[0].position_after(num_steps)
            counted = sorted(position for position in found if position < first.num_samples)
            is_whole = counted == list(range(first.num_samples))
            assert is_whole or first.remainder_policy.leaves_out, "every sample comes once, apart from repeats"
            assert counted == list(range(len(counted))), "the last samples are left out"


def make_world(
    rng: random.Random, remainder: Remainder, *, strata: int, of: int | None = None, start: int | None = None
) -> list[Split]:
    """Return the shares of a random number of ranks in an epoch of ``of`` samples, from position ``start`` on."""
    num_samples = rng.randint(1, 60) if of is None else of
    cursor = rng.randint(0, num_samples) if start is None else start
    world_size, batch_size = rng.randint(1, 6), rng.randint(1, 6)
    return [
        Split(
            num_samples=num_samples,
            start=cursor,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            strata=strata,
            remainder=remainder,
        )
        for rank in range(world_size)
    ]


def check_shares(ranks: Sequence[Split]) -> list[list[list[int]]]:
    """Check the shares of all ranks; return the positions of each rank's batches."""
    first, policy = ranks[0], ranks[0].remainder_policy
    num_left, step_size = first.num_samples - first.start, len(ranks) * first.batch_size
    batches = [[split.batch(step).tolist() for step in range(split.num_batches)] for split in ranks]
    dealt = sorted(chain.from_iterable(chain.from_iterable(batches)))
    num_extra = len(dealt) - num_left
    assert dealt == list(range(first.start, first.start + len(dealt))), "ranks are disjoint and leave no gaps"
    assert -step_size < num_extra < step_size, "only the last step changes"
    assert num_extra == 0 or num_left % step_size, "samples that fill their steps stay as they are"
    assert num_extra <= 0 or policy.repeats, "a policy that repeats samples declares it"
    assert num_extra >= 0 or policy.leaves_out, "a policy that leaves samples out declares it"
    for counts in ([sum(map(len, own)) for own in batches], list(map(len, batches))):
        is_equal = policy.repeats or policy.leaves_out
        assert max(counts) - min(counts) <= (not is_equal), "the counts of ranks are equal, or differ by one"
    for split, own in zip(ranks, batches, strict=True):
        sizes = list(map(len, own))
        assert split.num_own_samples == sum(sizes), "the number of a rank's samples is correct"
        assert sizes[:-1] == [split.batch_size] * (len(sizes) - 1), "batches are full, apart from the last"
        assert all(1 <= size <= split.batch_size for size in sizes), "no batch is empty or too large"
        assert not len(split.batch(split.num_batches)), "nothing follows the last batch"
        for batch in own:
            if split.strata == 1:
                assert batch == list(range(batch[0], batch[0] + len(batch))), "a batch is consecutive"
    for step in range(max(map(len, batches))):
        begin = first.start + step * step_size
        here = sorted(chain.from_iterable(own[step] for own in batches if step < len(own)))
        assert here == dealt[begin - first.start :][:step_size], "a step holds the next positions"
        assert first.position_after(step) == begin, "the cursor follows the steps"
    assert first.position_after(max(map(len, batches))) == first.num_samples, "the cursor ends with the epoch"
    return batches
