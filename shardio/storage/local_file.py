"""Positioned reads of a local file, within the process's descriptor budget."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from stat import S_ISDIR, S_ISREG

import numpy as np
from numpy.typing import NDArray

from shardio.storage.descriptors import Descriptor, open_files
from shardio.storage.runs import RunLimits, read_runs
from shardio.storage.store import FileStat, Location, ReplacedError

LIMITS = RunLimits(max_gap=4096, max_small=16 * 1024, max_run=2**20)
"""Reading a gap of a page costs as much as another call. Copying a range of more than 16 kB from a run costs more than
a separate call. A run of more than a megabyte would leave the processor's caches before it is split."""


class LocalFile:
    """A local file that is open for positioned reads. It can be shared between threads and across a fork.

    Its descriptor counts against the process's budget (:mod:`shardio.storage.descriptors`), so it may be closed between
    reads and reopened. Only reopening checks whether the file has changed. Until then, reads of a replaced file return
    the old content, and a file that is overwritten in place goes unnoticed.

    Raises:
        OSError: If the file cannot be opened, or is not a regular file.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._key = key = location.key
        self._files = open_files()
        self._serial = next(self._files.serials)
        self._is_open = True
        descriptor = self._files.open(self._serial, key)  # Held, because another thread may close it for the budget.
        status = os.fstat(descriptor.number)
        try:
            refuse_other_kinds(key, status)
        except OSError:
            self.close()
            raise
        found = stat_of(status)
        self.size, self.version, self._mtime_ns = found.size, found.version, status.st_mtime_ns

    @property
    def is_local(self) -> bool:
        return True

    def read(self, start: int, stop: int) -> bytes:
        descriptor = self._find()
        content = os.pread(descriptor.number, stop - start, start)
        while len(content) < stop - start:  # A single read on Linux returns at most 2 GiB.
            more = os.pread(descriptor.number, stop - start - len(content), start + len(content))
            if not more:
                raise self._truncated(descriptor, start, stop)
            content += more
        return content

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return read_runs(self._read_all, starts, stops, LIMITS)

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for start, buffer in zip(starts, buffers, strict=True):
            descriptor, num_read = self._find(), 0
            while num_read < len(buffer):
                num_more = os.preadv(descriptor.number, [buffer[num_read:]], start + num_read)
                if not num_more:
                    raise self._truncated(descriptor, start, start + len(buffer))
                num_read += num_more

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        pass

    def discard(self, start: int, stop: int) -> bool:
        return False

    def close(self) -> None:
        self._is_open = False
        self._files.close(self._serial)

    def _read_all(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        return list(map(self.read, starts, stops))

    def _find(self) -> Descriptor:
        """Return the descriptor. Reopen the file if its descriptor was closed to stay within the budget."""
        assert self._is_open, f"{self._key} is closed"
        return self._files.find(self._serial) or self._open_again()

    def _open_again(self) -> Descriptor:
        descriptor = self._files.open(self._serial, self._key)
        found = os.fstat(descriptor.number)
        # The inode is not compared: some FUSE file systems change it while they are mounted.
        if (found.st_size, found.st_mtime_ns) != (self.size, self._mtime_ns):
            self._files.close(self._serial)
            raise ReplacedError(
                f"{self._key} changed while it was in use: expected {self.size} bytes and modification time "
                f"{self._mtime_ns} ns, got {found.st_size} bytes and {found.st_mtime_ns} ns. Restart with the current "
                "files"
            )
        return descriptor

    def _truncated(self, descriptor: Descriptor, start: int, stop: int) -> EOFError:
        size = os.fstat(descriptor.number).st_size
        return EOFError(
            f"{self._key} ends at byte {size}, but bytes {start} to {stop} were requested: the file is truncated. "
            "Restore it"
        )

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_serial"):
            self.close()


def refuse_other_kinds(key: str, status: os.stat_result) -> None:
    """Raise IsADirectoryError for a directory, and FileNotFoundError for a pipe, a device or a socket."""
    if S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
    if not S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "Not a regular file", key)


def stat_of(status: os.stat_result) -> FileStat:
    """Convert the operating system's status of a file to a FileStat."""
    return FileStat(
        size=status.st_size,
        version=make_version(status.st_size, status.st_mtime_ns, status.st_ino),
        identity=f"{status.st_dev}-{status.st_ino}",
    )


def make_version(size: int, mtime_ns: int, inode: int) -> str:
    """Return a local file's version, as in :class:`FileStat`."""
    return f"{size}-{mtime_ns}-{inode}"
