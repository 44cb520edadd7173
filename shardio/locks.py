"""Locks between processes that save work. No process waits for one without an end."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.05
"""How often to try to take a lock, in seconds."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO must not block.

_log = logging.getLogger("shardio")


class WorkLock:
    """A lock in a file, between processes that would otherwise do the same work at the same time.

    No result may depend on it, because it does not hold in two cases: the file system has no locks, or the process that
    holds it is suspended. After waiting for ``patience_s``, this process logs a warning that names the holder, and goes
    on without the lock. From then on, it waits no more until it could take the lock again. Threads can share it.

    Args:
        path: The file. It is created, and stays.
        patience_s: How long to wait for another process, in seconds: longer than the work usually takes.
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
                if descriptor is not None and is_ours:  # Explicitly, because a forked child may have it, too.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        """Return the file's descriptor; None if it cannot be created: what fails then is to write the result."""
        try:
            descriptor = os.open(self._path, _FLAGS, self._mode)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != self._mode:  # Whatever the umask is.
            os.fchmod(descriptor, self._mode)
        return descriptor

    def _take(self, descriptor: int) -> bool:
        """Take the lock. Return whether this process holds it."""
        num_tries = 1 if self._is_stuck else 1 + int(self._patience_s / POLL_S)
        for tried in range(num_tries):  # Counted, so that the time while this process is suspended is not.
            if tried:
                time.sleep(POLL_S)  # A lock cannot be awaited for a limited time.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
                return False
            self._is_stuck = False
            with suppress(OSError):  # On a full disk, the lock holds although its holder is not named.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return True
        if not self._is_stuck:
            self._is_stuck = True
            holder = os.pread(descriptor, 256, 0).decode(errors="replace")
            _log.warning(
                "%s has been locked for more than %g s by another process (%s), which is slow or suspended: this "
                "process (%d) goes on without the lock",
                self._path,
                self._patience_s,
                holder if holder.isprintable() and holder else "unknown",
                os.getpid(),
            )
        return False
