"""Access the local file system as a store. A budget limits the number of file descriptors that stay open."""

from __future__ import annotations

import errno
import itertools
import operator
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardio.files import Descriptor, create_whole, find_target, read_range, write_whole
from shardio.storage.store import FileStat, Location, ReplacedError, RunLimits, Store, StoredFile, ends_early, read_runs

MAX_DESCRIPTORS = 128
"""The maximum number of descriptors to keep open."""

LEFT_FOR_OTHERS = 4
"""The process's limit divided by this number is the budget. torch's workers, user code and libraries need the rest."""

LEFT_BY_REQUESTS = 28
"""The number of descriptors that a storage process needs in addition to those for its requests."""

PER_REQUEST = 2
"""The number of descriptors of a request: its connection, and the cached copy that the request fills."""

LIMITS = RunLimits(max_gap=4096, max_small=16 * 1024, max_run=2**20)
"""Reading a gap of one page costs as much as another call. Copying a range of more than 16 kB out of a run costs more
than a separate call. A run of more than a megabyte would be evicted from the processor's caches before it is split."""


def descriptor_budget() -> int:
    """Return the maximum number of descriptors to keep open under the process's current limit."""
    limit = _find_limit()
    return MAX_DESCRIPTORS if limit is None else max(2, min(MAX_DESCRIPTORS, limit // LEFT_FOR_OTHERS))


def bound_requests(max_requests: int) -> int:
    """Return the number of requests that a storage process may make at a time under its current limit."""
    limit = _find_limit()
    return max_requests if limit is None else max(1, min(max_requests, (limit - LEFT_BY_REQUESTS) // PER_REQUEST))


def _find_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


class OpenFiles:
    """The open descriptors by their files' serial numbers, least recently used first.

    There is no lock, because a forked child or a finalizer could find it held. Each dictionary operation is atomic.
    Threads that open files at the same time may exceed the budget by one descriptor each, until the next file is
    opened.
    """

    def __init__(self) -> None:
        self._descriptors: OrderedDict[int, Descriptor] = OrderedDict()
        self.serials = itertools.count()

    def find(self, serial: int) -> Descriptor | None:
        """Return a file's descriptor, or None if the file is not open."""
        descriptor = self._descriptors.get(serial)
        if descriptor is not None:
            with suppress(KeyError):  # Another thread has closed the file.
                self._descriptors.move_to_end(serial)
        return descriptor

    def open(self, serial: int, path: str) -> Descriptor:
        """Open a file. Close the least recently used files if too many are open."""
        self._shrink(descriptor_budget() - 1)
        try:
            descriptor = Descriptor(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._shrink(0)  # Other parts of the process have used up the limit: keep only this file open.
            descriptor = Descriptor(path)
        self._descriptors[serial] = descriptor
        return descriptor

    def close(self, serial: int) -> None:
        """Close a file as soon as no thread is reading it."""
        self._descriptors.pop(serial, None)

    def _shrink(self, num_kept: int) -> None:
        with suppress(KeyError):  # Other threads may have closed the last file.
            while len(self._descriptors) > num_kept:
                self._descriptors.popitem(last=False)


@cache
def open_files() -> OpenFiles:
    """Return this process's open files."""
    return OpenFiles()


class LocalFile(StoredFile):
    """A local file that is open for positioned reads, and can be shared between threads and across a fork.

    The file's descriptor counts against the process's budget, so the descriptor may be closed between reads and
    reopened. The file is checked for changes only when it is reopened. Until then, reads of a replaced file return the
    old content, and changes in place are not detected.

    Raises:
        OSError: If the file cannot be opened, or is not a regular file.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._key = key = location.key
        self._files = open_files()
        self._serial = next(self._files.serials)
        self._is_open = True
        descriptor = self._files.open(self._serial, key)  # Keep a reference: other threads may close the file.
        status = os.fstat(descriptor.number)
        try:
            refuse_other_kinds(key, status)
        except OSError:
            self.close()
            raise
        found = stat_of(status)
        self.size, self.version, self._mtime_ns = found.size, found.version, status.st_mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        descriptor = self._find()
        content = read_range(descriptor.number, start, stop)
        if len(content) < stop - start:
            raise self._truncated(descriptor, start, stop)
        return content

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return read_runs(self.read_apart, starts, stops, LIMITS)

    def read_apart(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        descriptor = self._find()
        sizes = list(map(operator.sub, stops, starts))
        contents = list(map(os.pread, itertools.repeat(descriptor.number), sizes, starts))
        if list(map(len, contents)) != sizes:  # A single read on Linux returns at most 2 GiB.
            contents = [self.read(start, stop) for start, stop in zip(starts, stops, strict=True)]
        return contents

    def read_integers(self, starts: Sequence[int]) -> NDArray[np.int64]:
        descriptor = self._find()
        content = b"".join([os.pread(descriptor.number, 8, start) for start in starts])
        if len(content) < 8 * len(starts):
            raise self._truncated(descriptor, max(starts), max(starts) + 8)
        return np.frombuffer(content, "<i8")

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for start, buffer in zip(starts, buffers, strict=True):
            descriptor = self._find()
            if not read_range_into(descriptor.number, start, buffer):
                raise self._truncated(descriptor, start, start + len(buffer))

    def hold(self) -> Descriptor:
        return self._find()

    def close(self) -> None:
        self._is_open = False
        self._files.close(self._serial)

    def _find(self) -> Descriptor:
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
        return ends_early(self.location, os.fstat(descriptor.number).st_size, start, stop)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_serial"):
            self.close()


def read_range_into(descriptor: int, start: int, buffer: memoryview) -> bool:
    """Fill a buffer with the bytes of an open file, beginning at ``start``. Return False if there are too few bytes."""
    num_read = 0
    while num_read < len(buffer):
        num_more = os.preadv(descriptor, [buffer[num_read:]], start + num_read)
        if not num_more:
            return False
        num_read += num_more
    return True


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


@dataclass(frozen=True, slots=True)
class LocalStore(Store):
    """The local file system. Keys are absolute paths."""

    @property
    def prefix(self) -> str:
        return ""

    @property
    def is_local(self) -> bool:
        return True

    def stat(self, key: str) -> FileStat:
        status = os.stat(key)  # noqa: PTH116  # Creating a Path would double the time.
        refuse_other_kinds(key, status)
        return stat_of(status)

    def open(self, key: str, *, whole: bool = False) -> LocalFile:
        return LocalFile(Location(store=self, key=key))

    def read_whole(self, key: str) -> bytes:
        with open(key, "rb", buffering=0) as file:  # noqa: PTH123  # Creating a Path would double the time.
            return file.readall()

    def is_folder(self, key: str) -> bool:
        return Path(key).is_dir()

    def list(self, key: str) -> list[str]:
        try:
            with os.scandir(key) as entries:
                names = [entry.name + "/" if _is_directory(entry) else entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if find_target(name) is None)  # Unfinished files are not objects yet.

    def walk(self, key: str) -> Iterator[str]:
        """Yield the paths of all files below a directory: see :func:`walk_files`."""
        return _walk_files(str(Path(key)), frozenset()) if self.is_folder(key) else iter(())

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        return ((path, self.stat(path)) for path in self.walk(key))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[BinaryIO]:
        path = Path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(path) as file:
            yield file

    def create(self, key: str, content: bytes) -> bool:
        path = Path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return create_whole(path, content) or self.read_whole(key) == content

    def remove(self, key: str) -> None:
        Path(key).unlink(missing_ok=True)

    def can_write(self, key: str) -> bool:
        return os.access(Path(key).parent, os.W_OK)

    def resolve(self, key: str) -> str:
        return str(Path(key).resolve())


def find_path(location: Location) -> Path | None:
    """Return the path of a location in the local file system; None for a location in another store."""
    return Path(location.key) if isinstance(location.store, LocalStore) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """The files directly in a folder, sorted by name.

    Attributes:
        path: The folder's path relative to the root of the walk, with slashes; "" for the root.
        names: The files' names.
        sizes: int64 [n], their sizes in bytes; -1 for a broken link.
        mtimes_ns: int64 [n], their modification times in nanoseconds.
    """

    path: str
    names: list[str]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]


def walk_folders(root: Path) -> Iterator[FolderFiles]:
    """Yield a directory and all folders below it, each with its files, as :func:`walk_files` finds them."""
    folders = [("", frozenset[str]())]
    while folders:
        path, holders = folders.pop()
        files = list[tuple[str, int, int]]()
        inner = list[tuple[str, frozenset[str]]]()
        for entry in _list_visible(root / path, holders):
            if entry.is_file(follow_symlinks=False):  # Nearly always.
                status = entry.stat(follow_symlinks=False)
                files.append((entry.name, status.st_size, status.st_mtime_ns))
            elif _is_directory(entry):
                inner_path = f"{path}/{entry.name}" if path else entry.name
                inner.append((inner_path, holders | {os.path.realpath(root / path)}))
            elif (found := _stat_file(entry)) is not None:
                files.append((entry.name, *found))
        folders += reversed(inner)
        yield FolderFiles(
            path=path,
            names=[name for name, _, _ in files],
            sizes=np.array([size for _, size, _ in files], np.int64),
            mtimes_ns=np.array([mtime for _, _, mtime in files], np.int64),
        )


def walk_files(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory except hidden ones, sorted within each directory.

    Hidden directories are skipped. Symbolic links are followed, and broken links are yielded.

    Raises:
        OSError: If a directory cannot be read, or a symbolic link points to a directory that contains it.
    """
    return map(Path, _walk_files(str(directory), frozenset()))


def _walk_files(directory: str, holders: frozenset[str]) -> Iterator[str]:
    start = "" if directory == "." else directory.rstrip("/") + "/"
    for entry in _list_visible(directory, holders):
        if entry.is_file(follow_symlinks=False):  # Nearly always.
            yield start + entry.name
        elif _is_directory(entry):
            yield from _walk_files(start + entry.name, holders | {os.path.realpath(directory)})
        elif _is_broken_link(entry) or entry.is_file():
            yield start + entry.name


def _list_visible(directory: str | Path, holders: frozenset[str]) -> list[os.DirEntry[str]]:
    if holders and os.path.realpath(directory) in holders:
        raise OSError(f"{directory} is a symbolic link to a directory that contains it: remove the link")
    with os.scandir(directory) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _stat_file(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    """Return a file's size and modification time, both -1 for a broken link; None for a pipe, a socket or a device."""
    if _is_broken_link(entry):
        return -1, -1
    if not entry.is_file():
        return None
    status = entry.stat()
    return status.st_size, status.st_mtime_ns


def _is_broken_link(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110  # A Path is slower.


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory or a link to a directory; False for a broken or circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_and_stat(path: str, start: int, stop: int) -> tuple[bytes, os.stat_result]:
    """Return bytes [start, stop) of a local file, or fewer if the file is shorter, and its status after the read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_range(descriptor, start, stop), os.fstat(descriptor)
    finally:
        os.close(descriptor)
