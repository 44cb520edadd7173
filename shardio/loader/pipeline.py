"""Executors that make batches of shardio's datasets, in worker processes or in the calling process."""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardio.loader.assembly import (
    Batch,
    BatchChunk,
    BatchSettings,
    ChunkQueue,
    OutcomeHandler,
    choose_layout,
    cut_batch,
    finish_batch,
    fit_layout,
)
from shardio.loader.batches import BatchPlan, PlannedEpoch, Planner, repeat_error
from shardio.loader.buffers import BufferPool, BufferWatch, Layout, Views
from shardio.loader.chunk_pool import WorkerPool
from shardio.loader.chunk_worker import ChunkBuilder
from shardio.loader.executor import IN_ANOTHER_PROCESS, SUPERSEDED, BatchIterator, Executor
from shardio.loader.fork_server import ForkServer
from shardio.loader.statistics import Tally
from shardio.loader.wire import Failed, Failure, Outcome, WorkerSetup
from shardio.order import Cursor, Split
from shardio.process import let_through


class PlannedBatches(BatchIterator):
    """The base class of iterators over batches of shardio's datasets.

    Args:
        epoch: The plans of the batches.
        settings: The settings of all batches of the loader.
        tally: The running counts of the epoch.
    """

    def __init__(self, epoch: PlannedEpoch, settings: BatchSettings, tally: Tally) -> None:
        self._plans, self._source, self._progress = epoch.plans, epoch.source, epoch.progress
        self._settings, self._tally = settings, tally
        self._handler = OutcomeHandler(source=epoch.source, bad_samples=settings.bad_samples, tally=tally)
        self._has_failed = False

    @property
    def indices(self) -> Iterator[Any] | None:
        return None if self._progress is None else self._progress.indices

    def __next__(self) -> Any:
        began = time.perf_counter()
        if self._progress is not None and self._has_failed:  # A failed batch is counted when the next one is requested.
            self._progress.count_one()
        try:
            batch, views = self._take()
            made = finish_batch(self._source, batch, views, self._tally, began, self._settings)
        except StopIteration:
            self.close()
            if self._settings.bad_samples is not None:
                self._settings.bad_samples.warn(self._tally.num_bad, self._source.epoch)
            if self._progress is not None:
                self._progress.finish()
            raise
        except BaseException:  # Ctrl-C, for example, may cut off a message, so the next epoch starts new workers.
            self.end_workers()
            raise
        self._has_failed = isinstance(made, Failure)
        if self._progress is not None and not self._has_failed:
            self._progress.count_one()
        return made

    @abstractmethod
    def _take(self) -> tuple[Batch, Views]:
        """Return the next batch, which is finished or has failed, and its fixed-size columns.

        Raises:
            StopIteration: If the epoch has no more batches.
        """

    def _next_plan(self) -> BatchPlan | Batch | None:
        """Return the next plan, a failed batch if the user's sampler has failed, or None at the end."""
        try:
            return next(self._plans, None)
        except Exception as error:  # After the earlier batches, every request raises this error.
            let_through(error)
            self._plans = repeat_error(error)
            return Batch(error=error)


def take_tiles(epoch: PlannedEpoch, watches: Sequence[BufferWatch], settings: BatchSettings) -> PlannedEpoch:
    """Return the plans of an epoch. If a watch decodes images, they are collected as tiles where possible."""
    here = threading.get_ident()
    is_wanted = any(watch.takes_tiles and watch.thread_id == here for watch in watches)
    if not is_wanted or settings.collation is not None or not epoch.source.decoder.can_tile:
        return epoch
    return replace(epoch, source=replace(epoch.source, takes_tiles=True))


