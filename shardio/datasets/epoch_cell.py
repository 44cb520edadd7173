"""Where an iteration over a ShardDataset begins: set in the training process, read by torch's workers."""

from __future__ import annotations

from typing import Any

from shardio.order import Cursor
from shardio.shared_numbers import SharedNumbers
from shardio.world import find_worker_over

_BEGINNING = Cursor(epoch=0)


class EpochCell:
    """The epoch and position at which the next iteration begins, the same in all workers of a loader.

    Workers start asynchronously: before they run, the training process may already set the next epoch. So a worker's
    first iteration begins at the value that was current when its process was started. Later iterations happen in
    persistent workers only, and torch does not report when they begin. The first worker to begin reads the latest
    value, and the others use the same one.

    Attributes:
        num_sets: How many times this process set the cell. A loader compares this count to detect a call by the user.
    """

    def __init__(self, cursor: Cursor = _BEGINNING) -> None:
        # The epoch and position of the next iteration, then the agreement between workers: see _agree.
        self._numbers = SharedNumbers([cursor.epoch, cursor.position, 0, 0, 0, 0, 0])
        self._own = cursor  # Set by this process or, in a worker, by the process that started it.
        self._num_starts = 0
        self.num_sets = 0

    @property
    def next(self) -> Cursor:
        """Where the next iteration begins: the latest value, whichever process set it."""
        epoch, position = self._numbers.array[:2].tolist()
        return Cursor(epoch=epoch, position=position)

    def set(self, cursor: Cursor) -> None:
        """Set where the next iteration begins, for all processes that share the cell."""
        self._numbers.array[:2] = cursor.epoch, cursor.position
        self._own = cursor
        self.num_sets += 1

    def start(self, dataset: Any) -> Cursor:
        """Start an iteration over ``dataset``; return where it begins."""
        worker = find_worker_over(dataset)
        # A dataset that wraps this one may iterate over it any number of times per epoch.
        if worker is None:
            return self.next
        self._num_starts += 1
        if self._num_starts == 1:
            return self._own
        return self._agree(worker.loader_seed, worker.num_workers)

    def _agree(self, loader: int, num_workers: int) -> Cursor:
        """Return the same start to all workers of a loader: the latest value at the first of their calls.

        Args:
            loader: The seed of the loader's workers. Another loader may have the same seed, so an agreement ends
                after ``num_workers`` calls.
            num_workers: The number of workers.
        """
        with self._numbers.locked():
            known_loader, known_start, epoch, position, num_to_come = self._numbers.array[2:].tolist()
            if not num_to_come or (known_loader, known_start) != (loader, self._num_starts):
                epoch, position = self._numbers.array[:2].tolist()
                num_to_come = num_workers
            self._numbers.array[2:] = loader, self._num_starts, epoch, position, num_to_come - 1
        return Cursor(epoch=epoch, position=position)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochCell:
        copied = EpochCell(self.next)
        copied.num_sets = self.num_sets  # Otherwise a copied loader would take the epoch for one that was set since.
        return copied
