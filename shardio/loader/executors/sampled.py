"""An executor for orders that are not shardio's: it counts the batches of another one for the loader's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardio.loader.batch_plans import SamplerPlanner, SamplerProgress
from shardio.loader.executors.executor import BatchIterator, Executor
from shardio.loader.failures import Failure
from shardio.loader.stats import LoaderStats
from shardio.order import Cursor, Split


class SampledExecutor:
    """An executor whose batches count when the user receives them.

    Args:
        executor: Makes the batches.
        planner: Its planner.
    """

    def __init__(self, executor: Executor, planner: SamplerPlanner) -> None:
        self._executor, self._planner = executor, planner

    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        """Begin an epoch and return its batches."""
        batches = self._executor.start(cursor, split)
        assert self._planner.counted is not None, "the executor has planned an epoch"
        return SampledBatches(batches, self._planner.counted)

    def start_workers(self) -> None:
        """Start the workers of the next epoch now."""
        self._executor.start_workers()

    def stats(self) -> LoaderStats | None:
        """Return the statistics of the latest epoch."""
        return self._executor.stats()


class SampledBatches:
    """The batches of one epoch.

    Args:
        batches: The batches, in their order.
        progress: Counts them.
    """

    def __init__(self, batches: BatchIterator, progress: SamplerProgress) -> None:
        self._batches, self._progress = batches, progress
        self._has_failed = False

    @property
    def indices(self) -> Iterator[Any]:
        """The indices that the sampler still yields."""
        return self._progress.indices

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead."""
        if self._has_failed:  # A failed batch counts when the next one is requested.
            self._progress.count_one()
        try:
            made = next(self._batches)
        except StopIteration:
            self._progress.finish()
            raise
        self._has_failed = isinstance(made, Failure)
        if not self._has_failed:
            self._progress.count_one()
        return made

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is there."""
        return self._batches.is_ready(timeout_s)

    @property
    def members(self) -> Sequence[Any]:
        """The workers."""
        return self._batches.members

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead."""
        self._batches.close()

    def end_workers(self) -> None:
        """End the workers, also those that persist."""
        self._batches.end_workers()