class WorkerProcesses(Executor):
    """An executor that makes batches in worker processes, several batches ahead.

    Args:
        planner: The planner of the batches.
        settings: The settings of all batches of the loader.
        watches: The watches of the next epoch.
        timeout_s: The longest wait for a batch, in seconds; 0 waits forever.
        closes_workers: Whether the worker processes end with each epoch. The fork server keeps running.
    """

    def __init__(
        self,
        planner: Planner,
        settings: BatchSettings,
        watches: Sequence[BufferWatch],
        *,
        timeout_s: float,
        closes_workers: bool,
    ) -> None:
        self._planner, self._settings, self._watches = planner, settings, watches
        self._timeout_s, self._closes_workers = timeout_s, closes_workers
        self._workers: WorkerPool | None = None
        self._buffers: BufferPool | None = None
        self._is_unused = False  # Whether the workers were started for an epoch that has not begun.
        self._latest: weakref.ref[Pipeline] | None = None
        self.tally = Tally(num_workers=settings.sizing.num_threads)

    def start(self, cursor: Cursor | None, split: Split | None) -> Pipeline:
        """Begin an epoch and return its batches. If the worker processes persist, an unfinished earlier epoch ends."""
        began = time.perf_counter()
        workers, buffers = self._find_workers()
        buffers.watch(self._watches)
        epoch = take_tiles(self._planner.plan(cursor, split), self._watches, self._settings)
        self.tally = self._settings.begin_tally(epoch.source.decoder, workers.num_threads, began)
        self.tally.bytes_by_worker = workers.memory.bytes_by_worker
        pipeline = Pipeline(
            epoch,
            workers,
            buffers,
            self._settings,
            self.tally,
            timeout_s=self._timeout_s,
            closes_workers=self._closes_workers,
        )
        self._latest = weakref.ref(pipeline)
        return pipeline

    def start_workers(self) -> None:
        if self._usable_workers() is None:
            self._make_workers()
            self._is_unused = True

    def _find_workers(self) -> tuple[WorkerPool, BufferPool]:
        latest = None if self._latest is None else self._latest()
        if not self._closes_workers and latest is not None:
            latest.close()
        found = self._usable_workers() or self._make_workers()
        self._is_unused = False
        return found

    def _usable_workers(self) -> tuple[WorkerPool, BufferPool] | None:
        workers, buffers = self._workers, self._buffers
        if workers is None or buffers is None or workers.is_closed or not workers.belongs_here:
            return None
        return None if self._closes_workers and not self._is_unused else (workers, buffers)

    def _free_server(self) -> ForkServer | None:
        workers = self._workers
        return workers.server if workers is not None and workers.is_closed and workers.belongs_here else None

    def _make_workers(self) -> tuple[WorkerPool, BufferPool]:
        dataset = self._planner.dataset.dataset
        num_threads = self._settings.sizing.num_threads
        setup = WorkerSetup(reader=dataset.reader, decoder=dataset.decoder, collation=self._settings.collation)
        workers = WorkerPool(self._free_server() or ForkServer(), setup, num_threads)
        buffers = BufferPool(workers.announce, workers.forget)
        if self._buffers is not None and self._buffers.layout is not None:
            buffers.lay_out(self._buffers.layout, self._settings.sizing.num_spare(self._buffers.layout))
        self._workers, self._buffers = workers, buffers
        return workers, buffers


