"""An epoch's batches, as the user gets them: all of them, and counted, whoever made them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from shardio.handover import hand_over
from shardio.interruptions import cut_short, describe_error
from shardio.loader.messages import Failed
from shardio.order import Progress


class Batches(Protocol):
    """Makes an epoch's batches in their order."""

    def take(self) -> Any:
        """Return the next batch, or Failed in its place: the one behind it can be taken then.

        Raises:
            StopIteration: If there is none.
            BaseException: Whatever ends the epoch. Nothing is taken after that.
        """

    def close(self) -> None: ...


class EpochBatches:
    """An iterator over the batches of an epoch.

    The error of a batch does not end the epoch. Any other error does, wherever it comes from: after a signal handler's,
    say, a batch may be lost, so each further call raises.

    Where shardio has the order, a batch counts when it is handed out. One that failed counts when the user asks for the
    next: a run that ends by the error is resumed with that batch.

    Args:
        batches: Makes them.
        check: Raises if they must not be asked for any more.
        progress: Counts them, where shardio has the order.
        dataset: What they come from, for messages.
    """

    def __init__(
        self,
        batches: Batches,
        check: Callable[[], object] = bool,  # It raises nothing.
        progress: Progress | None = None,
        dataset: str = "",
    ) -> None:
        self._batches, self._check = batches, check
        self._progress, self._dataset = progress, dataset
        self._num_taken = self._num_counted = 0
        self._is_over = False
        self._cut_short_by: str | None = None

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> Any:
        """Return the next batch. One that cannot be made raises; the next call goes on behind it.

        Raises:
            RuntimeError: If there were other batches than the order has, or another error ended the epoch before.
        """
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if self._is_over:
            raise StopIteration
        self._check()
        self._cut_short_by = "an error"  # Until there is a batch: whatever happens meanwhile, one may be lost.
        try:
            self._count()
            made = self._batches.take()
            self._num_taken += 1
            has_failed = isinstance(made, Failed)
            if not has_failed:
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
        # No call comes behind this: Python runs signal handlers where functions are called.
        self._cut_short_by = None
        if not has_failed:
            return made
        try:
            raise made.error
        finally:
            del made  # Or the error would keep itself, and what it came from.

    def close(self) -> None:
        """Stop; what was made and not handed out is thrown away."""
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
                "samples than its order has, so that no state could be right. Filter in collate_fn, or use torch's own "
                "DataLoader"
            )
