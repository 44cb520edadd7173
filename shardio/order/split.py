"""The split: the positions of an epoch that one rank reads, batch by batch, and the policies for the last samples.

With world size W and B samples per rank, step t holds W * B consecutive positions, counted from the cursor at which the
epoch began or resumed. Every rank takes its share of each step: the step's positions are sorted by their strata, and
each rank takes a run of the result. So a rank reads neighboring samples in each window, for any number of ranks.
Repeats stay at the end of their step. The samples after the last full step are split according to the same rule.
Worker k of n makes the batches t with t mod n == k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardio.order.epoch_order import EpochOrder, reverse_bits

Remainder = Literal["pad", "mask", "keep", "drop"]
"""The name of a remainder policy: a key of ``POLICIES``."""

DROP_LAST: Remainder = "drop"
"""The policy of a loader with ``drop_last=True``."""

POSITIONS_AT_ONCE = 4096
"""The minimum number of positions whose order is computed together, except at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainderPolicy:
    """A treatment of the last samples of an epoch if they do not fill a step, which is one batch on every rank.

    To add a policy, add its name to ``Remainder`` and an entry to ``POLICIES``. Loaders, training and ``check`` use
    these attributes, not the name. ``shardio.testing.samples`` tests a policy.

    Attributes:
        effect: A description of the effect, which follows the policy's name in messages.
        count_dealt: Returns the number of positions that the ranks get, given the number of samples that are left in
            the epoch, the number of ranks, and the batch size. Positions after the end of the epoch repeat the order's
            first samples. The result differs from the number of remaining samples by less than a step. If the
            remaining samples fill whole steps, the two numbers are equal.
        repeats: Whether some samples may be repeated.
        marks_repeats: Whether each sample gets the mark ``valid``, which is false for repeats.
        leaves_out: Whether some samples may be left out.
        uses_batch_size: Whether the result of ``count_dealt`` depends on the batch size. If so, shardio's datasets
            require the batch size of torch's DataLoader.
    """

    effect: str
    count_dealt: Callable[[int, int, int], int]
    repeats: bool = False
    marks_repeats: bool = False
    leaves_out: bool = False
    uses_batch_size: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether each sample counts exactly once: none is left out, and repeats are marked."""
        return not self.leaves_out and self.repeats == self.marks_repeats


def _fill_ranks(num_left: int, world_size: int, _: int) -> int:
    return -(-num_left // world_size) * world_size


POLICIES: Mapping[Remainder, RemainderPolicy] = MappingProxyType(
    {
        "pad": RemainderPolicy(effect="repeats some samples", count_dealt=_fill_ranks, repeats=True),
        "mask": RemainderPolicy(
            effect="also marks the repeats", count_dealt=_fill_ranks, repeats=True, marks_repeats=True
        ),
        "keep": RemainderPolicy(
            effect="gives some ranks one more sample", count_dealt=lambda num_left, _world_size, _batch_size: num_left
        ),
        "drop": RemainderPolicy(
            effect="leaves the last samples out",
            count_dealt=lambda num_left, world_size, batch_size: num_left - num_left % (world_size * batch_size),
            leaves_out=True,
            uses_batch_size=True,
        ),
    }
)
"""The remainder policies, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One rank's share of an epoch, from a cursor to the end.

    Attributes:
        num_samples: N, the number of samples in the whole dataset.
        start: The cursor's position, 0 <= start <= N.
        rank: 0 <= rank < world_size.
        world_size: W.
        batch_size: B, the number of samples in one rank's batch.
        strata: The number of strata of the order. With one stratum, a rank reads consecutive positions in each step.
        remainder: The policy for the samples that do not fill a step.
    """

    num_samples: int
    start: int
    rank: int
    world_size: int
    batch_size: int
    strata: int
    remainder: Remainder

    @property
    def remainder_policy(self) -> RemainderPolicy:
        """The policy for the samples that do not fill a step."""
        return POLICIES[self.remainder]

    @property
    def stop(self) -> int:
        """The end of the positions that are split; positions from N on repeat the order's first samples."""
        num_left = self.num_samples - self.start
        return self.start + self.remainder_policy.count_dealt(num_left, self.world_size, self.batch_size)

    @property
    def num_batches(self) -> int:
        """The number of this rank's batches."""
        return self._num_full_steps + (self._num_own_in(self._num_full_steps) > 0)

    @property
    def num_own_samples(self) -> int:
        """The number of this rank's samples."""
        return self._num_full_steps * self.batch_size + self._num_own_in(self._num_full_steps)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the positions of this rank's batch in a step, int64 [n], 1 <= n <= B, in ascending order."""
        start, stop = self._step(step)
        first, count = self._share(stop - start)
        places = np.arange(first, first + count, dtype=np.int64)
        if self.strata == 1 or self.world_size == 1:
            return start + places
        num_sorted = min(stop, self.num_samples) - start
        found = select_by_strata(start, num_sorted, places[places < num_sorted], self.strata)
        return np.concatenate([np.sort(found), start + places[places >= num_sorted]])

    def batches(self, steps: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return :meth:`batch` of each step."""
        if self.strata > 1 and self.world_size > 1:
            return [self.batch(step) for step in steps]
        # In a full step, the positions of a batch are consecutive.
        num_full = bisect_left(steps, self._num_full_steps)
        firsts = self.start + np.array(steps[:num_full], np.int64) * self._step_size + self.rank * self.batch_size
        full = list(firsts[:, None] + np.arange(self.batch_size))
        return full + [self.batch(step) for step in steps[num_full:]]

    def find_valid(self, positions: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return the marks of samples, bool [n], false for repeats; None if the policy does not mark repeats."""
        return positions < self.num_samples if self.remainder_policy.marks_repeats else None

    def position_after(self, num_batches: int) -> int:
        """Return the cursor's position after every rank has received ``num_batches`` batches, or all of its batches."""
        position = self.start + num_batches * self._step_size
        return self.num_samples if position >= self.stop else position

    @property
    def _step_size(self) -> int:
        return self.world_size * self.batch_size

    @property
    def _num_full_steps(self) -> int:
        return (self.stop - self.start) // self._step_size

    def _step(self, step: int) -> tuple[int, int]:
        # The positions [start, stop) of all ranks in one step; the last step may have fewer positions, or none.
        start = self.start + step * self._step_size
        return start, min(start + self._step_size, self.stop)

    def _num_own_in(self, step: int) -> int:
        start, stop = self._step(step)
        return self._share(stop - start)[1]

    def _share(self, num_positions: int) -> tuple[int, int]:
        # The first of this rank's places among the sorted positions of a step, and the number of its places.
        quotient, num_longer = divmod(num_positions, self.world_size)
        first = self.rank * quotient + min(self.rank, num_longer)
        return first, quotient + (self.rank < num_longer)


def select_by_strata(start: int, count: int, places: NDArray[np.int64], strata: int) -> NDArray[np.int64]:
    """Sort consecutive positions by their strata, and return those at the given places in the result, int64 [n].

    Args:
        start: The first position.
        count: The number of positions.
        places: int64 [n], 0 <= place < count.
        strata: The number of strata of the order.
    """
    first_visits = (reverse_bits(strata) - start) % strata
    num_visits = np.maximum(-(-(count - first_visits) // strata), 0)
    stops = np.cumsum(num_visits)
    stratum = np.searchsorted(stops, places, side="right")
    visit = places - (stops - num_visits)[stratum]
    found: NDArray[np.int64] = start + first_visits[stratum] + visit * strata
    return found


def split_whole(order: EpochOrder, *, rank: int, world_size: int, batch_size: int) -> Split:
    """Return a rank's share of a whole epoch, in which no sample is repeated or left out."""
    return Split(
        num_samples=order.num_samples,
        start=0,
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        strata=order.settings.strata,
        remainder="keep",
    )


def iterate_steps(
    samples_at: Callable[[NDArray[np.int64]], NDArray[np.int64]], split: Split, steps: Sequence[int]
) -> Iterator[tuple[list[NDArray[np.int64]], NDArray[np.int64]]]:
    """Yield the positions and the indices of several steps at a time.

    Args:
        samples_at: A function that returns the samples at positions of the epoch.
        split: One rank's share of the epoch.
        steps: The steps to yield, in ascending order.

    Yields:
        A list with the positions of each step, and the concatenated indices of all their samples, int64 [n].
    """
    steps_at_once = -(-POSITIONS_AT_ONCE // split.batch_size)
    for first in range(0, len(steps), steps_at_once):
        positions = split.batches(steps[first : first + steps_at_once])
        yield positions, samples_at(np.concatenate(positions))
