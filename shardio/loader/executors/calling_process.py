"""The executor for ``num_workers=0``: the calling process makes each batch when it is requested."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from shardio.interruptions import let_through
from shardio.loader.batch_plans import BatchPlan, Planner, repeat_error
from shardio.loader.executors.assembly import finish_batch
from shardio.loader.executors.in_flight import Batch, BatchSettings, OutcomeHandler, Part, cut_batch, probe_layout
from shardio.loader.failures import Failure
from shardio.loader.processes.chunk_builder import ChunkBuilder
from shardio.loader.processes.messages import Chunk, Failed, Outcome
from shardio.loader.slots.memory import Layout
from shardio.loader.slots.slot_pool import Views
from shardio.loader.stats import LoaderStats, Tally
from shardio.order import Cursor, Split


class CallingProcess:
    """An executor that makes batches in the process and thread that request them.

    Args:
        planner: Plans the batches of an epoch.
        settings: What all batches of the loader have in common.

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
    """The batches of one epoch."""

    def __init__(self, executor: CallingProcess, plans: Iterator[BatchPlan], handler: OutcomeHandler) -> None:
        self._executor, self._handler = executor, handler
        self._reader = handler.source.dataset.dataset.reader
        self._builder = ChunkBuilder(self._reader, handler.source.decoder, executor.settings.collation)
        self._num_chunks = 0
        self._plans: Iterator[BatchPlan] | None = plans

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead.

        Raises:
            StopIteration: If the epoch has no further batch.
        """
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
        """Return True: a request makes the batch."""
        return True

    members = ()

    def close(self) -> None:
        """Stop, and close files."""
        self._plans = None
        self._reader.close()

    def end_workers(self) -> None:
        """End the epoch: there are no workers."""
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
        batch = Batch(parts=cut_batch(plan, layout, settings.sizing))
        views: Views = {} if layout is None else layout.views(np.empty(layout.num_bytes, np.uint8))
        self._fill(batch, views)
        return batch, views

    def _fill(self, batch: Batch, views: Views | None = None) -> None:
        for part in batch.parts:
            while batch.error is None and self._handler.apply(batch, part, self._try(part, views or {})):
                pass

    def _try(self, part: Part, views: Views) -> Outcome:
        """Make a part and return its outcome."""
        self._num_chunks += 1
        chunk = Chunk(
            chunk_id=self._num_chunks,
            samples=self._handler.source.dataset.locate(part.plan.indices),
            rng_keys=part.plan.rng_keys,
            slot_id=None,
            row=part.row,
            valid=part.plan.valid,
            epoch_began=self._handler.tally.began,
        )
        try:
            return self._builder.make(chunk, {column_index: view[chunk.rows] for column_index, view in views.items()})
        except Exception as error:  # Ctrl-C and the like end the epoch: the chunk is not at fault.
            let_through(error)
            return Failed(chunk_id=chunk.chunk_id, failure=Failure(error=error))
