"""However a program ends, its loaders leave no process, and write nothing to stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.worker_processes import DEADLINE_S, Data, find_marked, is_alive, send_signal, wait_until
from tests.processes import run_python

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
if ending.startswith("exit"):
    temporary = iter(make())
    next(temporary)
child = 0
if ending.startswith("fork"):
    # Not Python's own fork, which tells those who want to know: the child keeps all that is open.
    child = ctypes.PyDLL(None).fork()
    while child == 0:
        ctypes.PyDLL(None).pause()
Path(report + ".partial").write_text(f"{os.getpid()} {child}")
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

    def __init__(self, data: Data, folder: Path, ending: str) -> None:
        self.mark = f"SHARDIO_TEST_MARK={folder}"
        name, _, value = self.mark.partition("=")
        path, report = folder / "script.py", folder / "report"
        path.write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-X", "dev", path, data.images, data.shards, report, ending],
            env={**os.environ, name: value},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(lambda: report.exists() or self.process.poll() is not None, "the script iterates")

    def end(self) -> tuple[int, str]:
        """Return its exit code and what it wrote to stderr; end all processes that it started."""
        _, said = self.process.communicate(timeout=DEADLINE_S)
        wait_until(lambda: find_marked(self.mark) == [], "all has ended")
        return self.process.returncode, said


def test_the_interpreter_exits_with_loaders_in_all_states(data: Data, tmp_path: Path) -> None:
    """With ``sys.exit`` in the loop over one of them."""
    assert Script(data, tmp_path, "exit persistent").end() == (3, "")


def test_an_uncaught_exception(data: Data, tmp_path: Path) -> None:
    code, said = Script(data, tmp_path, "raise persistent").end()
    assert code == 1
    assert said.count("Traceback") == 1
    assert said.endswith("ZeroDivisionError: in the loop\n")
    assert "Exception ignored" not in said


def test_ctrl_c(data: Data, tmp_path: Path) -> None:
    script = Script(data, tmp_path, "wait")
    time.sleep(0.2)  # It is to come anywhere in the loop, not always at its beginning.
    os.killpg(script.process.pid, signal.SIGINT)  # As a terminal does: to all that did not leave its group.
    code, said = script.end()
    assert code == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")
    assert "Exception ignored" not in said
    assert "_process.py" not in said


@pytest.mark.parametrize("ending", ["wait", "fork persistent", "fork early"])
def test_worker_processes_end_when_the_training_process_is_killed(data: Data, tmp_path: Path, ending: str) -> None:
    """Even if a child survives that holds everything open, and if they have only just started."""
    # The script runs in a process that is forked from a server: only its worker processes start with the mark.
    name, value = "SHARDIO_TEST_MARK", str(tmp_path)
    path, report = tmp_path / "script.py", tmp_path / "report"
    path.write_text(SCRIPT)
    environment = {**os.environ, name: value}
    with ThreadPoolExecutor(1) as runner:
        ended = runner.submit(run_python, path, data.images, data.shards, report, ending, environment=environment)
        wait_until(lambda: report.exists() or ended.done(), "the script iterates")
        script, child = map(int, report.read_text().split())
        try:
            assert len(find_marked(f"{name}={value}")) >= 2
            send_signal(script, signal.SIGKILL)
            wait_until(lambda: find_marked(f"{name}={value}") == [], "the worker processes have ended")
            assert not child or is_alive(child)
        finally:
            for process_id in filter(None, (script, child, *find_marked(f"{name}={value}"))):
                send_signal(process_id, signal.SIGKILL)
        assert (ended.result().returncode, ended.result().stderr) == (-signal.SIGKILL, "")


HOLDER = """
import os, shardio, sys, torch  # Python takes apart what a variable holds, and only forgets other modules.
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
        return {"position": os.path.basename(str(self.position))}  # A module's name, which is gone at some time.

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

held = []
for iterable in make_iterables():
    for begin in (iter, enumerate):
        held.append(begin(iterable))
        next(held[-1])
# They stay variables: Python takes most other modules apart before this one.
if ending == "exit":
    sys.exit(3)
raise ZeroDivisionError("mine")
"""


@pytest.mark.parametrize("ending", ["exit", "raise"])
def test_iterators_that_are_alive_when_python_exits_say_nothing(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOLDER)
    command = [sys.executable, "-W", "ignore", *map(str, (script, tmp_path, ending))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if ending == "exit":
        assert (ended.returncode, ended.stderr) == (3, "")
    else:
        first, *_, last = lines = ended.stderr.splitlines()
        assert (ended.returncode, first, last) == (1, "Traceback (most recent call last):", "ZeroDivisionError: mine")
        assert len(lines) == 4
