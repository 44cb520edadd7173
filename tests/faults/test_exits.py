"""However a program ends or abandons a loader, nothing is left: no process, thread, file, memory, or line on stderr."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader
from shardio.loader import fork_server
from shardio.loader.wire import make_pair
from tests.buffers import find_buffers, find_fork_servers, list_processes
from tests.faults.worker_processes import (
    DEADLINE_S,
    Batches,
    Data,
    batches_of,
    find_worker_processes,
    is_alive,
    make_loader,
    plain,
    send_signal,
    wait_until,
)
from tests.files import find_open_files
from tests.processes import assert_passes_in_fresh_process, forkserver_context, run_python


def marked(mark: Path) -> dict[str, str]:
    """Return an environment that marks a process and all processes that inherit it."""
    return {**os.environ, "SHARDIO_TEST_MARK": str(mark)}


def find_marked(mark: Path) -> list[int]:
    found = []
    for process_id, _, _ in list_processes():
        with suppress(OSError):
            if f"SHARDIO_TEST_MARK={mark}".encode() in Path(f"/proc/{process_id}/environ").read_bytes():
                found.append(process_id)
    return found


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
list(DataLoader(ShardDataset(shards, transform=lambda image: image[:9, :9]), num_workers=1))  # Its fork server is kept.
never_started = make()
never_advanced = iter(make())
iterator = iter(loader)
if not ending.endswith("early"):
    batch = next(iterator)
others = iter(DataLoader(range(1000), num_workers=2))  # They end within seconds.
next(others)
child = 0
if ending.startswith("fork"):
    # Use C's fork, not Python's, which runs callbacks: the child keeps everything open.
    child = ctypes.PyDLL(None).fork()
    while child == 0:
        ctypes.PyDLL(None).pause()
Path(report + ".partial").write_text(" ".join(map(str, [os.getpid(), child, *(each.pid for each in others._workers)])))
Path(report + ".partial").rename(report)
while True:
    for batch in loader:
        time.sleep(0.002)  # This is the training: Ctrl-C must not always arrive while the loop waits for a batch.
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_program_with_loaders_in_all_states(data: Data, tmp_path: Path) -> None:
    path, report = tmp_path / "script.py", tmp_path / "report"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "dev", path, data.images, data.shards, report, "wait"],
        env=marked(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: report.exists() or process.poll() is not None, "the script iterates")
    time.sleep(0.2)  # The signal should arrive at any point in the loop, not always at its start.
    os.killpg(process.pid, signal.SIGINT)  # Signal the whole process group, as a terminal does.
    _, said = process.communicate(timeout=DEADLINE_S)
    wait_until(lambda: find_marked(tmp_path) == [], "all has ended")
    assert process.returncode == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")
    assert "_process.py" not in said
    assert "Exception ignored" not in said


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["wait", "fork persistent", "fork early"])
def test_worker_processes_end_when_the_training_process_is_killed(data: Data, tmp_path: Path, ending: str) -> None:
    # The script is forked by a server without the mark, so only the script's worker processes have the mark.
    path, report = tmp_path / "script.py", tmp_path / "report"
    path.write_text(SCRIPT)
    arguments = path, data.images, data.shards, report, ending
    with ThreadPoolExecutor(1) as runner:
        ended = runner.submit(run_python, *arguments, environment=marked(tmp_path))
        wait_until(lambda: report.exists() or ended.done(), "the script iterates")
        script, child, *others = map(int, report.read_text().split())
        try:
            assert len(find_marked(tmp_path)) >= 2
            send_signal(script, signal.SIGKILL)
            wait_until(lambda: find_marked(tmp_path) == [], "shardio's own worker processes have ended")
            wait_until(lambda: not any(map(is_alive, others)), "the workers of any dataset have ended")
            assert not child or is_alive(child)
        finally:
            for process_id in filter(None, (script, child, *find_marked(tmp_path))):
                send_signal(process_id, signal.SIGKILL)
        assert len(others) == 2
        assert (ended.result().returncode, ended.result().stderr) == (-signal.SIGKILL, "")


HOLDER = """
import os, shardio, sys, torch  # At exit, Python clears modules that variables hold, and only drops others.
from pathlib import Path
from torch.utils.data import IterableDataset
from shardio import DataLoader, DevicePrefetcher, EpochSampler
from shardio import ShardDataset, ShardMapDataset, ShardWriter, StreamDataset

class Counting(IterableDataset):
    position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield self.position

    def state_dict(self):
        return {"position": os.path.basename(str(self.position))}  # At some point of the exit, the name "os" is gone.

    def load_state_dict(self, state):
        self.position = int(state["position"])

folder, ending = sys.argv[1:]

