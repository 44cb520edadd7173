"""The chunks of dying worker processes."""

from __future__ import annotations

from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardio.loader.batch_plans import BatchPlan
from shardio.loader.executors.assembly import Batch, BatchChunk, ChunkQueue, OutcomeHandler
from shardio.loader.processes.fork_server import Death
from shardio.loader.processes.wire import Chunk, Made, StageTimes
from shardio.loader.stats import Tally


class ScriptedWorkers:
    """Worker processes whose answers a test scripts."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.answers: list[list[Made | Death]] = []
        self._chunk_ids = count()

    def next_chunk_id(self) -> int:
        return next(self._chunk_ids)

    def submit(self, chunks: list[Chunk]) -> None:
        self.chunks += chunks

    def receive(self, timeout_s: float | None) -> list[Made | Death]:
        return self.answers.pop(0)


class CountingBuffers:
    """A buffer pool without memory. It records which calls it gets, and with which buffers."""

    def __init__(self) -> None:
        self._buffer_ids = count()
        self.calls: list[tuple[str, list[int]]] = []

    def take(self) -> Any:
        return SimpleNamespace(buffer_id=next(self._buffer_ids))

    def drop(self, buffers: list[Any]) -> None:
        self.calls.append(("drop", [buffer.buffer_id for buffer in buffers]))

    def retire(self) -> None:
        self.calls.append(("retire", []))


def make_chunk(row: int) -> BatchChunk:
    words = np.zeros(2, np.uint64)
    indices = np.arange(row, row + 2)
    return BatchChunk(plan=BatchPlan(indices=indices, rng_keys=words, replacement_rng_keys=words), row=row)


def made(chunk: Chunk) -> Made:
    return Made(chunk_id=chunk.chunk_id, columns=[None], times=StageTimes(), num_images_by_decoder=Counter())


def apply_all(queue: ChunkQueue, handler: OutcomeHandler) -> None:
    for outcome in queue.receive(None):
        handler.apply(*outcome)


def test_a_chunk_that_arrives_with_a_death_is_redone_with_its_batch() -> None:
    """The batch gets another buffer: the content of the old one does not count, and no batch gets that one again."""
    workers, buffers, tally = ScriptedWorkers(), CountingBuffers(), Tally(num_workers=2)
    source: Any = SimpleNamespace(dataset=SimpleNamespace(locate=lambda indices: indices), epoch=0)
    queue = ChunkQueue(workers, buffers, source, tally)  # type: ignore[arg-type]  # only what it calls
    handler = OutcomeHandler(source=source, bad_samples=None, tally=tally)
    batch = Batch(buffer=buffers.take(), chunks=[make_chunk(0), make_chunk(2)])
    queue.add(batch, batch.chunks)
    first, second = workers.chunks

    workers.answers = [[made(first), Death(cause="killed", in_flight=(second.chunk_id,), was_ready=True)]]
    with pytest.warns(RuntimeWarning, match="killed; it was restarted"):
        apply_all(queue, handler)
    assert buffers.calls == [("retire", []), ("drop", [first.buffer_id])], "the restarted process knows no buffers"
    assert batch.buffer is not None
    assert batch.buffer.buffer_id != first.buffer_id
    assert [chunk.columns for chunk in batch.chunks] == [None, None]

    while not batch.is_made:
        workers.answers = [[made(chunk) for chunk in workers.chunks[2:]]]
        apply_all(queue, handler)
    assert {chunk.row for chunk in workers.chunks[2:]} == {0, 2}
    assert {chunk.buffer_id for chunk in workers.chunks[2:]} == {batch.buffer.buffer_id}
