"""One of several processes does the work. A suspended one does not stop the others."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardio.files import WorkLock
from tests.test_trust import mode_of, umask

HOLD = textwrap.dedent("""
    import sys
    from pathlib import Path
    from shardio.files import WorkLock
    with WorkLock(Path(sys.argv[1]), 10).held():
        print("held", flush=True)
        sys.stdin.read()
    print("released", flush=True)
""")


@contextmanager
def suspended_holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is suspended while it holds a lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)


def test_a_suspended_holder_is_named_and_gone_around(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = WorkLock(tmp_path / "lock", 0.2)
    with suspended_holder(tmp_path / "lock") as process, caplog.at_level(logging.WARNING, "shardio"):
        for _ in range(3):
            with lock.held():
                pass
        (message,) = caplog.messages
        assert f"process {process.pid} on" in message
        assert str(tmp_path / "lock") in message
        process.send_signal(signal.SIGCONT)
        assert process.communicate()[0] == "released\n"
    caplog.clear()
    with lock.held():
        assert not caplog.messages
        with WorkLock(tmp_path / "lock", 0).held():
            assert f"process {os.getpid()} on" in caplog.messages[0], "the lock is taken again after all"


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    lock, inside, found = WorkLock(tmp_path / "lock", 60), [0], list[int]()

    def work(_: int) -> None:
        with lock.held():
            inside[0] += 1
            found.append(inside[0])
            inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(20)))
    assert found == [1] * 20


def test_the_file_has_the_given_permissions_whatever_the_umask(tmp_path: Path) -> None:
    with umask(0o077), WorkLock(tmp_path / "lock", 1, 0o660).held():
        assert mode_of(tmp_path / "lock") == 0o660


def test_no_file_is_needed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"content")
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "no folder" / "lock", tmp_path / "link"):
        with WorkLock(path, 1).held():
            pass
    assert target.read_bytes() == b"content", "links are not followed"
