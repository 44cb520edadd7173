"""The iterator that the user gets: it counts an epoch's batches, whichever executor makes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from shardio.handover import find_rng_keys, hand_over
from shardio.interruptions import cut_short, describe_error
from shardio.loader.executors.executor import BatchIterator
from shardio.loader.failures import Failure
from shardio.loader.shutdown import before_shutdown
from shardio.order import Progress, make_rng_key


class EpochIterator:
    """An iterator over the batches of an epoch.

    An error in one batch does not end the epoch. Any other error does: after an error from a signal handler, for
    example, a batch may be lost, so every further call raises.

    In shardio's order, a batch counts when the user receives it. A failed batch counts when the user requests the next
    one, so a run that ends with the error resumes at that batch.

    Args:
        batches: The executor's batches.
        check: Raises an error if no further batch may be requested.
        modes: Returns a context in which batches are made, with the modes of torch that apply to them.
        progress: Counts the batches; None if the order is not shardio's.
        loader: The loader.
    """

    def __init__(
        self,
        batches: BatchIterator,
        check: Callable[[], None],
        modes: Callable[[], AbstractContextManager[None]],
        progress: Progress | None,
        loader: Any,
    ) -> None:
        self._progress, self._loader = progress, loader
        self.begin(batches, check, modes)

    def begin(
        self, batches: BatchIterator, check: Callable[[], None], modes: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Begin an epoch; the arguments are those of the class."""
        self._batches, self._check, self._modes = batches, check, modes
        self._num_taken = self._num_counted = 0
        self._is_over = False
        self._cut_short_by: str | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        # Not the loader's length without shardio's order: like torch, do not ask an iterable dataset for its length.
        return len(self._loader._index_sampler if self._progress is None else self._loader)

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
            with before_shutdown(), self._modes():
                made = next(self._batches)
            self._num_taken += 1
            failure = made.restore() if isinstance(made, Failure) else None
            if failure is None:
                self._count()
                if self._progress is not None and (keys := find_rng_keys()) is not None:
                    keys.make = partial(self._make_rng_key, self._num_taken - 1)
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

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is there."""
        if self._is_over or self._cut_short_by is not None:
            return True
        try:
            with before_shutdown(), self._modes():
                return self._batches.is_ready(timeout_s)
        except BaseException as error:  # As in __next__.
            self._cut_short_by = describe_error(error)
            self.close()
            raise

    @property
    def _workers(self) -> list[Any]:
        """The workers that call the user's dataset. Frameworks and tests look for torch's attribute."""
        return list(self._batches.members)

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead."""
        self._is_over = True
        self._batches.close()

    def _make_rng_key(self, num_before: int) -> int:
        """Return the rng key of this rank's batch after ``num_before`` others of this iterator."""
        progress, seed = self._progress, self._loader._order.ordered.seed
        assert progress is not None, "only shardio's order has keys"
        split = progress.split
        (rng_key,) = make_rng_key(seed, progress.cursor.epoch, "batch", split.position_after(num_before), split.rank)
        return int(rng_key)

    def _count(self) -> None:
        if self._progress is not None and self._num_counted < self._num_taken:
            self._num_counted = self._num_taken
            hand_over([partial(setattr, self._progress, "num_batches", self._num_counted)])

    def _finish(self) -> None:
        if self._progress is None:
            return
        hand_over([partial(setattr, self._progress, "is_finished", True)])
        expected, dataset = self._progress.split.num_batches, type(self._loader.dataset).__name__
        if self._num_counted != expected:
            raise RuntimeError(
                f"the epoch had {self._num_counted} batches instead of {expected}: {dataset} must "
                "yield one value for each of its samples, because the state counts them. Filter in collate_fn instead, "
                "or use torch's DataLoader"
            )
