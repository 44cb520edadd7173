"""An epoch's batches from worker processes: several are made ahead, and delivered in order."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from shardio.interruptions import let_through
from shardio.loader.batch_plans import BatchPlan, SampleSource, repeat_error
from shardio.loader.executors.assembly import finish_batch
from shardio.loader.executors.chunk_queue import ChunkQueue
from shardio.loader.executors.chunk_sizing import choose_layout
from shardio.loader.executors.in_flight import Batch, BatchSettings, OutcomeHandler, cut_batch, probe_layout
from shardio.loader.processes.pool import WorkerPool
from shardio.loader.slots.slot_pool import SlotPool
from shardio.loader.stats import Tally

SUPERSEDED = (
    "this iterator ended when the loader was iterated again: persistent_workers=True allows one iterator at a time. "
    "Use persistent_workers=False, or a second loader"
)


class Pipeline:
    """The batches of one epoch, made by worker processes that serve only this epoch.

    Args:
        source: The source of the samples.
        plans: The plan of each batch.
        workers: Makes the batches.
        slots: Holds them.
        settings: What all batches of the loader have in common.
        tally: The running counts of the epoch.
        timeout_s: How long to wait for a batch; 0 waits forever.
        closes_workers: Whether the worker processes end with the epoch.
    """

    def __init__(
        self,
        source: SampleSource,
        plans: Iterator[BatchPlan],
        workers: WorkerPool,
        slots: SlotPool,
        settings: BatchSettings,
        tally: Tally,
        *,
        timeout_s: float,
        closes_workers: bool,
    ) -> None:
        self._source, self._plans, self._settings, self._tally = source, plans, settings, tally
        self._workers, self._slots = workers, slots
        self._timeout_s, self._closes_workers = timeout_s, closes_workers
        self._handler = OutcomeHandler(source=source, bad_samples=settings.bad_samples, tally=tally)
        self._batches: deque[Batch] = deque()  # In order; the first one is taken next.
        self._queue = ChunkQueue(workers, slots, source, tally)
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
            views = {} if batch.slot is None or batch.error is not None else self._slots.hand_out(batch.slot)
            return finish_batch(self._source.decoder, batch, views, self._tally, began, self._settings)
        except StopIteration:
            self.close()
            if self._settings.bad_samples is not None:
                self._settings.bad_samples.warn(self._tally.num_bad, self._source.epoch)
            raise
        except BaseException:  # After Ctrl-C, say, a message may be cut off, so the next epoch starts new workers.
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
            self._slots.close()
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
            self._slots.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_is_open"):
            self.close()

    def _take(self) -> Batch:
        """Return the next batch, once it is finished or has failed, and begin another one."""
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
        if self._slots.layout is None and (part := batch.parts[0]).columns:  # A collation's first batch.
            layout = choose_layout([""] * len(part.columns), part.columns, num_rows=1)
            self._slots.lay_out(layout, self._settings.sizing.num_spare(layout))
        self._fill_up()  # Before the user computes, so that the workers do not run out of chunks.
        return batch

    def _fill_up(self) -> None:
        """Begin batches until enough of them are made ahead."""
        sizing, slots = self._settings.sizing, self._slots
        while len(self._batches) < sizing.num_ahead(slots.layout) and (plan := self._next_plan()) is not None:
            layout = slots.layout
            if layout is None and self._settings.collation is None:
                num_rows = self._settings.batch_size or len(plan)
                layout, error = probe_layout(plan, self._make_probe, self._source, num_rows)
                if error is not None:
                    self._batches.append(Batch(error=error))
                    return  # The user gets this error first: further ones may each take as long, such as time-outs.
            if layout is not None and self._settings.collation is None and len(plan) > layout.num_rows:
                layout = replace(layout, num_rows=len(plan))
            if layout is not None and layout is not slots.layout:
                slots.lay_out(layout, sizing.num_spare(layout))
            batch = Batch(slot=slots.take() if layout is not None and layout.columns else None)
            batch.parts = cut_batch(plan, layout, sizing)
            self._batches.append(batch)
            self._queue.add(batch, batch.parts)

    def _next_plan(self) -> BatchPlan | None:
        """Return the plan of the next batch to begin, or None if there is none."""
        try:
            return next(self._plans, None)
        except Exception as error:  # A user's sampler failed. Every request after its batches raises its error.
            let_through(error)
            self._plans = repeat_error(error)
            self._batches.append(Batch(error=error))
            return None

    def _make_probe(self, probe: Batch) -> None:
        self._queue.add(probe, probe.parts)
        self._wait_for(probe)

    def _wait_for(self, batch: Batch) -> None:
        """Wait until a batch is finished or has failed."""
        timeout_s = self._timeout_s
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while not batch.is_over:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise RuntimeError(f"no batch arrived within timeout={timeout_s} s: increase it, or check the storage")
            self._advance(left_s)

    def _advance(self, timeout_s: float | None) -> None:
        """Apply the outcomes that have arrived; wait for some at most ``timeout_s``."""
        for owner, part, outcome in self._queue.receive(timeout_s):
            if self._handler.apply(owner, part, outcome):
                self._queue.add(owner, [part])

    def _give_up(self, batches: Iterable[Batch]) -> None:
        """Return the slots of batches that the user will not receive."""
        self._slots.collect()
        self._slots.drop([batch.slot for batch in batches if batch.slot is not None and not batch.is_made])
        self._slots.put_back([batch.slot for batch in batches if batch.slot is not None and batch.is_made])
