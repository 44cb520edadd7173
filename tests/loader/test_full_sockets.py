"""More messages than a socket holds: the training process waits for worker processes, but they never wait for it."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader, ShardMapDataset
from shardio.loader.processes import pool as pool_module
from shardio.loader.processes.fork_server import Death, ForkServer
from shardio.loader.processes.pool import WorkerPool
from shardio.loader.processes.wire import WorkerSetup
from shardio.transforms import RandomResizedCrop
from tests.buffers import assert_same, find_worker_processes

pytestmark = pytest.mark.usefixtures("no_process_of_other_tests")

NUM_BATCHES = 400
"""A socket's buffer holds fewer than 300 packets."""


def make_long_loader(packed: Path, **options: Any) -> DataLoader:
    """Make a loader of many batches of one sample."""
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    dataset.set_epoch(0)  # Otherwise, torch's seed decides on the crops.
    return DataLoader(dataset, sampler=[number % 100 for number in range(NUM_BATCHES)], **options)


def test_more_messages_than_a_socket_holds_may_precede_the_start(pictures: Path) -> None:
    loader = make_long_loader(pictures, num_workers=1, prefetch_factor=1000)
    iterator = iter(loader)
    got = list(islice(iterator, 1))
    before = find_worker_processes()
    got += islice(iterator, NUM_BATCHES - 2)
    assert find_worker_processes() == before
    got += iterator
    assert_same(got, list(make_long_loader(pictures)))


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
    for _ in range(1):
        del kept
        kept = list(loader)
        assert find_worker_processes() == before
    assert len(kept) == NUM_BATCHES
    assert max(forgotten) > NUM_BATCHES / 2, "one message is enough for many buffers"


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
