"""The local copies of remote objects, some of whose blocks may be missing.

A copy is a sparse file: the object's bytes at their own offsets, then one byte for each block of 512 bytes, which is 1
if the block is present. Members of tars begin at multiples of 512 bytes, so samples share no block. A *sealed* copy
ends with a hash of the whole content.

Bytes are written before they are marked, and readers of a copy that is removed keep its content. So a process that is
killed at any point leaves a correct copy. After a power failure, marks may be on disk without their content. So samples
are compared with their hashes each time they are read, and sealed copies are compared with theirs when they are opened.
Damaged blocks are unmarked.

A file that another user may have written is not a copy, unless users share the cache. It is replaced.

One file for each of a million images would make every scan of the cache's folder slow. So the files of a listing are
put into bundles of neighbours by key. In a bundle, each file begins at a multiple of 512 bytes. A hash of its content
follows, because a listing, unlike the index of a shard, has no hashes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.files import is_trusted
from shardio.storage.listing import Listing
from shardio.storage.options import COPY_SUFFIX

BLOCK = 512
"""The size of a block in bytes."""

MEAN_BYTES = 16 * 2**20
"""The mean size of a bundle in bytes: a million images of 100 kB need 6,000. The cache removes whole bundles."""

HASH_BYTES = 16
"""The size of the hash, xxh3-128, that follows each content in a bundle."""

_PRESENT = b"\1"

_SEAL_BYTES = 16
"""The size of the hash of a sealed copy, xxh3-128."""

_HASH_AT_A_TIME = 2**20

MAX_REPLACED = 10
"""The number of times that a file that is not a copy is replaced before it counts as an error."""

Size = TypeVar("Size", int, NDArray[np.int64])

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO must not block.


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCopy:
    """The name of a copy, which may not exist yet.

    Attributes:
        path: Its path.
        size: The object's size in bytes.
        is_sealed: Whether it is sealed. It is then added as a whole.
        is_shared: Whether users share it. Everyone who may write to its folder may then write to it.
    """

    path: str
    size: int
    is_sealed: bool = False
    is_shared: bool = False

    @property
    def num_blocks(self) -> int:
        """The number of blocks. The last one may be shorter."""
        return -(-self.size // BLOCK)

    def read(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes | None]:
        """Return the contents of ranges; None for those that are not present as a whole."""
        with self._opened(os.O_RDONLY) as descriptor:
            if descriptor is None:
                return [b"" if start == stop else None for start, stop in zip(starts, stops, strict=True)]
            return [_read_range(descriptor, self.size, start, stop) for start, stop in zip(starts, stops, strict=True)]

    def read_into(self, start: int, buffer: memoryview) -> bool:
        """Fill a buffer with the bytes from ``start`` on; return False if they are not present as a whole."""
        with self._opened(os.O_RDONLY) as descriptor:
            if descriptor is None or not _is_present(descriptor, self.size, start, start + len(buffer)):
                return False
            num_read = 0
            while num_read < len(buffer):
                num_more = os.preadv(descriptor, [buffer[num_read:]], start + num_read)
                if not num_more:
                    return False
                num_read += num_more
            return True

    def has(self, start: int, stop: int) -> bool:
        """Return whether a range is present as a whole."""
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

    def write(self, start: int, *parts: memoryview) -> None:
        """Add a range of whole blocks, and mark it as present.

        Args:
            start: The offset of the range.
            *parts: Its content, in parts of any length.

        Raises:
            OSError: If it cannot be written.
        """
        with self.adding(start, start + sum(map(len, parts))) as addition:
            for part in parts:
                addition.write(start, part)
                start += len(part)
            addition.mark()

    @contextmanager
    def adding(self, start: int, stop: int) -> Iterator[Addition]:
        """Open the copy for the duration of a ``with`` block, to add a range of whole blocks.

        Raises:
            OSError: If the copy cannot be opened.
        """
        assert start % BLOCK == 0, "a range of whole blocks"
        assert stop % BLOCK == 0 or stop == self.size, "a range of whole blocks"
        assert not self.is_sealed or (start, stop) == (0, self.size), "all of it"
        with self._opened(os.O_RDWR, creates=True) as descriptor:
            assert descriptor is not None, "it was created"
            if os.fstat(descriptor).st_size < self.size + self.num_blocks:
                os.ftruncate(descriptor, self.size + self.num_blocks)
            yield Addition(self, descriptor, start, stop)

    def is_damaged(self) -> bool:
        """Return whether a sealed copy is present as a whole, but does not have the hash that it was sealed with."""
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
    def _opened(self, flags: int, *, creates: bool = False) -> Iterator[int | None]:
        # The file is opened for each use: an open descriptor would keep the space of a copy that was removed.
        descriptor = None
        if creates:
            descriptor = self._create()
        else:
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
            if error.errno != errno.ELOOP:  # A symbolic link.
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
        except BaseException:  # Ctrl-C must not leave the descriptor open either.
            os.close(descriptor)
            raise
        return descriptor


class Addition:
    """A range of whole blocks that is being added to a copy.

    Args:
        copy: The copy.
        descriptor: The descriptor of its file. It stays open until the content is marked, because a copy of the same
            name may be another file by then.
        start: The start of the range.
        stop: Its stop.
    """

    def __init__(self, copy: CachedCopy, descriptor: int, start: int, stop: int) -> None:
        self._copy, self._descriptor, self._start, self._stop = copy, descriptor, start, stop
        self._hasher = xxhash.xxh3_128()

    def write(self, position: int, part: memoryview) -> None:
        """Write a part of the range. Parts of a sealed copy come in order.

        Raises:
            OSError: If it cannot be written.
        """
        assert self._start <= position <= position + len(part) <= self._stop, "a part of the range"
        _write_all(self._descriptor, part, position)
        if self._copy.is_sealed:
            self._hasher.update(part)

    def mark(self) -> None:
        """Mark the range as present, after all of it was written.

        Raises:
            OSError: If that cannot be written.
        """
        if self._copy.is_sealed:
            _write_all(self._descriptor, memoryview(self._hasher.digest()), self._copy.size + self._copy.num_blocks)
        first, last = self._start // BLOCK, -(-self._stop // BLOCK)
        _write_all(self._descriptor, memoryview(_PRESENT * (last - first)), self._copy.size + first)


def _read_range(descriptor: int, size: int, start: int, stop: int) -> bytes | None:
    if start == stop:
        return b""
    if not _is_present(descriptor, size, start, stop):
        return None
    content = os.pread(descriptor, stop - start, start)
    while len(content) < stop - start:  # A single read on Linux returns at most 2 GiB.
        more = os.pread(descriptor, stop - start - len(content), start + len(content))
        if not more:
            return None
        content += more
    return content


def _is_present(descriptor: int, size: int, start: int, stop: int) -> bool:
    first, num_blocks = start // BLOCK, -(-stop // BLOCK) - start // BLOCK
    return os.pread(descriptor, num_blocks, size + first) == _PRESENT * num_blocks


def _write_all(descriptor: int, content: memoryview, start: int) -> None:
    num_written = 0
    while num_written < len(content):
        num_written += os.pwrite(descriptor, content[num_written:], start + num_written)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundles:
    """The places of the n files of a listing in m bundles.

    Attributes:
        numbers: int32 [n], the bundle of each file.
        starts: int64 [n], the offset of each file in its bundle.
        sizes: int64 [m], the size of each bundle in bytes.
        names: The names of the bundles in the cache's folder. They depend on what the bundles contain.
    """

    numbers: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: list[str]


def cut_bundles(listing: Listing) -> Bundles:
    """Cut the files of a listing into bundles.

    The hash of a file's key decides whether a bundle ends there, so a file that is added or replaced changes only its
    own bundle (content-defined chunking: Muthitacharoen et al., A Low-Bandwidth Network File System, 2001).
    """
    spans = size_in_bundle(listing.sizes)  # [n]
    is_last = listing.hashes.astype(np.float64) < spans * (2.0**64 / MEAN_BYTES)
    is_last[-1:] = True
    stops = np.cumsum(spans)
    lasts = np.flatnonzero(is_last)  # [m]
    numbers = np.zeros(len(listing), np.int32)
    numbers[1:] = np.cumsum(is_last[:-1])
    begins = np.concatenate([[0], stops[lasts][:-1]]).astype(np.int64)[: len(lasts)]
    return Bundles(
        numbers=numbers,
        starts=stops - spans - begins[numbers],
        sizes=stops[lasts] - begins,
        names=_name_bundles(listing, lasts),
    )


def size_in_bundle(size: Size) -> Size:
    """Return the number of bytes that a content of a size takes in a bundle. Accept one size or an array of sizes."""
    return -(-(size + HASH_BYTES) // BLOCK) * BLOCK


def make_tail(content: bytes | memoryview) -> bytes:
    """Return the bytes that follow a content in a bundle: its hash, and zeros up to the end of the block."""
    return hash_content(content) + bytes(-(len(content) + HASH_BYTES) % BLOCK)


def hash_content(content: bytes | memoryview) -> bytes:
    """Return the hash of a content."""
    return xxhash.xxh3_128_digest(content)


def _name_bundles(listing: Listing, lasts: NDArray[np.int64]) -> list[str]:
    names, start = list[str](), 0
    prefix, sizes = listing.folder.store.prefix, listing.sizes.tolist()
    for last in lasts.tolist():
        stop = last + 1
        files = zip(listing.keys[start:stop], sizes[start:stop], listing.versions[start:stop], strict=True)
        text = "\n".join([prefix, *(f"{key}\t{size}\t{version}" for key, size, version in files)])
        names.append(xxhash.xxh3_128_hexdigest(text.encode(errors="surrogateescape")) + COPY_SUFFIX)
        start = stop
    return names
