"""The iterator that the user gets: it counts an epoch's batches, whichever executor makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardio.handover import hand_over
from shardio.interruptions import cut_short, describe_error
from shardio.loader.executors.executor import BatchIterator
from shardio.loader.failures import Failure
from shardio.loader.shutdown import before_shutdown
from shardio.order import Progress
from shardio.torch_modes import own_tensors


class EpochIterator:
    """An iterator over the batches of an epoch.

    An error in one batch does not end the epoch. Any other error does: after an error from a signal handler, for
    example, a batch may be lost, so every further call raises.

    In shardio's order, a batch counts when the user receives it. A failed batch counts when the user requests the next
    one, so a run that ends with the error resumes at that batch.

    Args:
        batches: The executor's batches.
        check: Raises an error if no further batch may be requested.
        progress: Counts the batches; None if the order is not shardio's.
        dataset: The name of the dataset's class, for messages.
    """

    def __init__(
        self, batches: BatchIterator, check: Callable[[], None], progress: Progress | None, dataset: str
    ) -> None:
        self._batches, self._check = batches, check
        self._progress, self._dataset = progress, dataset
        self._num_taken = self._num_counted = 0
        self._is_over = False
        self._cut_short_by: str | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch. If it cannot be made, raise its error; the next call returns the batch after it.

        Raises:
            RuntimeError: If the number of batches differs from the order's, or an earlier error ended the epoch.
        """
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if self._is_over:
            raise StopIteration
        self._check()
        self._cut_short_by = "an error"  # Until there is a batch: an error before that may lose one.
        try:
            self._count()
            with before_shutdown(), own_tensors():
                made = next(self._batches)
            self._num_taken += 1
            failure = made.restore() if isinstance(made, Failure) else None
            if failure is None:
                self._count()
        except StopIteration:
            self.close()
            self._finish()
            self._cut_short_by = None
            raise
        except BaseException as error:
            self._cut_short_by = describe_error(error)
            self.close()
            raise
        # No call may follow the next line: Python runs signal handlers where functions are called.
        self._cut_short_by = None
        if failure is None:
            return made
        try:
            raise failure
        finally:
            del made, failure  # Otherwise the error's traceback would keep this frame, and so the error, alive.

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead."""
        self._is_over = True
        self._batches.close()

    def _count(self) -> None:
        if self._progress is not None and self._num_counted < self._num_taken:
            self._num_counted = self._num_taken
            hand_over([partial(setattr, self._progress, "num_batches", self._num_counted)])

    def _finish(self) -> None:
        if self._progress is None:
            return
        hand_over([partial(setattr, self._progress, "is_finished", True)])
        expected = self._progress.split.num_batches
        if self._num_counted != expected:
            raise RuntimeError(
                f"the epoch had {self._num_counted} batches instead of {expected}: {self._dataset} must "
                "yield one value for each of its samples, because the state counts them. Filter in collate_fn instead, "
                "or use torch's DataLoader"
            )
