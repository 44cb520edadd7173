"""Keep local copies of remote objects, and limit the space that they use. A copy may lack blocks.

A copy is a sparse file: the object's bytes at their own offsets, then, for each 512-byte block, one byte that is 1
if the block is present. Members of tars begin at multiples of 512 bytes, so two samples never share a block. A *sealed*
copy ends with a hash of the whole content.

Bytes are written before they are marked as present, and readers of a removed copy can still read its content. A
process that is killed at any point therefore leaves a correct copy. After a power failure, marks may be on disk without
their content. For this reason, samples are compared with their hashes on each read, and sealed copies are compared with
their hashes when they are opened. Marks of damaged blocks are removed.

A file that another user may have written is not treated as a copy, and is replaced, unless users share the cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from shardio.errors import StoreError
from shardio.files import WorkLock, describe_owner, is_trusted, read_range
from shardio.storage.local import read_range_into
from shardio.storage.locations import CacheSettings
from shardio.storage.store import FileStat

COPY_SUFFIX = ".copy"
"""The suffix of the files that hold copies. Only files with this suffix are removed from the folder."""

LOCK_NAME = ".lock"
"""The name of the lock that a process holds while it removes copies."""

GRANTS = 256
"""The minimum number of grants in a cache. A process reserves space one grant at a time, because each reservation scans
the folder."""

SLACK = 16
"""The number of grants, across all processes, that may be reserved but still unused when copies are removed."""

PATIENCE_S = 10.0
"""The time in seconds to wait while another process makes room. After this time, slightly more than necessary may be
removed."""

MAX_GRANT = 64 * 2**20
"""The maximum size of a grant, in bytes."""

MAX_PRIVATE = 32 * 2**30
"""The maximum default size of a private cache, in bytes."""

SHARE_OF_DISK = 5
"""The free space divided by this number is the default size of a cache."""

BLOCK = 512
"""The size of a block in bytes."""

_PRESENT = b"\1"

_SEAL_BYTES = 16
"""The size of the hash of a sealed copy, xxh3-128."""

_HASH_AT_A_TIME = 2**20

MAX_REPLACED = 10
"""The maximum number of attempts to replace a file that is not a copy."""

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # Opening a FIFO must not block.


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCopy:
    """A copy of an object. The copy's file may not exist yet.

    Attributes:
        path: The copy's path.
        size: The object's size in bytes.
        is_sealed: Whether the copy is sealed, and therefore added as a whole.
        is_shared: Whether users share the copy. Every user who may write to the folder may also write to a shared copy.
    """

    path: str
    size: int
    is_sealed: bool = False
    is_shared: bool = False

    @property
    def num_blocks(self) -> int:
        """The number of blocks. The last block may be shorter."""
        return -(-self.size // BLOCK)

    def read(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes | None]:
        """Return the contents of ranges; None for ranges that are not completely present."""
        with self._opened(os.O_RDONLY) as descriptor:
            return [self._read_range(descriptor, start, stop) for start, stop in zip(starts, stops, strict=True)]

    def read_into(self, start: int, buffer: memoryview) -> bool:
        """Fill a buffer with bytes, beginning at ``start``. Return False if some of the bytes are missing."""
        with self._opened(os.O_RDONLY) as descriptor:
            if descriptor is None or not _is_present(descriptor, self.size, start, start + len(buffer)):
                return False
            return read_range_into(descriptor, start, buffer)

    def _read_range(self, descriptor: int | None, start: int, stop: int) -> bytes | None:
        if start == stop:
            return b""
        if descriptor is None or not _is_present(descriptor, self.size, start, stop):
            return None
        content = read_range(descriptor, start, stop)
        return content if len(content) == stop - start else None

    def has(self, start: int, stop: int) -> bool:
        """Return whether a range is completely present."""
        with self._opened(os.O_RDONLY) as descriptor:
            return descriptor is not None and _is_present(descriptor, self.size, start, stop)

    def find_missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are not present, as ranges of whole blocks."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        marks = np.zeros(last - first, np.uint8)
        with self._opened(os.O_RDONLY) as descriptor:
            if descriptor is not None:
                found = os.pread(descriptor, last - first, self.size + first)
                marks[: len(found)] = np.frombuffer(found, np.uint8)
        bounds = np.flatnonzero(np.diff(marks != ord(_PRESENT), prepend=False, append=False)).reshape(-1, 2) + first
        return [(begin * BLOCK, min(end * BLOCK, self.size)) for begin, end in bounds.tolist()]

    @contextmanager
    def adding(self, start: int, stop: int) -> Iterator[Addition]:
        """Open the copy for the duration of a ``with`` block, to add a range of whole blocks.

        Raises:
            OSError: If the copy cannot be opened.
        """
        assert start % BLOCK == 0, "a range of whole blocks"
        assert stop % BLOCK == 0 or stop == self.size, "a range of whole blocks"
        assert not self.is_sealed or (start, stop) == (0, self.size), "the whole object"
        descriptor = self._create()
        try:
            if os.fstat(descriptor).st_size < self.size + self.num_blocks:
                os.ftruncate(descriptor, self.size + self.num_blocks)
            yield Addition(self, descriptor, start, stop)
        finally:
            os.close(descriptor)

    def is_damaged(self) -> bool:
        """Return whether a sealed copy is complete but does not match its hash."""
        assert self.is_sealed, "only sealed copies have a hash"
        with self._opened(os.O_RDONLY) as descriptor:
            if descriptor is None or not _is_present(descriptor, self.size, 0, self.size):
                return False
            hasher = xxhash.xxh3_128()
            for start in range(0, self.size, _HASH_AT_A_TIME):
                hasher.update(os.pread(descriptor, min(_HASH_AT_A_TIME, self.size - start), start))
            return os.pread(descriptor, _SEAL_BYTES, self.size + self.num_blocks) != hasher.digest()

    def unmark(self, start: int, stop: int) -> bool:
        """Mark a range as missing, because its content is damaged. Return whether the copy exists."""
        with self._opened(os.O_RDWR) as descriptor:
            if descriptor is None:
                return False
            first, last = start // BLOCK, -(-stop // BLOCK)
            _write_all(descriptor, memoryview(bytes(last - first)), self.size + first)
            return True

    def touch(self) -> None:
        """Record that the copy is in use."""
        with suppress(FileNotFoundError, PermissionError):
            os.utime(self.path)

    @contextmanager
    def _opened(self, flags: int) -> Iterator[int | None]:
        # The file is opened for each use: an open descriptor would keep the space of a removed copy in use.
        descriptor = None
        with suppress(FileNotFoundError):
            descriptor = self._open(flags)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self, flags: int) -> int | None:
        """Return the file's descriptor; None if the file is not a copy, or this user may not open it."""
        try:
            descriptor = os.open(self.path, flags | _FLAGS)
        except PermissionError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:  # The path is a symbolic link.
                raise
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and (self.is_shared or is_trusted(status)):
            return descriptor
        os.close(descriptor)
        return None

    def _create(self) -> int:
        for _ in range(MAX_REPLACED):
            with suppress(FileNotFoundError):
                descriptor = self._open(os.O_RDWR)
                if descriptor is not None:
                    return descriptor
                Path(self.path).unlink()
            with suppress(FileExistsError):  # Another process was faster.
                return self._create_new()
        raise FileExistsError(errno.EEXIST, "other processes keep replacing the file", self.path)

    def _create_new(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            if self.is_shared:
                os.fchmod(descriptor, Path(self.path).parent.stat().st_mode & 0o666)
        except BaseException:  # Even Ctrl-C must not leave the descriptor open.
            os.close(descriptor)
            raise
        return descriptor


class Addition:
    """A range of whole blocks that is being added to a copy.

    Args:
        copy: The copy.
        descriptor: The descriptor of the copy's file. The file stays open until the content is marked, because another
            file may take the copy's name in the meantime.
        start: The offset at which the range starts.
        stop: The offset at which the range stops.
    """

    def __init__(self, copy: CachedCopy, descriptor: int, start: int, stop: int) -> None:
        self._copy, self._descriptor, self._start, self._stop = copy, descriptor, start, stop
        self._hasher = xxhash.xxh3_128()

    def write(self, position: int, part: memoryview) -> None:
        """Write a part of the range. The parts of a sealed copy must be written in order.

        Raises:
            OSError: If the part cannot be written.
        """
        assert self._start <= position <= position + len(part) <= self._stop, "a part of the range"
        _write_all(self._descriptor, part, position)
        if self._copy.is_sealed:
            self._hasher.update(part)

    def mark(self) -> None:
        """Mark the range as present after all of it has been written.

        Raises:
            OSError: If the marks cannot be written.
        """
        if self._copy.is_sealed:
            _write_all(self._descriptor, memoryview(self._hasher.digest()), self._copy.size + self._copy.num_blocks)
        first, last = self._start // BLOCK, -(-self._stop // BLOCK)
        _write_all(self._descriptor, memoryview(_PRESENT * (last - first)), self._copy.size + first)


def _is_present(descriptor: int, size: int, start: int, stop: int) -> bool:
    first, num_blocks = start // BLOCK, -(-stop // BLOCK) - start // BLOCK
    return os.pread(descriptor, num_blocks, size + first) == _PRESENT * num_blocks


def _write_all(descriptor: int, content: memoryview, start: int) -> None:
    num_written = 0
    while num_written < len(content):
        num_written += os.pwrite(descriptor, content[num_written:], start + num_written)


def name_copy(found: FileStat, run: str = "") -> str:
    """Return the name of an object's copy. The name is different for each ``run``."""
    text = f"{found.identity}\n{found.version}\n{found.size}" + (f"\n{run}" if run else "")
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogateescape")) + COPY_SUFFIX


class Budget:
    """The folder of a cache, and the space in it that this process may use. Threads share a budget.

    If all users may create files in the configured folder, as in /tmp, the cache uses a subfolder for this user.

    Args:
        settings: The settings of the cache.
        private_folder: The folder of a private cache.

    Attributes:
        folder: The folder.
        max_bytes: The cache's size in bytes.

    Raises:
        StoreError: If users other than this one and root may write to the folder, and the cache is not shared.
        OSError: If the folder cannot be created.
    """

    def __init__(self, settings: CacheSettings, private_folder: Path) -> None:
        self._settings = settings
        self.folder = private_folder if settings.folder is None else Path(settings.folder)
        with suppress(FileNotFoundError):
            is_for_all = self.folder.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH) == stat.S_ISVTX | stat.S_IWOTH
            if is_for_all and not settings.is_shared:
                self.folder /= f"shardio-{os.geteuid()}"
        self.make_folder()
        if settings.max_bytes is not None:
            self.max_bytes = settings.max_bytes
        else:
            share = shutil.disk_usage(self.folder).free // SHARE_OF_DISK
            self.max_bytes = min(share, MAX_PRIVATE) if settings.folder is None else share
        self._room_lock = WorkLock(self.folder / LOCK_NAME, PATIENCE_S, self.file_mode)
        self._grant = max(1, min(self.max_bytes // GRANTS, MAX_GRANT))
        self._lock = threading.Lock()
        self._reserved = 0

    @property
    def file_mode(self) -> int:
        """The permissions of files in the folder. The folder must exist."""
        return self.folder.stat().st_mode & 0o666 if self._settings.is_shared else 0o600

    def make_folder(self) -> None:
        """Create the folder so that only this user may write to it, or check an existing folder.

        Other users lose write access to an existing folder if it belongs to this user and holds only a cache.

        Raises:
            StoreError: If users other than this one and root may write to the folder, and the cache is not shared.
            OSError: If the folder cannot be created.
        """
        folder = self.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if self._settings.is_shared or is_trusted(status):
            return
        if status.st_uid == os.geteuid() and all(
            path.name.endswith(COPY_SUFFIX) or path.name.startswith(LOCK_NAME) for path in folder.iterdir()
        ):
            folder.chmod(stat.S_IMODE(status.st_mode) & 0o755)  # Some systems let a group write to new folders.
        else:
            raise StoreError(
                f"the cache {folder} {describe_owner(status)}: other users can put data into it, and this data would "
                "be read as if it were yours. Choose a folder of your own, remove others' write access (chmod go-w) "
                "or, if you trust all users who can write to it, set cache_shared=True (--cache-shared)"
            )

    def reserve(self, num_bytes: int, in_use: str) -> None:
        """Reserve space for bytes that are about to be written. Remove copies if there is not enough space.

        Args:
            num_bytes: The number of bytes.
            in_use: The path of the growing copy, which is not removed.
        """
        with self._lock:
            if self._reserved < num_bytes:
                wanted = max(num_bytes - self._reserved, self._grant)
                with self._room_lock.held():
                    self._make_room(wanted, in_use)
                self._reserved += wanted
            self._reserved -= num_bytes

    def _make_room(self, num_bytes: int, in_use: str) -> None:
        copies = _list_copies(self.folder)
        used = sum(size for _, size, _ in copies)
        if used + num_bytes <= self.max_bytes - SLACK * self._grant:
            return
        # Remove slightly more than necessary: otherwise, every grant would have to remove copies.
        limit = self.max_bytes - 2 * SLACK * self._grant - num_bytes
        for _, size, path in sorted(copies):
            if used <= limit:
                return
            if path != in_use:
                with suppress(PermissionError):  # In some shared folders, users may remove only their own files.
                    with suppress(FileNotFoundError):
                        os.unlink(path)  # noqa: PTH108  # Creating a Path for each copy would double the time.
                    used -= size


def _list_copies(folder: Path) -> list[tuple[int, int, str]]:
    """Return the time of each copy's last use in nanoseconds, its space on disk in bytes, and its path."""
    found = list[tuple[int, int, str]]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(COPY_SUFFIX):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_blocks * 512, entry.path))
    return found