class Pipeline(PlannedBatches):
    """The batches of one epoch, made by worker processes that serve one epoch at a time.

    Args:
        epoch: The plans of the batches.
        workers: The worker processes.
        buffers: The buffers of the batches.
        settings: The settings of all batches of the loader.
        tally: The running counts of the epoch.
        timeout_s: The longest wait for a batch, in seconds; 0 waits forever.
        closes_workers: Whether the worker processes end with the epoch.
    """

    def __init__(
        self,
        epoch: PlannedEpoch,
        workers: WorkerPool,
        buffers: BufferPool,
        settings: BatchSettings,
        tally: Tally,
        *,
        timeout_s: float,
        closes_workers: bool,
    ) -> None:
        super().__init__(epoch, settings, tally)
        self._workers, self._buffers = workers, buffers
        self._timeout_s, self._closes_workers = timeout_s, closes_workers
        self._batches: deque[Batch] = deque()  # In the plans' order: the first one is taken next.
        self._queue = ChunkQueue(workers, buffers, epoch.source, tally)
        self.is_open = True

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead.

        Raises:
            StopIteration: If the epoch has no more batches.
            RuntimeError: If no batch arrives in time, or the iterator has ended or belongs to another process.
            WorkerError: If worker processes cannot start.
        """
        if not self.is_open:
            raise RuntimeError(SUPERSEDED)
        if not self._workers.belongs_here:
            raise RuntimeError(IN_ANOTHER_PROCESS)
        return super().__next__()

    def is_ready(self, timeout_s: float) -> bool:
        if not self._batches or not self._workers.belongs_here:
            return True
        try:
            self._advance(timeout_s)
        except BaseException:  # As in __next__.
            self._closes_workers = True
            raise
        return self._batches[0].is_over

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if not self._workers.belongs_here:
            return
        if self._closes_workers:
            self._workers.close()
            self._buffers.close()
        else:
            self._workers.cancel()
            self._give_up(self._batches)
        self._batches.clear()
        self._queue.clear()

    def end_workers(self) -> None:
        self._closes_workers = True
        self.close()
        if self._workers.belongs_here:
            self._workers.close()
            self._buffers.close()

    def _take(self) -> tuple[Batch, Views]:
        self._fill_up()
        if not self._batches:
            raise StopIteration
        batch = self._batches[0]
        self._wait_for(batch)
        self._batches.popleft()
        if batch.error is not None:
            self._give_up([batch])
            self._queue.drop(batch)
            return batch, {}
        if self._buffers.layout is None and (chunk := batch.chunks[0]).columns:  # The first batch of a Collation.
            layout = choose_layout([""] * len(chunk.columns), chunk.columns, num_rows=1)
            self._buffers.lay_out(layout, self._settings.sizing.num_spare(layout))
        self._fill_up()  # Do this now, because the workers might run out of chunks while user code runs.
        return batch, {} if batch.buffer is None else self._buffers.hand_out(batch.buffer)

    def _fill_up(self) -> None:
        sizing, buffers = self._settings.sizing, self._buffers
        while len(self._batches) < sizing.num_ahead(buffers.layout) and (plan := self._next_plan()) is not None:
            if isinstance(plan, Batch):
                self._batches.append(plan)
                return
            layout, error = fit_layout(buffers.layout, plan, self._make_probe, self._source, self._settings)
            if error is not None:
                self._batches.append(Batch(error=error))
                # Deliver this error before planning more batches, because the next error may take just as long.
                return
            if layout is not None and layout is not buffers.layout:
                buffers.lay_out(layout, sizing.num_spare(layout))
            batch = Batch(buffer=buffers.take() if layout is not None and layout.columns else None)
            batch.chunks = cut_batch(plan, layout, sizing)
            self._batches.append(batch)
            self._queue.add(batch, batch.chunks)

    def _make_probe(self, probe: Batch) -> None:
        self._queue.add(probe, probe.chunks)
        self._wait_for(probe)

    def _wait_for(self, batch: Batch) -> None:
        timeout_s = self._timeout_s
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while not batch.is_over:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise RuntimeError(f"no batch arrived within timeout={timeout_s} s: increase it or check the storage")
            self._advance(left_s)

    def _advance(self, timeout_s: float | None) -> None:
        for owner, chunk, outcome in self._queue.receive(timeout_s):
            if self._handler.apply(owner, chunk, outcome):
                self._queue.add(owner, [chunk])

    def _give_up(self, batches: Iterable[Batch]) -> None:
        """Take back the buffers of batches that are not delivered to the user."""
        self._buffers.collect()
        self._buffers.drop([batch.buffer for batch in batches if batch.buffer is not None and not batch.is_made])
        self._buffers.put_back([batch.buffer for batch in batches if batch.buffer is not None and batch.is_made])


class CallingProcess(Executor):
    """An executor that makes batches in the process and thread that request them.

    Args:
        planner: The planner of the batches.
        settings: The settings of all batches of the loader.
        watches: The watches of the next epoch.

    Attributes:
        layout: The layout of batches in memory; None before the first batch.
    """

    def __init__(self, planner: Planner, settings: BatchSettings, watches: Sequence[BufferWatch]) -> None:
        self._planner, self._settings, self._watches = planner, settings, watches
        self.layout: Layout | None = None
        self.tally = Tally(num_workers=0)

    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        began = time.perf_counter()
        epoch = take_tiles(self._planner.plan(cursor, split), self._watches, self._settings)
        self.tally = self._settings.begin_tally(epoch.source.decoder, 0, began)
        return CallersBatches(self, epoch, self._settings, self.tally)


class CallersBatches(PlannedBatches):
    """The batches of one epoch, which the calling process makes when they are requested."""

    def __init__(self, executor: CallingProcess, epoch: PlannedEpoch, settings: BatchSettings, tally: Tally) -> None:
        super().__init__(epoch, settings, tally)
        self._executor, self._num_chunks = executor, 0
        self._reader = epoch.source.dataset.dataset.reader
        self._builder = ChunkBuilder(self._reader, epoch.source.decoder, settings.collation)
        self.is_open = True

    def close(self) -> None:
        self.is_open, self._plans = False, iter(())
        self._reader.close()

    def _take(self) -> tuple[Batch, Views]:
        plan, settings = self._next_plan(), self._settings
        if plan is None:
            raise StopIteration
        if isinstance(plan, Batch):
            return plan, {}
        layout, error = fit_layout(self._executor.layout, plan, self._fill, self._source, settings)
        if error is not None:
            return Batch(error=error), {}
        self._executor.layout = layout
        batch = Batch(chunks=cut_batch(plan, layout, settings.sizing))
        views: Views = {} if layout is None else layout.views(np.empty(layout.num_bytes, np.uint8))
        self._fill(batch, views)
        return batch, views

    def _fill(self, batch: Batch, views: Views | None = None) -> None:
        for chunk in batch.chunks:
            while batch.error is None and self._handler.apply(batch, chunk, self._try(chunk, views or {})):
                pass

    def _try(self, chunk: BatchChunk, views: Views) -> Outcome:
        self._num_chunks += 1
        request = chunk.request(self._num_chunks, self._source, None, self._tally)
        try:
            rows = {column_index: view[request.rows] for column_index, view in views.items()}
            return self._builder.make(request, rows)
        except Exception as error:  # Ctrl-C is not caught: it ends the epoch.
            let_through(error)
            return Failed(chunk_id=request.chunk_id, failure=Failure(error=error))
