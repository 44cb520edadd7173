"""The executor that makes batches in shardio's worker processes, directly in slots."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardio.loader.batch_plans import Planner
from shardio.loader.executors.in_flight import BatchSettings
from shardio.loader.executors.pipeline import Pipeline
from shardio.loader.processes.fork_server import ForkServer
from shardio.loader.processes.messages import WorkerSetup
from shardio.loader.processes.pool import WorkerPool
from shardio.loader.slots.slot_pool import SlotPool, SlotWatch
from shardio.loader.stats import LoaderStats, Tally
from shardio.order import Cursor, Split


class WorkerProcesses:
    """An executor that makes batches in worker processes, several ahead.

    Args:
        planner: Plans the batches of an epoch.
        settings: What all batches of the loader have in common.
        watches: Those of the epoch that begins.
        timeout_s: How long to wait for a batch; 0 waits forever.
        closes_workers: Whether the worker processes end with each epoch. Their fork server stays for the next ones.
    """

    def __init__(
        self,
        planner: Planner,
        settings: BatchSettings,
        watches: Sequence[SlotWatch],
        *,
        timeout_s: float,
        closes_workers: bool,
    ) -> None:
        self._planner, self._settings, self._watches = planner, settings, watches
        self._timeout_s, self._closes_workers = timeout_s, closes_workers
        self._workers: WorkerPool | None = None
        self._slots: SlotPool | None = None
        self._is_unused = False  # Whether the workers were started for an epoch that has not begun.
        self._latest: Callable[[], Pipeline | None] = _none
        self._tally = Tally(num_workers=settings.sizing.num_threads)

    def start(self, cursor: Cursor | None, split: Split | None) -> Pipeline:
        """Begin an epoch and return its batches. If the worker processes persist, this ends an unfinished epoch."""
        began = time.perf_counter()
        workers, slots = self._find_workers()
        slots.watch(self._watches)
        plans, source = self._planner.plan(cursor, split)
        self._tally = self._settings.begin_tally(source.decoder, workers.num_threads, began)
        pipeline = Pipeline(
            source,
            plans,
            workers,
            slots,
            self._settings,
            self._tally,
            timeout_s=self._timeout_s,
            closes_workers=self._closes_workers,
        )
        self._latest = weakref.ref(pipeline)
        return pipeline

    def start_workers(self) -> None:
        """Start the worker processes of the next epoch now, unless they are there already."""
        if self._usable_workers() is None:
            self._make_workers()
            self._is_unused = True

    def stats(self) -> LoaderStats:
        """Return the statistics of the latest epoch."""
        stats = self._tally.sum_up()
        if self._workers is None:
            return stats
        return replace(stats, worker_bytes=tuple(self._workers.memory.bytes_by_worker.values()))

    def _find_workers(self) -> tuple[WorkerPool, SlotPool]:
        """Return the worker processes and slots for the next epoch: those of the latest one, if they persist."""
        if not self._closes_workers and (latest := self._latest()) is not None:
            latest.close()
        found = self._usable_workers() or self._make_workers()
        self._is_unused = False
        return found

    def _usable_workers(self) -> tuple[WorkerPool, SlotPool] | None:
        """Return the worker processes that the next epoch can use, and their slots."""
        workers, slots = self._workers, self._slots
        if workers is None or slots is None or workers.is_closed or not workers.belongs_here:
            return None
        return None if self._closes_workers and not self._is_unused else (workers, slots)

    def _free_server(self) -> ForkServer | None:
        """Return the fork server of the latest worker processes, if they have ended."""
        workers = self._workers
        return workers.server if workers is not None and workers.is_closed and workers.belongs_here else None

    def _make_workers(self) -> tuple[WorkerPool, SlotPool]:
        dataset = self._planner.dataset.dataset
        num_threads = self._settings.sizing.num_threads
        setup = WorkerSetup(reader=dataset.reader, decoder=dataset.decoder, collation=self._settings.collation)
        workers = WorkerPool(self._free_server() or ForkServer(), setup, num_threads)
        slots = SlotPool(workers.announce, workers.forget)
        if self._slots is not None and self._slots.layout is not None:
            slots.lay_out(self._slots.layout, self._settings.sizing.num_spare(self._slots.layout))
        self._workers, self._slots = workers, slots
        return workers, slots


def _none() -> None:
    """Return None, like a reference to a pipeline before there is one."""
