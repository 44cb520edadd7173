"""A queue of chunks, pending or in flight in worker processes. After a death, it submits the lost chunks again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from shardio.loader.batch_plans import SampleSource
from shardio.loader.executors.in_flight import Batch, Part
from shardio.loader.processes.deaths import MAX_DEATHS, Death, samples_error, startup_error, warn_of
from shardio.loader.processes.messages import Chunk, Outcome
from shardio.loader.processes.pool import WorkerPool
from shardio.loader.slots.slot_pool import SlotPool
from shardio.loader.stats import Tally

Entry = tuple[Batch, Part]
"""Parts do not refer to their batches: such cycles would keep slots alive until the garbage collector runs."""


class ChunkQueue:
    """The parts of batches that are not finished yet.

    Args:
        workers: Makes the parts.
        slots: Holds the batches.
        source: The source of the samples.
        tally: Counts restarts.
    """

    def __init__(self, workers: WorkerPool, slots: SlotPool, source: SampleSource, tally: Tally) -> None:
        self._workers, self._slots, self._source, self._tally = workers, slots, source, tally
        self._in_flight: dict[int, Entry] = {}  # By chunk id.
        self._pending: deque[Entry] = deque()
        self._num_failed_starts = 0

    def add(self, batch: Batch, parts: Iterable[Part]) -> None:
        """Queue parts of a batch."""
        self._pending.extend((batch, part) for part in parts)
        self._submit()

    def receive(self, timeout_s: float | None) -> Iterator[tuple[Batch, Part, Outcome]]:
        """Wait for outcomes and yield them; yield nothing if none arrives within ``timeout_s`` or a shorter time.

        The caller must apply each outcome before it requests the next one. A death moves unfinished parts to other
        slots, so an outcome that arrived earlier but is applied afterwards would finish a part in the wrong slot.

        Raises:
            WorkerError: If worker processes cannot start.
        """
        self._submit()
        for received in self._workers.receive(timeout_s):
            if isinstance(received, Death):
                self._redo(received)
            elif (entry := self._in_flight.pop(received.chunk_id, None)) is not None:  # None if it was dropped.
                self._num_failed_starts = 0
                yield (*entry, received)

    def drop(self, batch: Batch) -> None:
        """Remove all parts of a batch that failed."""
        self._in_flight = {chunk_id: entry for chunk_id, entry in self._in_flight.items() if entry[0] is not batch}

    def clear(self) -> list[Batch]:
        """Remove everything; return the batches."""
        batches = dict.fromkeys(batch for batch, _ in (*self._in_flight.values(), *self._pending))
        self._in_flight.clear()
        self._pending.clear()
        return list(batches)

    def _submit(self) -> None:
        """Submit all parts that may be made now. A suspect is made alone, with nothing else in flight."""
        chunks = []
        while self._pending and not (self._in_flight and (self._pending[0][1].is_suspect or self._tries_suspect)):
            batch, part = self._pending.popleft()
            if batch.error is not None:
                continue
            chunk = Chunk(
                chunk_id=self._workers.next_chunk_id(),
                samples=self._source.dataset.locate(part.plan.indices),
                rng_keys=part.plan.rng_keys,
                slot_id=None if batch.slot is None else batch.slot.slot_id,
                row=part.row,
                valid=part.plan.valid,
                epoch_began=self._tally.began,
            )
            self._in_flight[chunk.chunk_id] = batch, part
            chunks.append(chunk)
        if chunks:
            self._workers.submit(chunks)

    @property
    def _tries_suspect(self) -> bool:
        _, part = next(iter(self._in_flight.values()))  # A suspect is the only one.
        return part.is_suspect

    def _redo(self, death: Death) -> None:
        """Queue all unfinished batches again, in other slots.

        The parts that a dead process was making are suspects. Each is then made alone: if another process dies over it,
        the part is at fault.
        """
        self._tally.num_worker_restarts += death.num_processes
        self._slots.retire()
        self._num_failed_starts = 0 if death.was_ready else self._num_failed_starts + 1
        if self._num_failed_starts == MAX_DEATHS:
            raise startup_error(death)
        is_fatal = False
        for batch, part in [self._in_flight[i] for i in death.in_flight if i in self._in_flight]:
            part.is_suspect = True
            part.num_deaths += death.was_ready and len(death.in_flight) == 1
            if part.num_deaths == MAX_DEATHS:
                keys = [self._source.dataset.describe(index)[0] for index in part.plan.indices.tolist()]
                batch.error, is_fatal = samples_error(keys, death), True
        entries = []
        for batch in self.clear():
            if batch.slot is not None:
                self._slots.drop([batch.slot])
                batch.slot = self._slots.take() if batch.error is None else None
            if batch.error is None:
                for part in batch.parts:
                    if len(part.plan):
                        part.columns = None  # Finished columns are in the old slot.
                        entries.append((batch, part))
        self._pending.extend(sorted(entries, key=lambda entry: not entry[1].is_suspect))
        self._submit()
        if not is_fatal:  # Otherwise an error reports it.
            warn_of(death)
