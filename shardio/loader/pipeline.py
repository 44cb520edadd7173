"""Executors that make batches of shardio's datasets, in worker processes or in the calling process."""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    probe_layout,
)
from shardio.loader.batch_plans import BatchPlan, Planner, SampleSource, repeat_error
from shardio.loader.buffers import BufferPool, BufferWatch, Layout, Views
from shardio.loader.chunk_worker import ChunkBuilder
from shardio.loader.fork_server import ForkServer
from shardio.loader.pool import WorkerPool
from shardio.loader.stats import LoaderStats, Tally
from shardio.loader.wire import Chunk, Failed, Failure, Outcome, WorkerSetup
from shardio.order import Cursor, Split
from shardio.process import let_through

SUPERSEDED = (
    "this iterator ended when the loader was iterated again: persistent_workers=True allows one iterator at a time. "
    "Use persistent_workers=False, or a second loader"
)


class WorkerProcesses:
    """An executor that makes batches in worker processes, several ahead.

    Args:
        planner: The planner of the batches.
        settings: The settings of all batches of the loader.
        watches: The watches of the epoch that begins.
        timeout_s: The longest wait for a batch, in seconds; 0 waits forever.
        closes_workers: Whether the worker processes end with each epoch. Their fork server stays.
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
        self._latest: Callable[[], Pipeline | None] = _none
        self._tally = Tally(num_workers=settings.sizing.num_threads)

    def start(self, cursor: Cursor | None, split: Split | None) -> Pipeline:
        """Begin an epoch and return its batches. If the worker processes persist, this ends an unfinished epoch."""
        began = time.perf_counter()
        workers, buffers = self._find_workers()
        buffers.watch(self._watches)
        plans, source = self._planner.plan(cursor, split)
        self._tally = self._settings.begin_tally(source.decoder, workers.num_threads, began)
        pipeline = Pipeline(
            source,
            plans,
            workers,
            buffers,
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

    def _find_workers(self) -> tuple[WorkerPool, BufferPool]:
        # The workers and buffers of the latest epoch, if they persist.
        if not self._closes_workers and (latest := self._latest()) is not None:
            latest.close()
        found = self._usable_workers() or self._make_workers()
        self._is_unused = False
        return found

    def _usable_workers(self) -> tuple[WorkerPool, BufferPool] | None:
        """Return the worker processes that the next epoch can use, and their buffers."""
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


def _none() -> None:
    """Return None, like a reference to a pipeline before there is one."""


class Pipeline:
    """The batches of one epoch, made by worker processes that serve only this epoch.

    Args:
        source: The source of the samples.
        plans: The plan of each batch.
        workers: The worker processes.
        buffers: The buffers of the batches.
        settings: The settings of all batches of the loader.
        tally: The running counts of the epoch.
        timeout_s: The longest wait for a batch, in seconds; 0 waits forever.
        closes_workers: Whether the worker processes end with the epoch.
    """

    def __init__(
        self,
        source: SampleSource,
        plans: Iterator[BatchPlan],
        workers: WorkerPool,
        buffers: BufferPool,
        settings: BatchSettings,
        tally: Tally,
        *,
        timeout_s: float,
        closes_workers: bool,
    ) -> None:
        self._source, self._plans, self._settings, self._tally = source, plans, settings, tally
        self._workers, self._buffers = workers, buffers
        self._timeout_s, self._closes_workers = timeout_s, closes_workers
        self._handler = OutcomeHandler(source=source, bad_samples=settings.bad_samples, tally=tally)
        self._batches: deque[Batch] = deque()  # In order; the first one is taken next.
        self._queue = ChunkQueue(workers, buffers, source, tally)
        self._is_open = True

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead.

        Raises:
            StopIteration: If the epoch has no further batch.
            RuntimeError: If no batch arrived within the timeout, or the iterator ended or belongs to another process.
            WorkerError: If worker processes cannot start.
        """
        if not self._is_open:
            raise RuntimeError(SUPERSEDED)
        if not self._workers.belongs_here:
            raise RuntimeError("this iterator belongs to the parent of this forked process: call iter(loader) again")
        began = time.perf_counter()
        try:
            batch = self._take()
            views = {} if batch.buffer is None or batch.error is not None else self._buffers.hand_out(batch.buffer)
            return finish_batch(self._source.decoder, batch, views, self._tally, began, self._settings)
        except StopIteration:
            self.close()
            if self._settings.bad_samples is not None:
                self._settings.bad_samples.warn(self._tally.num_bad, self._source.epoch)
            raise
        except BaseException:  # Ctrl-C, for example, may cut a message off, so the next epoch starts new workers.
            self._closes_workers = True
            self.close()
            raise

    members = ()

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is there, or has failed."""
        if not self._batches or not self._workers.belongs_here:
            return True  # Only a request can tell.
        try:
            self._advance(timeout_s)
        except BaseException:  # As in __next__.
            self._closes_workers = True
            raise
        return self._batches[0].is_over

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead."""
        if not self._is_open:
            return
        self._is_open = False
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
        """End the epoch, and the worker processes even if they persist. No other epoch may have begun since."""
        self._closes_workers = True
        self.close()
        if self._workers.belongs_here:
            self._workers.close()
            self._buffers.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_is_open"):
            self.close()

    def _take(self) -> Batch:
        """Return the next batch after it is finished or has failed, and begin another one."""
        self._fill_up()
        if not self._batches:
            raise StopIteration
        batch = self._batches[0]
        self._wait_for(batch)
        self._batches.popleft()
        if batch.error is not None:
            self._give_up([batch])
            self._queue.drop(batch)
            return batch
        if self._buffers.layout is None and (chunk := batch.chunks[0]).columns:  # A collation's first batch.
            layout = choose_layout([""] * len(chunk.columns), chunk.columns, num_rows=1)
            self._buffers.lay_out(layout, self._settings.sizing.num_spare(layout))
        self._fill_up()  # Before the user computes. Otherwise, the workers might run out of chunks.
        return batch

    def _fill_up(self) -> None:
        sizing, buffers = self._settings.sizing, self._buffers
        while len(self._batches) < sizing.num_ahead(buffers.layout) and (plan := self._next_plan()) is not None:
            layout = buffers.layout
            if layout is None and self._settings.collation is None:
                num_rows = self._settings.batch_size or len(plan)
                layout, error = probe_layout(plan, self._make_probe, self._source, num_rows)
                if error is not None:
                    self._batches.append(Batch(error=error))
                    return  # The user gets this error first: each further one, such as a time-out, may take as long.
            if layout is not None and self._settings.collation is None and len(plan) > layout.num_rows:
                layout = replace(layout, num_rows=len(plan))
            if layout is not None and layout is not buffers.layout:
                buffers.lay_out(layout, sizing.num_spare(layout))
            batch = Batch(buffer=buffers.take() if layout is not None and layout.columns else None)
            batch.chunks = cut_batch(plan, layout, sizing)
            self._batches.append(batch)
            self._queue.add(batch, batch.chunks)

    def _next_plan(self) -> BatchPlan | None:
        try:
            return next(self._plans, None)
        except Exception as error:  # A user's sampler failed. Every request after its batches raises its error.
            let_through(error)
            self._plans = repeat_error(error)
            self._batches.append(Batch(error=error))
            return None

    def _make_probe(self, probe: Batch) -> None:
        self._queue.add(probe, probe.chunks)
        self._wait_for(probe)

    def _wait_for(self, batch: Batch) -> None:
        timeout_s = self._timeout_s
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while not batch.is_over:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise RuntimeError(f"no batch arrived within timeout={timeout_s} s: increase it, or check the storage")
            self._advance(left_s)

    def _advance(self, timeout_s: float | None) -> None:
        """Wait up to ``timeout_s`` for outcomes, and apply them."""
        for owner, chunk, outcome in self._queue.receive(timeout_s):
            if self._handler.apply(owner, chunk, outcome):
                self._queue.add(owner, [chunk])

    def _give_up(self, batches: Iterable[Batch]) -> None:
        """Take back the buffers of batches that the user will not receive."""
        self._buffers.collect()
        self._buffers.drop([batch.buffer for batch in batches if batch.buffer is not None and not batch.is_made])
        self._buffers.put_back([batch.buffer for batch in batches if batch.buffer is not None and batch.is_made])


