"""Numbers that the training process sets and its workers see, such as the epoch, or the other way round."""

from __future__ import annotations

from typing import Any

from shardio.datasets.shared_numbers import SharedNumbers


class SharedCell:
    """A few integers in shared memory. Workers that hold a copy of the cell see what is set later, too.

    Attributes:
        num_sets: How often this process set it, by which a loader notices that its user did.
    """

    def __init__(self, *values: int) -> None:
        self._numbers = SharedNumbers(values)
        self.num_sets = 0

    @property
    def values(self) -> tuple[int, ...]:
        """The integers as they were last set, by whichever process."""
        return tuple(self._numbers.array.tolist())

    def set(self, *values: int) -> None:
        """Set the integers for all processes that share the cell."""
        self._numbers.array[:] = values
        self.num_sets += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCell:
        return SharedCell(*self.values)


class SharedCount:
    """A count that several workers add to, each in a place of its own, since adding is not atomic.

    Args:
        num_workers: How many add to it; the training process counts as one where it has no workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._numbers = SharedNumbers([0] * max(num_workers, 1))

    @property
    def total(self) -> int:
        """What all workers have counted together."""
        return int(self._numbers.array.sum())

    def add_one(self, worker_id: int) -> None:
        """Count one more."""
        self._numbers.array[worker_id % len(self._numbers.array)] += 1

    def clear(self) -> None:
        """Begin again at 0."""
        self._numbers.array[:] = 0
