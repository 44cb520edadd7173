"""However a loader is left, nothing of it stays: no process, thread, descriptor or memory, and not a word on stderr."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader
from shardio.loader import hosts as hosts_module
from shardio.loader.wire import make_pair
from shardio.reading import SampleReader
from tests.faults.hosts import (
    DEADLINE_S,
    Data,
    batches_of,
    count_mapped_slots,
    count_threads,
    find_hosts,
    find_marked,
    make_loader,
    plain,
    send_signal,
    wait_until,
)
from tests.files import count_open_files

persistent_or_not = pytest.mark.parametrize("persistent", [False, True])


def take_stock() -> dict[str, Any]:
    """Return what this process has that a loader could leave behind."""
    gc.collect()
    return {"hosts": find_hosts(), "files": count_open_files(), "slots": count_mapped_slots()}


@pytest.fixture(autouse=True)
def _nothing_is_left(data: Data) -> Iterator[None]:
    batches_of(make_loader(data))  # What torch starts once is no loader's.
    resource_tracker.ensure_running()  # Nor is what multiprocessing does.
    before = take_stock()
    num_threads = count_threads()  # Some may be about to end.
    yield
    assert take_stock() == before
    assert count_threads() <= num_threads
    assert before["hosts"] == []


@persistent_or_not
def test_break(data: Data, persistent: bool) -> None:
    loader = make_loader(data, "shards", 2, persistent_workers=persistent)
    for batch in loader:  # noqa: B007  # it is used after the loop
        assert len(find_hosts()) == 2
        break
    assert len(find_hosts()) == (2 if persistent else 0)
    batch = next(iter(loader))
    del loader
    assert find_hosts() == []
    assert count_mapped_slots() == 1
    del batch
    assert count_mapped_slots() == 0


def test_hosts_end_by_themselves_whoever_else_holds_their_sockets(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    start = hosts_module._start_process
    started: list[subprocess.Popen[bytes]] = []
    copies: list[socket.socket] = []

    def start_and_note(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments))
        return started[-1]

    def make_pair_and_copy() -> tuple[socket.socket, socket.socket]:
        """As a process does that is forked behind Python's back."""
        pair = make_pair()
        copies.extend(end.dup() for end in pair)
        return pair

    monkeypatch.setattr(hosts_module, "_start_process", start_and_note)
    monkeypatch.setattr(hosts_module, "make_pair", make_pair_and_copy)
    for batch in make_loader(data, "shards", 2):
        del batch
        break
    assert [process.returncode for process in started] == [0, 0]
    for copy in copies:
        copy.close()


@persistent_or_not
def test_an_exception_in_the_loop(data: Data, persistent: bool) -> None:
    loader = make_loader(data, "map", 1, persistent_workers=persistent)

    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert len(find_hosts()) == (1 if persistent else 0)
    assert len(batches_of(loader)) == 6


def test_iterators_that_are_never_advanced(data: Data) -> None:
    for kind in ("shards", "map", "folder"):
        iter(make_loader(data, kind, 1))
        assert find_hosts() == []
        iterator = iter(make_loader(data, kind, 1))
        assert len(find_hosts()) <= 1
        del iterator
        assert find_hosts() == []


@persistent_or_not
def test_a_loader_in_a_reference_cycle(data: Data, persistent: bool) -> None:
    gc.disable()
    try:
        loader: Any = make_loader(data, "shards", 1, persistent_workers=persistent)
        loader.trainer = {"loader": loader, "iterator": (iterator := iter(loader)), "batch": next(iterator)}
        del loader, iterator
        assert len(find_hosts()) == 1
    finally:
        gc.enable()
    gc.collect()
    assert find_hosts() == []
    assert count_mapped_slots() == 0


def test_fifty_loaders_leave_nothing(data: Data) -> None:
    kept = []
    for number in range(50):
        loader = make_loader(data, ("shards", "map")[number % 2], 1, persistent_workers=number % 4 < 2)
        iterator = iter(loader)
        kept = list(islice(iterator, number % 3))
    del loader, iterator
    assert find_hosts() == []
    assert count_mapped_slots() == len(kept) == 1


def send_back(loader: DataLoader, end: Any) -> None:
    end.send(batches_of(loader))


@persistent_or_not
def test_a_loader_is_pickled_after_use(data: Data, persistent: bool) -> None:
    """Its copy starts hosts of its own, where it is."""
    loader = make_loader(data, "map", 1, persistent_workers=persistent)
    iterator = iter(loader)
    first = plain(next(iterator))
    copied = pickle.loads(pickle.dumps(loader))
    copied.set_epoch(0)
    batches = batches_of(copied)
    assert batches[0] == first
    del copied
    assert [first, *map(plain, iterator)] == batches


def test_a_loader_is_handed_to_a_spawned_process_after_use(data: Data) -> None:
    loader = make_loader(data, "map", 1, persistent_workers=True)
    batches = batches_of(loader)
    loader.set_epoch(0)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=send_back, args=(loader, theirs))
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