class CallingProcess:
    """An executor that makes batches in the process and thread that request them.

    Args:
        planner: The planner of the batches.
        settings: The settings of all batches of the loader.

    Attributes:
        layout: The layout of batches in memory; None before the first one.
    """

    def __init__(self, planner: Planner, settings: BatchSettings) -> None:
        self._planner, self.settings = planner, settings
        self.layout: Layout | None = None
        self._tally = Tally(num_workers=0)

    def start(self, cursor: Cursor | None, split: Split | None) -> _Batches:
        """Begin an epoch and return its batches."""
        began = time.perf_counter()
        plans, source = self._planner.plan(cursor, split)
        self._tally = self.settings.begin_tally(source.decoder, 0, began)
        handler = OutcomeHandler(source=source, bad_samples=self.settings.bad_samples, tally=self._tally)
        return _Batches(self, plans, handler)

    def start_workers(self) -> None:
        """Do nothing: there are no workers."""

    def stats(self) -> LoaderStats:
        """Return the statistics of the latest epoch."""
        return self._tally.sum_up()


class _Batches:
    def __init__(self, executor: CallingProcess, plans: Iterator[BatchPlan], handler: OutcomeHandler) -> None:
        self._executor, self._handler = executor, handler
        self._reader = handler.source.dataset.dataset.reader
        self._builder = ChunkBuilder(self._reader, handler.source.decoder, executor.settings.collation)
        self._num_chunks = 0
        self._plans: Iterator[BatchPlan] | None = plans

    def __next__(self) -> Any:
        assert self._plans is not None, "it was not closed"
        began = time.perf_counter()
        handler = self._handler
        try:
            plan = next(self._plans)
        except StopIteration:
            self.close()
            if handler.bad_samples is not None:
                handler.bad_samples.warn(handler.tally.num_bad, handler.source.epoch)
            raise
        except Exception as error:  # A user's sampler failed.
            let_through(error)
            self._plans = repeat_error(error)
            return Failure(error=error)
        batch, views = self._make(plan)
        return finish_batch(handler.source.decoder, batch, views, handler.tally, began, self._executor.settings)

    def is_ready(self, timeout_s: float) -> bool:
        return True

    members = ()

    def close(self) -> None:
        self._plans = None
        self._reader.close()

    def end_workers(self) -> None:
        self.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and getattr(self, "_plans", None) is not None:  # It was dropped before the epoch ended.
            self.close()

    def _make(self, plan: BatchPlan) -> tuple[Batch, Views]:
        """Return a batch that is finished or has failed, and its columns of fixed size."""
        executor, settings, layout = self._executor, self._executor.settings, self._executor.layout
        if layout is None and settings.collation is None:
            num_rows = settings.batch_size or len(plan)
            layout, error = probe_layout(plan, self._fill, self._handler.source, num_rows)
            if error is not None:
                return Batch(error=error), {}
        if layout is not None and len(plan) > layout.num_rows:
            layout = replace(layout, num_rows=len(plan))
        executor.layout = layout
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
        request = Chunk(
            chunk_id=self._num_chunks,
            samples=self._handler.source.dataset.locate(chunk.plan.indices),
            rng_keys=chunk.plan.rng_keys,
            buffer_id=None,
            row=chunk.row,
            valid=chunk.plan.valid,
            epoch_began=self._handler.tally.began,
        )
        try:
            rows = {column_index: view[request.rows] for column_index, view in views.items()}
            return self._builder.make(request, rows)
        except Exception as error:  # Ctrl-C and the like end the epoch: the chunk is not at fault.
            let_through(error)
            return Failed(chunk_id=request.chunk_id, failure=Failure(error=error))
