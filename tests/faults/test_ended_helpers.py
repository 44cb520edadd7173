"""No epoch ends early because a helper has ended: whichever executor makes the batches, all arrive or an error says so.

Helpers are worker processes, threads, the fork server and the storage process. Those of shardio's own worker processes
are replaced: see test_killed_workers.py and test_crashing_samples.py.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import SpawnContext
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import shardio
from shardio import DataLoader, EpochSampler, ShardDataset, ShardWriter, StreamDataset, WorkerError
from shardio.loader.fetching import worker_processes
from shardio.loader.fetching.worker_processes import is_stopped
from shardio.loader.processes.wire import ForgetBuffers
from shardio.storage.remote.client import client
from tests.faults.worker_processes import is_alive, wait_until
from tests.processes import forkserver_context
from tests.servers.fixtures import moto_server
from tests.servers.server import Server
from tests.storage.uploading import upload

__all__ = ["moto_server"]

NUM_SAMPLES, BATCH_SIZE = 20, 2
MIDDLE, END = 9, NUM_SAMPLES - 1


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(process_id: int) -> None:
    os.kill(process_id, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process_id), "the process has received the signal")


def exit_well() -> None:
    """End the process without a trace: exit code 0, and no exception."""
    os._exit(0)


class Fragile(Dataset[int]):
    """The numbers, one of which ends the helper that reads it."""

    def __init__(self, end: Callable[[], object], number: int) -> None:
        self.end, self.number = end, number

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        if index == self.number:
            self.end()
        return index


class FragileIterable(IterableDataset[int]):
    """The same numbers, of all workers together."""

    def __init__(self, end: Callable[[], object], number: int) -> None:
        self.numbers = Fragile(end, number)

    def __iter__(self) -> Iterator[int]:
        info = shardio.get_worker_info()
        assert info is not None
        yield from (self.numbers[index] for index in range(info.id, NUM_SAMPLES, info.num_workers))


def in_order(dataset: Fragile, **options: Any) -> DataLoader:
    """Return a loader with shardio's order, which is that of the numbers."""
    return DataLoader(dataset, sampler=EpochSampler(dataset, shuffle=False), **options)


def read_pipe(dataset: Fragile, **options: Any) -> DataLoader:
    """Return a loader with torch's own workers."""
    return DataLoader(IterableWrapper(range(NUM_SAMPLES)).map(dataset.__getitem__), **options)


def read_iterable(dataset: Fragile, **options: Any) -> DataLoader:
    return DataLoader(FragileIterable(dataset.end, dataset.number), **options)


PROCESSES: dict[str, tuple[Callable[..., DataLoader], dict[str, Any]]] = {
    "fetching": (DataLoader, {}),
    "fetching iterable": (read_iterable, {}),
    "fetching, persistent": (DataLoader, {"persistent_workers": True}),
    "fetching, not forked": (DataLoader, {"multiprocessing_context": forkserver_context}),
    "ordered": (in_order, {}),
}
EXECUTORS: dict[str, tuple[Callable[..., DataLoader], dict[str, Any], Callable[[], object]]] = {
    **{f"{name}: {end.__name__}": (*made, end) for name, made in PROCESSES.items() for end in (kill, exit_well)},
    "fetching, threads": (DataLoader, {"worker_method": "thread"}, sys.exit),
    "fetching iterable, threads": (read_iterable, {"worker_method": "thread"}, sys.exit),
    "ordered, threads": (in_order, {"worker_method": "thread"}, sys.exit),
    "torch": (read_pipe, {}, exit_well),  # If it is killed, torch's signal handler raises an error, at any moment.
}


def make(executor: str, number: int = NUM_SAMPLES, **further: Any) -> DataLoader:
    make, options, end = EXECUTORS[executor]
    options = {name: value() if callable(value) else value for name, value in options.items()}
    return make(Fragile(end, number), batch_size=BATCH_SIZE, num_workers=1, **options, **further)


def receive(batches: Any) -> tuple[list[list[int]], Exception | None]:
    """Return the batches until the end or an error, and the error."""
    received = list[list[int]]()
    try:
        for batch in batches:
            received.append(batch.tolist())
    except (RuntimeError, EOFError, ConnectionError) as error:  # The last two if a dead process had torch's batch.
        return received, error
    return received, None


WHOLE = [[index, index + 1] for index in range(0, NUM_SAMPLES, BATCH_SIZE)]


