"""Background processes, forks, interruptions and processors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

import shardio
from shardio import process
from shardio.process import count_processors, is_interruption, start_process
from tests.raising import assert_raises

PACKAGE = Path(shardio.__file__).parent
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


REPORTING = """
import json, os, sys

def report():
    inherited = [number for number in map(int, sys.argv[2:]) if is_open(number)]
    print(json.dumps([sys.argv[1], os.getcwd(), os.environ["COLOR"], sys.stdin.read(), inherited, os.getsid(0)]))

def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
"""


def test_a_process_gets_what_it_is_given_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "reports.py").write_text(REPORTING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "modules"])
    passed, kept = os.pipe()
    try:
        arguments, environment = ["a b", passed, kept], {"COLOR": "blue"}
        options = {"environment": environment, "descriptors": [passed], "cwd": "/", "stdout": subprocess.PIPE}
        started = start_process("reports:report", arguments, **options)  # type: ignore[arg-type]  # of many types
        output, _ = started.communicate(timeout=60)
    finally:
        os.close(passed)
        os.close(kept)
    assert started.returncode == 0
    assert output.decode() == f'["a b", "/", "blue", "", [{passed}], {started.pid}]\n'


GONE = """
import os, subprocess, sys
from shardio.process import start_process
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
sys.path.insert(0, "")
sys.exit(start_process("shardio.process:count_processors", cwd="/").wait())
"""


def test_a_process_starts_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    run(f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{GONE}", tmp_path / "gone")


FORK = """
import os, sys
from shardio.process import _watches, call_at_fork

class Owner:
    def __init__(self, name, error=None):
        self.name, self.error = name, error
        call_at_fork(self, before=Owner.before, after_in_parent=Owner.in_parent, after_in_child=Owner.in_child)

    def before(self, moment="before", descriptor=1):
        os.write(descriptor, f"{moment} {self.name}\\n".encode())
        if self.error is not None:
            raise self.error(self.name)

    def in_parent(self):
        self.before("parent", parent)

    def in_child(self):
        self.before("child")

def report(found):
    errors = [found.exc_value, found.exc_value.__context__]
    os.write(2, "".join(sorted(repr(error) for error in errors)).encode())

here, parent = os.pipe()
sys.unraisablehook = report
owners = [Owner("a"), Owner("b"), Owner("c", ValueError), Owner("d", KeyboardInterrupt), Owner("e")]
call_at_fork(owners[0], after_in_child=lambda owner: os.write(1, b"child again\\n"))
del owners[1]
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
print(os.read(here, 100).decode(), end="", flush=True)
owners.clear()
assert not _watches
"""


INTERRUPTED = """
import _thread, os
os.register_at_fork(before=_thread.interrupt_main)  # Registered first, so called last: Ctrl-C arrives in the fork.
import threading
from shardio.process import hold_during_forks

lock = threading.RLock()
hold_during_forks(lock)

def try_lock():
    os.write(1, b"free\\n" if lock.acquire(timeout=5) else b"held\\n")  # One write: both processes write at once.
    lock.release()

for _ in range(2):
    child = None
    try:
        child = os.fork()
    except KeyboardInterrupt:
        os.write(1, b"interrupted\\n")
    thread = threading.Thread(target=try_lock)  # The thread that holds an RLock can always acquire it.
    thread.start()
    thread.join()
    if child == 0:
        os._exit(0)
    os.wait()
"""

WAITING = """
import os, signal, sys, threading
from shardio.process import hold_during_forks

lock, is_held, may_end = threading.RLock(), threading.Event(), threading.Event()
hold_during_forks(lock)

def work():
    with lock:
        is_held.set()
        may_end.wait()
    print("released by its owner", flush=True)

