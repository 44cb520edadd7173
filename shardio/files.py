"""Read ranges of files, write files atomically, lock work, and check which files other users may have written.

A file or a folder is *trusted* if it belongs to this user or root, and neither its group nor others may write to it.
OpenSSH demands the same for ``authorized_keys`` (StrictModes). Even the user's private group must not have write
access, because a remote directory service may add members to that group. A POSIX ACL that grants write access to others
is visible in the group's permission bits.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

_log = logging.getLogger("shardio")

PARTIAL_SUFFIX = ".partial"
"""The suffix of the hidden files that hold unfinished content."""

_UNFINISHED = re.compile(rf"\.(?P<target>.+)\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}", re.DOTALL)

POLL_S = 0.05
"""The interval between attempts to take a lock, in seconds."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO must not block.

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


class Descriptor:
    """An open file descriptor, which is closed when the last reference is gone. Reads in progress hold references."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK, opening a pipe that has no writer would block.
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "number"):
            os.close(self.number)


HEAD_BYTES = 256
"""The length of a FileRange's head."""


class FileRange(NamedTuple):
    """Bytes of an open file, which are read when they are needed.

    Attributes:
        file: The open file.
        start: The offset of the first byte.
        stop: The offset after the last byte.
        head: The first bytes, at most HEAD_BYTES, which have been read.
        digest: The xxh3-64 of all bytes according to the index file.
    """

    file: Descriptor
    start: int
    stop: int
    head: bytes
    digest: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the range."""
        return self.stop - self.start

    def read(self, num_bytes: int | None = None, offset: int = 0) -> bytes:
        """Return ``num_bytes`` bytes from an offset in the range; if fewer remain, or by default, all that remain.

        Raises:
            ValueError: If the file ends early, because it was truncated after it had been opened.
        """
        start = self.start + offset
        stop = self.stop if num_bytes is None else min(start + num_bytes, self.stop)
        content = read_range(self.file.number, start, stop)
        if len(content) < stop - start:
            raise ValueError("the file was truncated while it was in use: restore it")
        return content


def read_range(descriptor: int, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of an open file, or fewer if the file ends before ``stop``."""
    content = os.pread(descriptor, stop - start, start)
    while len(content) < stop - start:  # A single read on Linux returns at most 2 GiB.
        more = os.pread(descriptor, stop - start - len(content), start + len(content))
        if not more:
            break
        content += more
    return content


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. The file appears whole or not at all.

    The content goes to a hidden file in the same directory. The hidden file is synced to disk and renamed at the end.
    If the block raises an error, the hidden file is removed and ``path`` stays as it was.

    Args:
        path: The file to write.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full. The error names ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        with naming(path):
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
    except BaseException:  # Even Ctrl-C must not leave a partial file.
        temporary.unlink(missing_ok=True)
        raise


def create_whole(path: Path, content: bytes) -> bool:
    """Write a file unless the path exists; return whether it was written. The file appears only when it is complete.

    Raises:
        OSError: If the file cannot be written, or the file system has no hard links.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        with write_whole(temporary) as file:
            file.write(content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def find_target(name: str) -> str | None:
    """Return the final name of an unfinished file; None if ``name`` is not the name of an unfinished file."""
    found = _UNFINISHED.fullmatch(name)
    return None if found is None else found["target"]


def remove_unfinished(directory: Path, targets: Container[str] | None = None) -> None:
    """Remove the unfinished files of a killed process from a directory that no other process writes to.

    Args:
        directory: The directory.
        targets: The names of the files whose unfinished versions are removed; None for any.
    """
    for path in directory.iterdir():
        target = find_target(path.name)
        if target is not None and (targets is None or target in targets):
            path.unlink()


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add the name of a file or an object to an OSError that does not name it, such as one from a write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None and str(path) not in str(error):
            error.filename = str(path)
        raise


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some file systems cannot sync directories.
            raise
    finally:
        os.close(descriptor)


class WorkLock:
    """A lock file, which keeps processes from doing the same work at the same time.

    The results of the work must not depend on the lock, because it is ineffective if the file system has no locks, or
    if the process that holds it is suspended. After waiting for ``patience_s``, this process logs a warning that names
    the holder, and continues without the lock. From then on, each block tries to take the lock only once, without
    waiting, until one succeeds. Threads can share the lock.

    Args:
        path: The lock file, which is created if it does not exist, and never removed.
        patience_s: The longest wait for another process, in seconds. Choose a time longer than the work usually takes.
        mode: The file's permissions if this user creates it.
    """

    def __init__(self, path: Path, patience_s: float, mode: int = 0o600) -> None:
        self._path, self._patience_s, self._mode = path, patience_s, mode
        self._is_stuck = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock while the block runs, unless another process holds it for too long."""
        descriptor = self._open()
        try:
            is_ours = descriptor is not None and self._take(descriptor)
            try:
                yield
            finally:
                if descriptor is not None and is_ours:
                    # Closing the descriptor is not enough: a forked child may have a copy of it.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        try:
            descriptor = os.open(self._path, _FLAGS, self._mode)
        except OSError:
            return None  # The error is reported when the result is written.
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != self._mode:  # Regardless of the umask.
            os.fchmod(descriptor, self._mode)
        return descriptor

    def _take(self, descriptor: int) -> bool:
        num_tries = 1 if self._is_stuck else 1 + int(self._patience_s / POLL_S)
        for tried in range(num_tries):  # Count tries, not time: a clock also runs while this process is suspended.
            if tried:
                time.sleep(POLL_S)  # flock(2) has no timeout.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
                return False
            self._is_stuck = False
            with suppress(OSError):  # On a full disk, the lock works, but does not name its holder.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return True
        if not self._is_stuck:
            self._is_stuck = True
            holder = os.pread(descriptor, 256, 0).decode(errors="replace")
            _log.warning(
                "%s has been locked for more than %g s by another process (%s), which is slow or suspended: this "
                "process (%d) continues without the lock",
                self._path,
                self._patience_s,
                holder if holder.isprintable() and holder else "unknown",
                os.getpid(),
            )
        return False


def is_trusted(status: os.stat_result) -> bool:
    """Return whether a file or a folder belongs to this user or root, and no other user may write to it."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE


def describe_owner(status: os.stat_result) -> str:
    """Return the owner and the mode of a file or a folder as text to append to its name."""
    return f"belongs to {_name_user(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}"


def _name_user(user_id: int) -> str:
    try:
        import pwd

        return f"{pwd.getpwuid(user_id).pw_name} (uid {user_id})"
    except (ImportError, KeyError):
        return f"uid {user_id}"
