"""Where an iteration over a ShardDataset begins: set in the training process, and read by torch's workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from shardio.datasets.shared_numbers import SharedNumbers
from shardio.order import Cursor

_BEGINNING = Cursor(epoch=0)


class EpochCell:
    """The epoch and position at which the next iteration begins, the same in all workers of a loader.

    Workers start in their own time, and by then the training process may have named the epoch after this one. So a
    worker's first iteration begins where it was to begin when the worker process was started. Of a later one, which
    needs workers that stay, torch tells the training process nothing: there the first worker to begin reads what was
    set last, and the others follow it.

    Attributes:
        num_sets: How often this process set it, by which a loader notices that its user did.
    """

    def __init__(self, cursor: Cursor = _BEGINNING) -> None:
        # Epoch and position of the next iteration; then what workers agreed on, see _agree.
        self._numbers = SharedNumbers([cursor.epoch, cursor.position, 0, 0, 0, 0, 0])
        self._own = cursor  # As this process set it, or in a worker, the process that started it.
        self._num_starts = 0
        self.num_sets = 0

    @property
    def next(self) -> Cursor:
        """Where the next iteration begins, as it was last set by whichever process."""
        epoch, position = self._numbers.array[:2].tolist()
        return Cursor(epoch=epoch, position=position)

    def set(self, cursor: Cursor) -> None:
        """Name it for all processes that share the cell."""
        self._numbers.array[:2] = cursor.epoch, cursor.position
        self._own = cursor
        self.num_sets += 1

    def start(self, dataset: Any) -> Cursor:
        """Return where the iteration over ``dataset`` that begins now begins."""
        info = get_worker_info()
        if info is None or info.dataset is not dataset:  # Within another dataset it need not be once an epoch.
            return self.next
        self._num_starts += 1
        if self._num_starts == 1:
            return self._own
        return self._agree(info.seed - info.id, info.num_workers)

    def _agree(self, loader: int, num_workers: int) -> Cursor:
        """Return what the first worker of a loader reads that calls this.

        Args:
            loader: The seed of the loader's workers. Another loader may have the same one, so what was agreed on holds
                for as many calls as there are workers.
            num_workers: How many there are.
        """
        with self._numbers.locked():
            known_loader, known_start, epoch, position, num_to_come = self._numbers.array[2:].tolist()
            if not num_to_come or (known_loader, known_start) != (loader, self._num_starts):
                epoch, position = self._numbers.array[:2].tolist()
                num_to_come = num_workers
            self._numbers.array[2:] = loader, self._num_starts, epoch, position, num_to_come - 1
        return Cursor(epoch=epoch, position=position)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochCell:
        return EpochCell(self.next)
