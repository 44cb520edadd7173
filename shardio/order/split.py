"""The split: the positions of an epoch that one rank reads, batch by batch.

With world size W and B samples per rank, step t holds W * B consecutive positions, counted from the cursor at which the
epoch began or resumed. Every rank takes its share of each step. The samples after the last full step are split by the
same rule. Worker k of n makes the batches t with t mod n == k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardio.order.epoch_order import EpochOrder

Remainder = Literal["pad", "mask", "keep", "drop"]
"""The treatment of samples that do not fill a step. See :class:`Split`."""

POSITIONS_AT_ONCE = 4096
"""The smallest number of positions whose order is computed at once, apart from the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One rank's share of an epoch, from a cursor to the end.

    Attributes:
        num_samples: N, the number of samples in the whole dataset.
        start: The cursor's position, 0 <= start <= N.
        rank: 0 <= rank < world_size.
        world_size: W.
        batch_size: B, the number of samples in one rank's batch.
        shuffled: Whether the order is shuffled. If so, rank r takes the positions p with p mod W == r, and so reads
            fewer lanes if their number shares a factor with W. If not, it takes consecutive positions in each step,
            and so reads few shards.
        remainder: ``pad`` and ``mask`` repeat the order's first samples to reach a multiple of W. ``keep`` splits the
            samples without repeats, so ranks differ by at most one sample. ``drop`` leaves out the samples that do
            not fill a step.
    """

    num_samples: int
    start: int
    rank: int
    world_size: int
    batch_size: int
    shuffled: bool
    remainder: Remainder

    @property
    def stop(self) -> int:
        """The end of the positions that are split: N or more with ``pad`` and ``mask``, at most N otherwise."""
        left = self.num_samples - self.start
        match self.remainder:
            case "pad" | "mask":
                return self.start + -(-left // self.world_size) * self.world_size
            case "drop":
                return self.start + left // self._step_size * self._step_size
            case "keep":
                return self.num_samples

    @property
    def num_batches(self) -> int:
        """The number of this rank's batches."""
        return self._num_full_steps + (self._share(*self._step(self._num_full_steps))[1] > 0)

    @property
    def num_own_samples(self) -> int:
        """The number of this rank's samples."""
        return self._num_full_steps * self.batch_size + self._share(*self._step(self._num_full_steps))[1]

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the positions of this rank's batch in a step, int64 [n], 1 <= n <= B."""
        first, count, stride = self._share(*self._step(step))
        return first + stride * np.arange(count, dtype=np.int64)

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
        """Return the positions [start, stop) of all ranks in one step; the last step may be short or empty."""
        start = self.start + step * self._step_size
        return start, min(start + self._step_size, self.stop)

    def _share(self, start: int, stop: int) -> tuple[int, int, int]:
        """Return this rank's share of the positions [start, stop): first position, count, stride."""
        if self.shuffled:
            first = start + (self.rank - start) % self.world_size
            return first, max(0, -(-(stop - first) // self.world_size)), self.world_size
        quotient, num_longer = divmod(stop - start, self.world_size)
        first = start + self.rank * quotient + min(self.rank, num_longer)
        return first, quotient + (self.rank < num_longer), 1


def iterate_steps(
    order: EpochOrder, split: Split, steps: Sequence[int]
) -> Iterator[tuple[list[NDArray[np.int64]], NDArray[np.int64]]]:
    """Yield the positions and the indices of several steps at a time.

    Args:
        order: The epoch's order.
        split: One rank's share of it.
        steps: The steps to yield.

    Yields:
        A list with the positions of each step, and the concatenated indices of all their samples, int64 [n].
    """
    steps_at_once = -(-POSITIONS_AT_ONCE // split.batch_size)
    for first in range(0, len(steps), steps_at_once):
        positions = [split.batch(step) for step in steps[first : first + steps_at_once]]
        yield positions, order.samples_at(np.concatenate(positions))
