"""However a loader is abandoned, it leaves no process, thread, descriptor or memory, and writes nothing to stderr."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import signal
import socket
import subprocess
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from shardio import DataLoader
from shardio.loader import fork_server
from shardio.loader.wire import make_pair
from shardio.reading import SampleReader
from tests.buffers import find_fork_servers
from tests.faults.worker_processes import (
    DEADLINE_S,
    Data,
    batches_of,
    count_mapped_buffers,
    count_threads,
    find_worker_processes,
    make_loader,
    plain,
)
from tests.files import count_open_files
from tests.processes import forkserver_context


def list_resources() -> dict[str, Any]:
    gc.collect()
    processes = {*find_fork_servers(), *find_worker_processes()}
    return {"processes": processes, "files": count_open_files(), "buffers": count_mapped_buffers()}


@pytest.fixture(scope="module")
def _all_is_started(data: Data) -> None:
    batches_of(make_loader(data))  # What torch starts once is no loader's.
    forkserver_context()  # Nor is what multiprocessing does.


@pytest.fixture(autouse=True)
def _nothing_is_left(_all_is_started: None) -> Iterator[None]:
    before = list_resources()
    num_threads = count_threads()  # Some may be about to end.
    yield
    assert list_resources() == before
    assert count_threads() <= num_threads
    assert not before["processes"]


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_break(data: Data, persistent: bool) -> None:
    loader = make_loader(data, "shards", 1, persistent_workers=persistent)
    for batch in loader:  # noqa: B007  # it is used after the loop
        assert len(find_worker_processes()) == 1
        break
    assert len(find_worker_processes()) == (1 if persistent else 0)
    batch = next(iter(loader))
    del loader
    assert find_worker_processes() == []
    assert count_mapped_buffers() == 1
    del batch
    assert count_mapped_buffers() == 0


@pytest.mark.slow
def test_worker_processes_end_even_if_another_process_holds_their_sockets(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fork_server._start_process
    started: list[subprocess.Popen[bytes]] = []
    copies: list[socket.socket] = []

    def start_and_note(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments))
        return started[-1]

    def make_pair_and_copy() -> tuple[socket.socket, socket.socket]:
        pair = make_pair()
        copies.extend(end.dup() for end in pair)
        return pair

    monkeypatch.setattr(fork_server, "_start_process", start_and_note)
    monkeypatch.setattr(fork_server, "make_pair", make_pair_and_copy)
    for batch in make_loader(data, "shards", 2):
        del batch
        break
    assert [process.returncode for process in started] == [0]
    for copy in copies:
        copy.close()


def test_an_exception_in_the_loop(data: Data) -> None:
    loader = make_loader(data, "map", 1, persistent_workers=True)

    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert len(find_worker_processes()) == 1
    assert len(batches_of(loader)) == 6


def test_a_loader_in_a_reference_cycle(data: Data) -> None:
    gc.disable()
    try:
        loader: Any = make_loader(data, "shards", 1, persistent_workers=True)
        loader.trainer = {"loader": loader, "iterator": (iterator := iter(loader)), "batch": next(iterator)}
        del loader, iterator
        assert len(find_worker_processes()) == 1
    finally:
        gc.enable()
    gc.collect()
    assert find_worker_processes() == []
    assert count_mapped_buffers() == 0


@pytest.mark.slow
def test_several_loaders_leave_no_resources(data: Data) -> None:
    """Some are never advanced. ``tools/loader_campaign.py`` does this with hundreds of them."""
    kept = []
    for number in range(5):
        loader = make_loader(data, ("shards", "map")[number % 2], 1, persistent_workers=number % 4 < 2)
        iterator = iter(loader)
        kept = list(islice(iterator, number % 3))
    del loader, iterator
    assert find_worker_processes() == []
    assert count_mapped_buffers() == len(kept) == 1


def send_back(loader: DataLoader, end: Any) -> None:
    end.send(batches_of(loader))


@pytest.mark.slow
def test_a_loader_is_pickled_and_handed_to_another_process_after_use(data: Data) -> None:
    """Its copy starts its own worker processes."""
    loader = make_loader(data, "map", 1, persistent_workers=True)
    iterator = iter(loader)
    first = plain(next(iterator))
    copied = pickle.loads(pickle.dumps(loader))
    copied.set_epoch(0)
    batches = batches_of(copied)
    del copied
    assert [first, *map(plain, iterator)] == batches
    loader.set_epoch(0)
    ours, theirs = multiprocessing.Pipe()
    process = forkserver_context().Process(target=send_back, args=(loader, theirs))
    process.start()
    try:
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == batches
        process.join()
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("error", [None, MemoryError("no more")])
def test_ctrl_c_or_an_error_while_the_training_process_decodes(
    data: Data, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    read, num_reads = SampleReader.read, itertools.count()

    def read_or_not(self: SampleReader, *arguments: Any) -> Any:
        if next(num_reads) == 3:  # The fourth chunk.
            if error is None:
                signal.raise_signal(signal.SIGINT)
            else:
                raise error
        return read(self, *arguments)

    loader = make_loader(data)
    expected = batches_of(loader)
    monkeypatch.setattr(SampleReader, "read", read_or_not)
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt if error is None else MemoryError) as error_info:
        list(iterator)
    assert error is None or error_info.value is error
    assert error_info.value.__cause__ is None
    assert error is not None or error_info.value.__context__ is None
    if error is None:
        with pytest.raises(RuntimeError, match=r"ended before its last batch \(KeyboardInterrupt\)"):
            next(iterator)
        loader.set_epoch(0)
        assert batches_of(loader) == expected
    else:
        assert len(batches_of(loader)) == 6