def make_iterables():
    for out in ("memory://data", f"{folder}/local"):
        with ShardWriter(out, max_shard_samples=30) as writer:
            for number in range(90):
                writer.write({"__key__": str(number), "txt": "x"})
    fields = {"fields": ("txt", "key")}
    local, sampled = ShardDataset(out, shuffle=True, **fields), ShardMapDataset(out, **fields)
    remote = ShardDataset("memory://data", shuffle=True, **fields)
    tars = sorted(map(str, Path(out).glob("*.tar")))
    zipped = [f"pipe:gzip -c {tar}" for tar in tars]
    persistent, thread = {"num_workers": 1, "persistent_workers": True}, {"num_workers": 1, "worker_method": "thread"}
    for options in ({}, {"num_workers": 1}, persistent):
        yield DataLoader(local, 4, **options)
        yield DataLoader(Counting(), 4, **options)
    yield DataLoader(Counting(), 4, **thread)
    yield DataLoader(remote, 4)
    yield DataLoader(remote, 4, num_workers=1)
    yield DataLoader(ShardMapDataset("memory://data", **fields), 4, shuffle=True)
    yield DataLoader(sampled, 4, sampler=EpochSampler(sampled), worker_init_fn=print)
    yield DataLoader(sampled, 4, shuffle=True, check_duplicates=True, device="cpu")
    yield DataLoader(StreamDataset(tars, **fields), 4)
    yield DataLoader(StreamDataset(zipped, shuffle=True, **fields), 4, **thread)
    yield DevicePrefetcher(DataLoader(local, 4, num_workers=1))
    yield DevicePrefetcher(DataLoader(Counting(), 4))
    yield torch.utils.data.DataLoader(local, 4)
    yield remote
    yield StreamDataset(zipped, **fields)

held, never_started = [], DataLoader(range(9), num_workers=1)
for iterable in make_iterables():
    held.append(iter(iterable))
    for begin in (iter, enumerate):
        held.append(begin(iterable))
        next(held[-1])
# The iterators stay in variables: Python clears most other modules before this one.
if ending == "exit":
    sys.exit(3)
raise ZeroDivisionError("mine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["exit", "raise"])
def test_iterators_that_are_alive_when_python_exits_say_nothing(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOLDER)
    command: list[Any] = [sys.executable, "-W", "ignore", script, tmp_path, ending]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=marked(tmp_path))
    wait_until(lambda: find_marked(tmp_path) == [], "all has ended")
    if ending == "exit":
        assert (ended.returncode, ended.stderr) == (3, "")
    else:
        first, *_, last = lines = ended.stderr.splitlines()
        assert (ended.returncode, first, last) == (1, "Traceback (most recent call last):", "ZeroDivisionError: mine")
        assert len(lines) == 4


ASKING = """
import atexit, builtins, sys, threading

def ask(when):
    for iterator in iterators:
        try:
            while True:
                next(iterator)
        except BaseException as error:
            print(when, type(error).__name__, flush=True)

class Last:
    def __del__(self):
        ask("__del__")

iterators = []
atexit.register(ask, "last handler")

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.transforms import CenterCrop

dataset = ShardMapDataset(sys.argv[1], transform=CenterCrop(32))
endless = DataLoader(ShardDataset(sys.argv[1], transform=CenterCrop(32)), batch_size=1)
begun = threading.Event()

def keep_asking():
    try:
        while True:
            for _ in endless:
                begun.set()
    except RuntimeError as error:
        print("thread", error, flush=True)

if __name__ == "__main__":
    for options in ({}, {"persistent_workers": True}, {"worker_init_fn": id}, {"num_workers": 0}):
        options = {"num_workers": 1, "prefetch_factor": 1, **options}
        options["prefetch_factor"] = options["prefetch_factor"] if options["num_workers"] else None
        iterators.append(iter(DataLoader(dataset, sampler=EpochSampler(dataset), batch_size=1, **options)))
    iterators.append(iter(DataLoader(dataset, shuffle=True, batch_size=1, num_workers=1)))
    iterators.append(iter(DevicePrefetcher(DataLoader(dataset, shuffle=True, batch_size=1, num_workers=1), "cpu")))
    for iterator in iterators:
        next(iterator)
    builtins.last = Last()
    threading.Thread(target=keep_asking, daemon=True).start()
    begun.wait()
"""


@pytest.mark.slow
def test_a_batch_that_is_requested_while_python_ends_arrives_or_raises_at_once(packed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKING)
    ended = subprocess.run([sys.executable, script, packed], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert "thread Python is shutting down, so no batch can be made: read all batches before the program ends" in said
    assert [line for line in said if line.startswith("last handler")] == ["last handler RuntimeError"] * 6
    assert sum(line.startswith("__del__") for line in said) in (0, 6), "the interpreter may never call __del__"


def find_processes() -> set[int]:
    gc.collect()
    return {*find_fork_servers(), *find_worker_processes()}


@pytest.fixture(scope="module")
def _all_is_started(data: Data) -> None:
    # Torch and multiprocessing start some helpers only once, and keep them.
    batches_of(make_loader(data))
    forkserver_context()


@pytest.fixture(autouse=True)
def _nothing_is_left(_all_is_started: None) -> Iterator[None]:
    assert not find_processes()
    files, buffers = find_open_files(), find_buffers()
    num_threads = len(list(Path("/proc/self/task").iterdir()))  # Some threads may be about to end.
    yield
    assert not find_processes()
    assert find_open_files() <= files
    assert find_buffers() <= buffers
    assert len(list(Path("/proc/self/task").iterdir())) <= num_threads


@pytest.mark.slow
def test_worker_processes_end_even_if_others_hold_their_sockets(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert find_buffers() == set()


def delivers(loader: DataLoader, batches: Batches) -> None:
    assert batches_of(loader) == batches


@pytest.mark.slow
def test_a_loader_is_pickled_and_handed_to_another_process_after_use(data: Data) -> None:
    loader = make_loader(data, "map", 1, persistent_workers=True)
    iterator = iter(loader)
    first = plain(next(iterator))
    copied = pickle.loads(pickle.dumps(loader))
    copied.set_epoch(0)
    batches = batches_of(copied)
    del copied
    assert [first, *map(plain, iterator)] == batches
    loader.set_epoch(0)
    assert_passes_in_fresh_process(delivers, loader, batches)
