"""Files of a directory, their modes and owners, this process's descriptors, and locks that another process holds."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shardio.storage import Location

OTHER_USER = 12345
"""The ID of a user who is neither root nor the user running the tests."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a directory, by name. If there is no directory, return an empty dict."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def read_parts(folder: Path) -> dict[str, dict[str, bytes]]:
    return {path.name: read_files(path) for path in folder.iterdir()}


def find_open_files(*, with_shared_numbers: bool = False) -> set[tuple[str, str]]:
    """Return the number and the target of each file descriptor that this process has open.

    By default, the memory of shared numbers is left out: any dataset may open it, and later datasets use it too. Tests
    must expect that files of earlier tests are closed at any time.
    """
    found = set[tuple[str, str]]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # The descriptor of the directory itself is already closed.
            found.add((descriptor.name, str(descriptor.readlink())))
    return {each for each in found if with_shared_numbers or "memfd:shared-numbers" not in each[1]}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Make writes beyond a given file size fail. Python ignores the signal SIGXFSZ, which the system also sends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read_objects(folder: Location) -> dict[str, bytes]:
    """Return the contents of the objects in a folder of any store, by name."""
    return {name: (folder / name).read_whole() for name in folder.list()}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


HOLD = """
import sys
from pathlib import Path
from shardio.files import WorkLock
with WorkLock(Path(sys.argv[1]), 10).held():
    print("held", flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


@contextmanager
def suspended_holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds a lock and is suspended."""
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