@pytest.mark.parametrize(
    ("executor", "number"),
    [
        (executor, number)
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
    with pytest.raises(RuntimeError):
        next(batches)


@pytest.mark.parametrize("after", [1, len(WHOLE) - 1, len(WHOLE)])
@pytest.mark.parametrize("executor", [f"{name}: kill" for name in PROCESSES])
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
    """Frameworks end persistent workers by this method. With torch's loader, an error follows, too."""
    loader = DataLoader(range(NUM_SAMPLES), BATCH_SIZE, num_workers=1, persistent_workers=True, worker_method=method)
    batches = iter(loader)
    assert next(batches).tolist() == WHOLE[0]
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]  # it is there
    with pytest.raises(RuntimeError, match=r"its workers were shut down\).*: iterate over the loader again"):
        next(batches)
    assert [batch.tolist() for batch in loader] == WHOLE


class ThreadAsProcess(threading.Thread):
    """A thread with what torch's loader asks of a process, as some libraries start them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "daemon": True})
        self.pid = id(self)


class ThreadQueue(Queue[Any]):
    """A queue between threads with what torch's loader asks of one between processes."""

    def close(self) -> None:
        pass

    def cancel_join_thread(self) -> None:
        pass


class ThreadContext(SpawnContext):
    """A context of multiprocessing whose processes are threads."""

    Process = ThreadAsProcess  # type: ignore[assignment]  # this is the point
    Event = threading.Event  # type: ignore[assignment]  # as above
    Queue = ThreadQueue  # type: ignore[assignment]  # as above


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of keys alone."""
    folder = tmp_path_factory.mktemp("keys") / "packed"
    with ShardWriter(folder, max_shard_samples=5) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:02d}", "bin": bytes(1000)})
    return folder


def test_processes_that_are_threads_deliver_all_batches(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)  # torch's threads leave theirs.
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 2, "multiprocessing_context": ThreadContext()}
    oracle = torch.utils.data.DataLoader(Fragile(kill, NUM_SAMPLES), **options)
    loader = DataLoader(range(NUM_SAMPLES), **options)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in oracle] == WHOLE
    assert receive(in_order(Fragile(kill, NUM_SAMPLES), **options)) == (WHOLE, None)
    # In torch's loader, all workers that are threads believe to be the same one, and yield the same samples.
    for dataset in (ShardDataset(keys, fields="key"), StreamDataset(sorted(keys.glob("*.tar")), fields="key")):
        received = [key for batch in DataLoader(dataset, **options) for key in batch]
        assert sorted(received) == [f"{number:02d}" for number in range(NUM_SAMPLES)]


@pytest.mark.parametrize("executor", ["fetching: kill", "ordered: kill", "fetching, not forked: kill"])
def test_a_worker_process_that_stays_stopped_is_an_error(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timeout. One that only takes long is waited for."""
    monkeypatch.setattr(worker_processes, "CHECK_S", 0.02)
    monkeypatch.setattr(worker_processes, "STOPPED_S", 0.1)
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
    monkeypatch.setattr(worker_processes, "CHECK_S", 0.02)
    batches = iter(make("fetching: kill"))
    received = [next(batches).tolist()]
    (process,) = batches._workers
    stop(process.pid)
    while len(received) < 3:  # They are there already, or are not.
        if not batches.is_ready(0.1):
            break
        received.append(next(batches).tolist())
    assert not batches.is_ready(0.1)
    os.kill(process.pid, signal.SIGCONT)
    assert [*received, *receive(batches)[0]] == WHOLE


def test_a_stopped_worker_process_whose_socket_is_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "CHECK_S", 0.02)
    monkeypatch.setattr(worker_processes, "STOPPED_S", 0.1)
    batches = iter(make("fetching: kill"))
    next(batches)
    (process,) = batches._workers
    stop(process.pid)
    (worker,) = batches._batches._batches.workers._workers
    with pytest.raises(WorkerError, match="stopped by a signal"):
        list(map(worker.send, itertools.repeat(ForgetBuffers(buffer_ids=()))))


def test_no_worker_waits_for_ever_for_a_stopped_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "STOPPED_S", 0.05)
    loader = make("fetching, not forked: kill")
    assert receive(loader) == (WHOLE, None)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # the only name that it has
    stop(server)
    try:
        with pytest.raises(WorkerError, match=rf"fork server \(pid {server}\) has been stopped .*kill -CONT {server}"):
            iter(loader)
    finally:
        os.kill(server, signal.SIGCONT)
    assert receive(loader) == (WHOLE, None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_storage_process_that_is_killed_does_not_end_an_epoch(
    keys: Path, moto_server: Server, tmp_path: Path, num_workers: int
) -> None:
    remote = upload(keys, f"{moto_server.url}/{uuid.uuid4().hex}", moto_server.options)
    options: dict[str, Any] = {"storage_options": moto_server.options, "cache": tmp_path / "cache"}
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