SCRIPT = """
import ctypes, os, sys, time
from pathlib import Path
from shardio import DataLoader, ShardDataset
from shardio.transforms import RandomResizedCrop

images, shards, report, ending = sys.argv[1:]

def make(**options):
    dataset = ShardDataset(shards, shuffle=True, transform=RandomResizedCrop(48))
    return DataLoader(dataset, batch_size=8, num_workers=1, **options)

loader = make(persistent_workers=ending.endswith("persistent"))
never_started = make()
never_advanced = iter(make())
iterator = iter(loader)
if not ending.endswith("early"):
    batch = next(iterator)
if ending.startswith("fork"):
    # Not Python's own fork, which tells those who want to know: the child keeps all that is open.
    if ctypes.PyDLL(None).fork() == 0:
        while True:
            ctypes.PyDLL(None).pause()
Path(report + ".partial").write_text(str(os.getpid()))
Path(report + ".partial").rename(report)
if ending.startswith("exit"):
    for batch in iterator:
        sys.exit(3)
if ending.startswith("raise"):
    for batch in iterator:
        raise ZeroDivisionError("in the loop")
while ending.startswith(("wait", "fork")):
    for batch in loader:
        time.sleep(0.002)  # The training, so that Ctrl-C comes in it, too, and not always while it waits for a batch.
"""


class Script:
    """A script that iterates, known by a word in its environment and that of all that it starts."""

    def __init__(self, data: Data, folder: Path, ending: str, *options: str) -> None:
        self.mark = f"SHARDIO_TEST_MARK={folder}"
        name, _, value = self.mark.partition("=")
        path, report = folder / "script.py", folder / "report"
        path.write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, *options, path, data.images, data.shards, report, ending],
            env={**os.environ, name: value},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(lambda: report.exists() or self.process.poll() is not None, "the script iterates")

    def end(self) -> tuple[int, str]:
        """Return its exit code and what it wrote to stderr; all that it started ends with it."""
        _, said = self.process.communicate(timeout=DEADLINE_S)
        wait_until(lambda: find_marked(self.mark) == [], "all has ended")
        return self.process.returncode, said


@persistent_or_not
def test_the_interpreter_exits_with_loaders_in_all_states(data: Data, tmp_path: Path, persistent: bool) -> None:
    ending = "persistent" if persistent else "end"
    assert Script(data, tmp_path, ending, "-W", "error", "-X", "dev").end() == (0, "")


def test_exit_in_the_loop(data: Data, tmp_path: Path) -> None:
    assert Script(data, tmp_path, "exit", "-W", "error", "-X", "dev").end() == (3, "")


def test_an_exception_that_nobody_catches(data: Data, tmp_path: Path) -> None:
    code, said = Script(data, tmp_path, "raise persistent", "-W", "error", "-X", "dev").end()
    assert code == 1
    assert said.count("Traceback") == 1
    assert said.endswith("ZeroDivisionError: in the loop\n")
    assert "Exception ignored" not in said


@persistent_or_not
def test_ctrl_c(data: Data, tmp_path: Path, persistent: bool) -> None:
    script = Script(data, tmp_path, "wait persistent" if persistent else "wait", "-W", "error", "-X", "dev")
    time.sleep(0.2)  # It is to come anywhere in the loop, not always at its beginning.
    os.killpg(script.process.pid, signal.SIGINT)  # As a terminal does: to all that did not leave its group.
    code, said = script.end()
    assert code == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")
    assert "Exception ignored" not in said
    assert "loader/host.py" not in said


def read_and(happen: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen in this process while it reads the fourth chunk."""
    read, num_reads = SampleReader.read, itertools.count()

    def read_or_not(self: SampleReader, *arguments: Any) -> Any:
        if next(num_reads) == 3:
            happen()
        return read(self, *arguments)

    monkeypatch.setattr(SampleReader, "read", read_or_not)


def test_ctrl_c_while_the_training_process_decodes(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(data)
    expected = batches_of(loader)
    read_and(lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt) as error_info:
        list(iterator)
    assert error_info.value.__cause__ is None
    assert error_info.value.__context__ is None
    assert list(iterator) == []
    loader.set_epoch(0)
    assert batches_of(loader) == expected


def test_an_error_in_the_training_process_is_raised_as_it_is(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, error = make_loader(data), MemoryError("no more")

    def fail() -> None:
        raise error

    read_and(fail, monkeypatch)
    iterator = iter(loader)
    with pytest.raises(MemoryError) as error_info:
        list(iterator)
    assert error_info.value is error
    assert error.__cause__ is None
    assert len(batches_of(loader)) == 6


@pytest.mark.parametrize("ending", ["wait", "fork persistent", "fork early"])
def test_hosts_end_when_the_training_process_is_killed(data: Data, tmp_path: Path, ending: str) -> None:
    """Also when a child of its own lives on, and holds all that was open, and when they have hardly started."""
    script = Script(data, tmp_path, ending)
    hosts_and_child = set(find_marked(script.mark)) - {script.process.pid}
    assert len(hosts_and_child) >= (3 if ending.startswith("fork") else 2)
    script.process.kill()
    script.process.wait()
    num_left = 1 if ending.startswith("fork") else 0
    try:
        wait_until(lambda: len(find_marked(script.mark)) == num_left, "only the child is left")
    finally:
        for process_id in find_marked(script.mark):
            send_signal(process_id, signal.SIGKILL)
    assert script.end() == (-signal.SIGKILL, "")
