"""Objects are called when their process forks, for as long as they live, and in the order of os.register_at_fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardio

PACKAGE = Path(shardio.__file__).parent

FORK = """
import os, sys
from shardio.process import _watches, call_at_fork

class Owner:
    def __init__(self, name):
        self.name = name
        call_at_fork(self, before=Owner.before, after_in_parent=Owner.in_parent, after_in_child=Owner.in_child)

    def before(self):
        os.write(1, f"before {self.name}\\n".encode())

    def in_parent(self):
        os.write(parent, f"parent {self.name}\\n".encode())

    def in_child(self):
        os.write(1, f"child {self.name}\\n".encode())

here, parent = os.pipe()
owners = [Owner(name) for name in "abc"]
call_at_fork(owners[0], after_in_child=lambda owner: os.write(1, b"child again\\n"))
del owners[1]
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
print(os.read(here, 100).decode(), end="", flush=True)
owners.clear()
assert not _watches
"""


FAILING = """
import os, sys
from shardio.process import call_at_fork

def report(found):
    errors = [found.exc_value, found.exc_value.__context__]
    os.write(2, "".join(sorted(repr(error) for error in errors)).encode())

class Owner:
    def __init__(self, name, error=None):
        self.name, self.error = name, error
        call_at_fork(self, before=Owner.call, after_in_parent=Owner.call, after_in_child=Owner.call)

    def call(self):
        os.write(1, self.name.encode())
        if self.error is not None:
            raise self.error(self.name)

sys.unraisablehook = report
owners = [Owner("a"), Owner("b", ValueError), Owner("c", KeyboardInterrupt), Owner("d")]
for _ in range(2):
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.write(1, b" ")
"""

INTERRUPTED = """
import _thread, os
os.register_at_fork(before=_thread.interrupt_main)  # Registered first, so called last: Ctrl-C arrives in the fork.
from shardio.images.kernel.finding import _finder, find_kernel

def try_lock():
    print("free" if _finder._lock.acquire(timeout=5) else "held", flush=True)
    _finder._lock.release()

find_kernel()
for _ in range(2):
    try:
        if (child := os.fork()) == 0:
            try_lock()
            os._exit(0)
        os.waitpid(child, 0)
        try_lock()
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
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


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_objects_are_called_while_they_live() -> None:
    done = run(FORK)
    assert done.returncode == 0, done.stderr
    before, child, parent = ["before c", "before a"], ["child a", "child c", "child again"], ["parent a", "parent c"]
    assert done.stdout.splitlines() == [*before, *child, *parent]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_an_error_of_one_object_is_reported_and_skips_no_other_object() -> None:
    """Each fork makes all calls: before it, in the parent and in the child."""
    done = run(FAILING)
    assert done.returncode == 0
    assert sorted(done.stdout.split()[0]) == sorted(done.stdout.split()[1]) == sorted(3 * "abcd")
    assert done.stderr == 2 * 3 * "KeyboardInterrupt('c')ValueError('b')"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_ctrl_c_during_a_fork_leaves_the_finders_lock_free() -> None:
    done = run(INTERRUPTED)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line != "KeyboardInterrupt"] == 4 * ["free"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_ctrl_c_while_a_fork_waits_for_a_lock_does_not_take_it_from_its_owner() -> None:
    done = run(WAITING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "free in the child: True",
        "free in the parent: False KeyboardInterrupt RuntimeError",
        "released by its owner",
    ]


def test_one_module_registers_with_the_operating_system() -> None:
    found = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "os.register_at_fork(" in path.read_text()
    }
    assert found == {"process.py"}
