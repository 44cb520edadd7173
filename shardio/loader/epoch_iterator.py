"""An epoch's batches as the user gets them: all of them, and counted, whatever made them."""

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
    """Iterate over the batches of an epoch.

    The error of a batch does not end the epoch. Any other error does: after an error from a signal handler, for
    example, a batch may be lost, so each further call raises.

    Where shardio has the order, a batch counts when it is handed out. A batch that failed counts when the user requests
    the next one: a run that ends with the error resumes with that batch.

    Args:
        batches: The executor's batches.
        check: Raises if no further batch may be requested.
        progress: Counts the batches, where shardio has the order.
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
        """Return the next batch. A batch that cannot be made raises its error; the next call returns the next batch.

        Raises:
            RuntimeError: If the number of batches differs from the order's, or another error ended the epoch before.
        """
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if self._is_over:
            raise StopIteration
        self._check()
        self._cut_short_by = "an error"  # Until there is a batch: whatever happens meanwhile, one may be lost.
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
            del made, failure  # Otherwise the error would keep itself alive, and what it came from.

    def close(self) -> None:
        """Stop; drop batches that were made ahead."""
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
                f"the epoch had {self._num_counted} batches instead of {expected}: {self._dataset} yields other "
                "samples than its order has, so no state could be right. Filter in collate_fn, or use torch's own "
                "DataLoader"
            )
