"""Where an iteration over a ShardDataset begins: set in the training process, read by torch's workers."""

from __future__ import annotations

from typing import Any

from shardio.order import Cursor
from shardio.shared_numbers import SharedNumbers
from shardio.world import find_worker_over

_BEGINNING = Cursor(epoch=0)


class EpochCell:
    """The epoch and position at which the next iteration begins, the same in all workers of a loader.

    Workers start asynchronously, and by then the training process may have set the next epoch. So a worker's first
    iteration begins at the value that was set when its process was started. Later iterations need persistent workers,
    and torch does not tell the training process when they begin: the first worker that begins reads the value that was
    set last, and the others follow it.

    Attributes:
        num_sets: How often this process set it. A loader compares this count to notice that its user set it.
    """

    def __init__(self, cursor: Cursor = _BEGINNING) -> None:
        # Epoch and position of the next iteration, then what workers agreed on: see _agree.
        self._numbers = SharedNumbers([cursor.epoch, cursor.position, 0, 0, 0, 0, 0])
        self._own = cursor  # Set by this process or, in a worker, by the process that started it.
        self._num_starts = 0
        self.num_sets = 0

    @property
    def next(self) -> Cursor:
        """Where the next iteration begins: the value that any process set last."""
        epoch, position = self._numbers.array[:2].tolist()
        return Cursor(epoch=epoch, position=position)

    def set(self, cursor: Cursor) -> None:
        """Set it for all processes that share the cell."""
        self._numbers.array[:2] = cursor.epoch, cursor.position
        self._own = cursor
        self.num_sets += 1

    def start(self, dataset: Any) -> Cursor:
        """Return where an iteration over ``dataset`` begins that starts now."""
        worker = find_worker_over(dataset)
        if worker is None:  # In a worker: a dataset that wraps this one need not iterate over it once an epoch.
            return self.next
        self._num_starts += 1
        if self._num_starts == 1:
            return self._own
        return self._agree(worker.loader_seed, worker.num_workers)

    def _agree(self, loader: int, num_workers: int) -> Cursor:
        """Return the value that the first of a loader's workers to call this reads.

        Args:
            loader: The seed of the loader's workers. Another loader may have the same seed, so an agreement holds
                for as many calls as there are workers.
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
