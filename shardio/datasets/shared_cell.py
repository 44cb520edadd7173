"""Numbers that the training process sets and its workers see, such as the epoch, or the other way round."""

from __future__ import annotations

from typing import Any

import torch


class SharedCell:
    """A few integers in shared memory. Workers that hold a copy of the cell see what is set later, too.

    Attributes:
        num_sets: How often this process set it, by which a loader notices that its user did.
    """

    def __init__(self, *values: int) -> None:
        self._values = torch.tensor(values, dtype=torch.int64).share_memory_()
        self.num_sets = 0

    @property
    def values(self) -> tuple[int, ...]:
        """The integers as they were last set, by whichever process."""
        return tuple(self._values.tolist())

    def set(self, *values: int) -> None:
        """Set the integers for all processes that share the cell."""
        self._values.copy_(torch.tensor(values, dtype=torch.int64))
        self.num_sets += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCell:
        return SharedCell(*self.values)


class SharedCount:
    """A count that several workers add to, each in a place of its own, since adding is not atomic.

    Args:
        num_workers: How many add to it; the training process counts as one where it has no workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._counts = torch.zeros(max(num_workers, 1), dtype=torch.int64).share_memory_()

    @property
    def total(self) -> int:
        """What all workers have counted together."""
        return int(self._counts.sum())

    def add_one(self, worker_id: int) -> None:
        """Count one more."""
        self._counts[worker_id % len(self._counts)] += 1

    def clear(self) -> None:
        """Begin again at 0."""
        self._counts.zero_()
