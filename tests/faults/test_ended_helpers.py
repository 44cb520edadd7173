"""If a helper ends, the epoch is never cut short silently.

Whichever executor makes the batches, either all of them arrive or an error is raised.

Helpers are worker processes, threads, the fork server and the storage process. test_killed_workers.py tests the worker
processes that the loader replaces.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import SpawnContext
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import DataLoader, EpochSampler, ShardDataset, ShardWriter, StreamDataset, WorkerError
from shardio.loader import fetch_pool
from shardio.loader.buffers import ForgetBuffers
from shardio.process import is_stopped
from shardio.storage.client import client
from tests.faults.worker_processes import is_alive, wait_until
from tests.loader.programs import Called, Shares
from tests.processes import forkserver_context
from tests.servers.server import Server, upload
from tests.servers.stores import seaweedfs_server

__all__ = ["seaweedfs_server"]

NUM_SAMPLES, BATCH_SIZE = 20, 2
MIDDLE, END = 9, NUM_SAMPLES - 1


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(process_id: int) -> None:
    os.kill(process_id, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process_id), "the process has received the signal")


def exit_well() -> None:
    os._exit(0)


@dataclass
class Fragile:
    """A picklable function for a dataset. The function ends its process or thread at a certain sample."""

    end: Callable[[], object]
    number: int = NUM_SAMPLES

    def __call__(self, index: int) -> int:
        if index == self.number:
            self.end()
        return index

    def share(self, worker: int, of: int) -> Iterator[int]:
        return map(self, range(worker, NUM_SAMPLES, of))


def read(function: Fragile, **options: Any) -> DataLoader:
    return DataLoader(Called(function, NUM_SAMPLES), **options)


def in_order(function: Fragile, **options: Any) -> DataLoader:
    dataset = Called(function, NUM_SAMPLES)
    return DataLoader(dataset, sampler=EpochSampler(dataset, shuffle=False), **options)


def read_pipe(function: Fragile, **options: Any) -> DataLoader:
    return DataLoader(IterableWrapper(range(NUM_SAMPLES)).map(function), **options)


def read_iterable(function: Fragile, **options: Any) -> DataLoader:
    return DataLoader(Shares(function.share), **options)


PROCESSES: dict[str, tuple[Callable[..., DataLoader], dict[str, Any]]] = {
    "fetching": (read, {}),
    "fetching iterable": (read_iterable, {}),
    "fetching, not forked": (read, {"multiprocessing_context": forkserver_context}),
    "ordered": (in_order, {}),
}
EXECUTORS: dict[str, tuple[Callable[..., DataLoader], dict[str, Any], Callable[[], object]]] = {
    **{f"{name}: {end.__name__}": (*made, end) for name, made in PROCESSES.items() for end in (kill, exit_well)},
    "fetching, threads": (read, {"worker_method": "thread"}, sys.exit),
    "fetching iterable, threads": (read_iterable, {"worker_method": "thread"}, sys.exit),
    "ordered, threads": (in_order, {"worker_method": "thread"}, sys.exit),
    "torch": (read_pipe, {}, exit_well),  # A killed worker makes torch's signal handler raise an error.
}


def make(executor: str, number: int = NUM_SAMPLES, **further: Any) -> DataLoader:
    make, options, end = EXECUTORS[executor]
    options = {name: value() if callable(value) else value for name, value in options.items()}
    return make(Fragile(end, number), batch_size=BATCH_SIZE, num_workers=1, **options, **further)


def receive(batches: Any) -> tuple[list[list[int]], Exception | None]:
    received = list[list[int]]()
    try:
        for batch in batches:
            received.append(batch.tolist())
    except (RuntimeError, EOFError, ConnectionError) as error:  # torch's batch may be in a process that has ended.
        return received, error
    return received, None


WHOLE = [[index, index + 1] for index in range(0, NUM_SAMPLES, BATCH_SIZE)]


IN_DEFAULT = {("fetching: kill", MIDDLE), ("fetching iterable: exit_well", END), ("ordered: exit_well", MIDDLE)}
IN_DEFAULT |= {(f"{name}, threads", MIDDLE) for name in ("fetching", "fetching iterable", "ordered")} | {("torch", END)}


@pytest.mark.parametrize(
    ("executor", "number"),
    [
        pytest.param(executor, number, marks=() if (executor, number) in IN_DEFAULT else pytest.mark.slow)
        for executor in EXECUTORS
        for number in (MIDDLE, END)
        if (executor, number) != ("torch", MIDDLE)
    ],
)
def test_an_epoch_whose_helper_ends_itself_raises_after_the_batches_before(executor: str, number: int) -> None:
    received, error = receive(batches := iter(make(executor, number)))
    if executor == "torch":
        assert received == WHOLE[: len(received)]
        assert error is not None
    else:
        assert received == WHOLE[: number // BATCH_SIZE]
        assert isinstance(error, WorkerError)
    if "threads" in executor:
        assert "worker thread 0 of the DataLoader ended with SystemExit" in str(error)
        assert error is not None
        assert isinstance(error.__cause__, SystemExit)
    with pytest.raises(RuntimeError):
        next(batches)


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), len(WHOLE) - 1, len(WHOLE)])
@pytest.mark.parametrize(
    "executor",
    ["fetching: kill", "ordered: kill"]
    + [pytest.param(f"fetching{name}: kill", marks=pytest.mark.slow) for name in (" iterable", ", not forked")],
)
def test_an_epoch_whose_helpers_are_killed_is_whole_or_raises(executor: str, after: int) -> None:
    batches = iter(make(executor))
    received = [next(batches).tolist() for _ in range(after)]
    for process in batches._workers:
        process.kill()
        process.join()
    further, error = receive(batches)
    assert [*received, *further] == (WHOLE if error is None else WHOLE[: after + len(further)])
    assert error is not None or after > 1


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_an_epoch_whose_workers_are_shut_down_does_not_end_as_if_it_were_whole(method: Any) -> None:
    loader = DataLoader(range(NUM_SAMPLES), BATCH_SIZE, num_workers=1, persistent_workers=True, worker_method=method)
    batches = iter(loader)
    assert next(batches).tolist() == WHOLE[0]
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]  # not None
    with pytest.raises(RuntimeError, match=r"its workers were shut down\).*: iterate over the loader again"):
        next(batches)
    assert [batch.tolist() for batch in loader] == WHOLE


class ThreadAsProcess(threading.Thread):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "daemon": True})
        self.pid = id(self)


class ThreadQueue(Queue[Any]):
    def close(self) -> None:
        pass

    def cancel_join_thread(self) -> None:
        pass


class ThreadContext(SpawnContext):
    Process = ThreadAsProcess  # type: ignore[assignment]  # threads instead of processes
    Event = threading.Event  # type: ignore[assignment]  # threads instead of processes
    Queue = ThreadQueue  # type: ignore[assignment]  # threads instead of processes


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "packed"
    with ShardWriter(folder, max_shard_samples=5) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:02d}", "bin": bytes(1000)})
    return folder


def test_processes_that_are_threads_deliver_all_batches(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)  # torch's threads set this variable.
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 2, "multiprocessing_context": ThreadContext()}
    oracle = torch.utils.data.DataLoader(Called(abs, NUM_SAMPLES), **options)
    loader = DataLoader(range(NUM_SAMPLES), **options)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in oracle] == WHOLE
    assert receive(in_order(Fragile(kill), **options)) == (WHOLE, None)
    # In torch's loader, all threads would have the same worker number and yield the same samples.
    for dataset in (ShardDataset(keys, fields="key"), StreamDataset(sorted(keys.glob("*.tar")), fields="key")):
        received = [key for batch in DataLoader(dataset, **options) for key in batch]
        assert sorted(received) == [f"{number:02d}" for number in range(NUM_SAMPLES)]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_pool, "CHECK_S", 0.02)
    monkeypatch.setattr(fetch_pool, "STOPPED_S", 0.1)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    "executor", ["fetching: kill", "ordered: kill", pytest.param("fetching, not forked: kill", marks=pytest.mark.slow)]
)
def test_a_worker_process_that_stays_stopped_is_an_error(executor: str) -> None:
    batches = iter(make(executor))
    received = [next(batches).tolist()]
    (process,) = batches._workers
    stop(process.pid)
    further, error = receive(batches)
    assert [*received, *further] == WHOLE[: 1 + len(further)]
    assert isinstance(error, WorkerError)
    assert f"worker (pid(s) {process.pid}) has been stopped by a signal" in str(error)
    assert not process.is_alive()


def test_a_worker_process_that_continues_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_pool, "CHECK_S", 0.02)
    batches = iter(make("fetching: kill"))
    received = [next(batches).tolist()]
    (process,) = batches._workers
    stop(process.pid)
    while len(received) < 3 and batches.is_ready(0.1):  # Some batches may have arrived before the stop.
        received.append(next(batches).tolist())
    assert not batches.is_ready(0.1)
    os.kill(process.pid, signal.SIGCONT)
    assert [*received, *receive(batches)[0]] == WHOLE


@pytest.mark.usefixtures("_impatient")
def test_a_stopped_worker_process_whose_socket_is_full_is_an_error() -> None:
    batches = iter(make("fetching: kill"))
    next(batches)
    (process,) = batches._workers
    stop(process.pid)
    (worker,) = batches._batches._batches.workers._workers
    with pytest.raises(WorkerError, match="stopped by a signal"):
        list(map(worker.send, itertools.repeat(ForgetBuffers(buffer_ids=()))))


@pytest.mark.slow
def test_no_worker_waits_forever_for_a_stopped_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_pool, "STOPPED_S", 0.05)
    loader = make("fetching, not forked: kill")
    assert receive(loader) == (WHOLE, None)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # private to Python
    stop(server)
    try:
        with pytest.raises(WorkerError, match=rf"fork server \(pid {server}\) has been stopped .*kill -CONT {server}"):
            iter(loader)
    finally:
        os.kill(server, signal.SIGCONT)
    assert receive(loader) == (WHOLE, None)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_storage_process_that_is_killed_does_not_end_an_epoch(
    keys: Path, seaweedfs_server: Server, tmp_path: Path, num_workers: int
) -> None:
    remote = upload(keys, f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options)
    options: dict[str, Any] = {"storage_options": seaweedfs_server.options, "cache": tmp_path / "cache"}
    dataset = ShardDataset(str(remote), fields="key", **options)
    received = list[str]()
    for number, batch in enumerate(DataLoader(dataset, BATCH_SIZE, num_workers=num_workers)):
        received += batch
        if number in (1, len(WHOLE) - 2, len(WHOLE) - 1):
            process = client()._process
            assert process is not None
            process.kill()
            wait_until(lambda: not is_alive(process.pid), "the storage process has ended")  # noqa: B023  # called now
    assert received == [f"{number:02d}" for number in range(NUM_SAMPLES)]
