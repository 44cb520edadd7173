"""An epoch's batches, as the user gets them: counted, whoever made them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from shardio.handover import hand_over
from shardio.order import Progress


class Batches(Protocol):
    """Makes an epoch's batches in their order. An error ends a batch, and not the epoch.

    Attributes:
        num_taken: How many were asked for, and came or failed.
    """

    num_taken: int

    def __next__(self) -> Any: ...

    def close(self) -> None: ...


class EpochBatches:
    """An iterator over the batches of an epoch in shardio's order.

    A batch counts when it is handed out. One that failed counts when the user asks for the next: a run that ends by
    the error is resumed with that batch.

    Args:
        batches: Makes them.
        progress: Counts them.
        check: Raises if they must not be asked for any more.
        dataset: What they come from, for messages.
    """

    def __init__(self, batches: Batches, progress: Progress, check: Callable[[], None], dataset: str) -> None:
        self._batches, self._progress = batches, progress
        self._check, self._dataset = check, dataset
        self._num_counted = 0
        self._is_over = self._is_broken = False

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> Any:
        """Return the next batch. One that cannot be made raises; the next call goes on behind it.

        Raises:
            RuntimeError: If there were other batches than the order has.
        """
        if self._is_over:
            raise StopIteration
        self._check()
        self._count()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            if not self._is_broken:
                self._finish()
            raise
        except BaseException:
            self._is_broken |= self._batches.num_taken == self._num_counted
            raise
        self._count()
        return batch

    def close(self) -> None:
        """Stop; what was made and not handed out is thrown away."""
        self._is_over = True
        self._batches.close()

    def _count(self) -> None:
        if self._num_counted < self._batches.num_taken:
            self._num_counted = self._batches.num_taken
            hand_over([partial(setattr, self._progress, "num_batches", self._num_counted)])

    def _finish(self) -> None:
        hand_over([partial(setattr, self._progress, "is_finished", True)])
        expected = self._progress.split.num_batches
        if self._num_counted != expected:
            raise RuntimeError(
                f"the epoch had {self._num_counted} batches instead of {expected}: {self._dataset} yields other "
                "samples than its order has, so that no state could be right. Filter in collate_fn, or use torch's own "
                "DataLoader"
            )
