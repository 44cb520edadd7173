"""The number of batches made ahead, the division of threads, and the messages of worker processes."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardio import DataLoader, ShardMapDataset
from shardio.loader import pool as pool_module
from shardio.loader.assembly import Batch, BatchChunk, ChunkQueue, OutcomeHandler
from shardio.loader.batches import BatchPlan
from shardio.loader.executor import Tally
from shardio.loader.fork_server import ForkServer
from shardio.loader.pool import Death, WorkerPool, divide_threads
from shardio.loader.wire import Chunk, Made, StageTimes, WorkerSetup, make_pair, receive, send
from shardio.transforms import RandomResizedCrop
from tests.buffers import assert_same, buffers_of, find_worker_processes, make_loader
from tests.loader.calling import CALLING


def count_buffers(loader: DataLoader) -> int:
    """Return how many buffers an epoch takes: those of the batches made ahead, and of the next batch.

    If anything else in this process forks, the loader replaces the buffer that the user holds. So count in two epochs.
    """
    return min(len(buffers_of(loader)) for _ in range(2))


@pytest.fixture
def _one_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all threads into one worker process, which starts sooner than two."""
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])


@pytest.mark.usefixtures("_one_worker_process")
def test_batches_are_made_ahead_until_each_worker_has_two_chunks_or_as_many_as_the_user_says(pictures: Path) -> None:
    for num_workers, batch_size, prefetch, expected in ((8, 2, None, 16), (8, 2, 5, 5), (1, 16, None, 2)):
        loader = make_loader(pictures, num_workers=num_workers, batch_size=batch_size, prefetch_factor=prefetch)
        assert loader.prefetch_factor == (prefetch or 2), "as in torch"
        assert count_buffers(loader) == expected + 1
    of_torch = DataLoader(ShardMapDataset(pictures, fields="key"), batch_size=8, num_workers=1, **CALLING)
    assert of_torch.prefetch_factor == 2


@pytest.mark.slow
@pytest.mark.usefixtures("_one_worker_process")
def test_a_prefetch_factor_may_be_set_and_what_is_made_of_attributes_keeps_the_default(pictures: Path) -> None:
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None)
    again = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=loader.prefetch_factor)
    for each in (again, pickle.loads(pickle.dumps(loader))):
        assert count_buffers(each) == 16 + 1
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None, persistent_workers=True)
    for prefetch, expected in ((None, 16), (1, 1), (None, 16)):
        loader.prefetch_factor = prefetch
        assert count_buffers(loader) == expected + 1


NUM_BATCHES = 400
"""A socket's buffer holds fewer than 300 packets."""


def make_long_loader(packed: Path, **options: Any) -> DataLoader:
    """Make a loader of many batches of one sample."""
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    dataset.set_epoch(0)  # Otherwise, torch's seed decides on the crops.
    return DataLoader(dataset, sampler=[number % 100 for number in range(NUM_BATCHES)], **options)


@pytest.mark.usefixtures("no_process_of_other_tests")
def test_more_messages_than_a_socket_holds_may_precede_the_start(pictures: Path) -> None:
    loader = make_long_loader(pictures, num_workers=1, prefetch_factor=1000)
    iterator = iter(loader)
    got = list(islice(iterator, 1))
    before = find_worker_processes()
    got += islice(iterator, NUM_BATCHES - 2)
    assert find_worker_processes() == before
    got += iterator
    assert_same(got, list(make_long_loader(pictures)))


@pytest.mark.usefixtures("no_process_of_other_tests")
def test_worker_processes_survive_when_many_batches_are_freed_at_once(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, forgotten = WorkerPool.forget, list[int]()

    def count(self: WorkerPool, buffer_ids: tuple[int, ...]) -> None:
        forgotten.append(len(buffer_ids))
        forget(self, buffer_ids)

    monkeypatch.setattr(WorkerPool, "forget", count)
    loader = make_long_loader(pictures, num_workers=1, persistent_workers=True)
    kept = list(loader)
    before = find_worker_processes()
    del kept
    assert len(list(loader)) == NUM_BATCHES
    assert find_worker_processes() == before
    assert max(forgotten) > NUM_BATCHES / 2, "one message is enough for many buffers"


@pytest.mark.usefixtures("no_process_of_other_tests")
def test_a_worker_process_that_reads_nothing_is_killed(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardMapDataset(pictures, fields=("image", "key"), transform=RandomResizedCrop(48))
    pool = WorkerPool(ForkServer(), WorkerSetup(reader=dataset.reader, decoder=dataset.decoder), num_threads=1)
    try:
        assert pool.receive(None) == [], "it has started and sent a Pong"
        monkeypatch.setattr(pool_module, "PATIENCE_S", 0.1)
        (process_id,) = find_worker_processes()
        os.kill(process_id, signal.SIGSTOP)
        for buffer_id in range(NUM_BATCHES):
            pool.forget((buffer_id,))
        (death,) = pool.receive(None)
        assert isinstance(death, Death)
        assert death.cause.startswith("no message was read for ")
        assert find_worker_processes().isdisjoint({process_id})
    finally:
        pool.close()


@given(st.integers(1, 300), st.integers(1, 300))
def test_threads_are_divided_evenly_over_worker_processes(num_threads: int, num_processors: int) -> None:
    threads = divide_threads(num_threads, num_processors)
    assert sum(threads) == num_threads
    assert min(threads) >= 1
    assert max(threads) - min(threads) <= 1
    assert len(threads) == min(num_threads, num_processors)


def test_messages_that_an_end_sent_before_it_closed_are_received() -> None:
    """Even if it closed before it read everything: the system reports that first, then delivers the messages."""
    ours, theirs = make_pair()
    with ours:
        with theirs:
            send(ours, "not read")
            send(theirs, "last words")
        assert receive(ours) == ("last words", [])
        assert receive(ours) is None


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


def test_a_part_that_arrives_with_a_death_is_redone_with_its_batch() -> None:
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