thread = threading.Thread(target=work)
thread.start()
is_held.wait()
ignored = []
sys.unraisablehook = lambda found: ignored.append(found.exc_type.__name__)
threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
if (child := os.fork()) == 0:
    print("free in the child:", lock.acquire(timeout=5), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("free in the parent:", lock.acquire(blocking=False), *ignored, flush=True)
may_end.set()
thread.join()
"""


@forks
def test_objects_are_called_at_forks_while_they_live_in_spite_of_the_errors_of_others() -> None:
    done = run(FORK)
    expected = [*(f"before {name}" for name in "edca"), *(f"child {name}" for name in "acde"), "child again"]
    assert done.stdout.splitlines() == [*expected, *(f"parent {name}" for name in "acde")]
    assert done.stderr == 3 * "KeyboardInterrupt('d')ValueError('c')"


@forks
def test_ctrl_c_during_a_fork_leaves_a_lock_free() -> None:
    done = run(INTERRUPTED)
    assert sorted(done.stdout.splitlines()) == [*4 * ["free"], *2 * ["interrupted"]]


@forks
def test_ctrl_c_while_a_fork_waits_for_a_lock_does_not_take_it_from_its_owner() -> None:
    done = run(WAITING)
    found = ["free in the child: True", "free in the parent: False KeyboardInterrupt RuntimeError"]
    assert done.stdout.splitlines() == [*found, "released by its owner"]


class Kind(Enum):
    """An enum that looks up values in Python code, like the signal module's enums."""

    CAT = 1


def test_other_errors_are_not_interruptions() -> None:
    caught = assert_raises(ValueError, "is not a valid Kind", Kind, 2)
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first  # Causes may form a cycle.
    assert not any(map(is_interruption, (caught, first)))
    first.__cause__ = first
    assert not is_interruption(first)


def test_a_signal_handlers_error_is_an_interruption_even_as_a_cause() -> None:
    def handle(number: int, frame: object) -> None:
        raise TimeoutError("too late")

    def decode() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError as error:
            raise ValueError("damaged") from error

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        caught = assert_raises(ValueError, "damaged", decode)
        assert is_interruption(caught)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has affinity masks")
def test_the_affinity_mask_limits_the_processors() -> None:
    done = run(
        "import os; from shardio.process import count_processors as c;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(c())"
    )
    assert done.stdout == "1\n"


def limit(folder: str, quota: str) -> dict[str, str]:
    """Return the files that show the quota of ``folder`` to a process in a/b, or in the root if ``folder`` is ""."""
    return {"proc/self/cgroup": "0::/a/b\n" if folder else "0::/\n", f"sys/fs/cgroup/{folder}cpu.max": f"{quota}\n"}


FIRST_VERSION = {
    "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/docker/x\n",
    "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
"""The files of a process in a version 1 control group, with a quota of 4 processors."""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n"}, 8),
        (limit("", "max 100000"), 8),
        (limit("", "200000 100000"), 2),
        (limit("", "150000 100000"), 2),
        (limit("", "10000 100000"), 1),
        (limit("", "6400000 100000"), 8),
        (limit("a/", "300000 100000"), 3),
        ({**limit("a/", "300000 100000"), **limit("a/b/", "max 100000")}, 3),
        (FIRST_VERSION, 4),
    ],
)
def test_the_quota_of_each_control_group_limits_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    quotas = process._quotas
    monkeypatch.setattr(process, "_quotas", lambda _: quotas(tmp_path))
    if hasattr(os, "process_cpu_count"):
        monkeypatch.setattr(os, "process_cpu_count", lambda: 8)
    elif hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert count_processors() == expected


@pytest.mark.parametrize("words", [("os.register_at_fork(",), ("cpu_count", "sched_getaffinity")], ids=" ".join)
def test_one_module_asks_the_operating_system(words: tuple[str, ...]) -> None:
    paths = [path for folder in (PACKAGE, PACKAGE.parent / "benchmarks") for path in folder.rglob("*.py")]
    found = {path for path in paths if any(word in path.read_text() for word in words)}
    assert found == {PACKAGE / "process.py"}
