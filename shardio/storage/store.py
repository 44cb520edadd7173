"""Define the interface of storage backends, and functions for paths, URLs, and reads in pieces and runs.

To add a backend, implement :class:`Store` and :class:`StoredFile` in a new file, and add a line to the table
:data:`shardio.storage.locations.OPENERS`. Test the backend with :class:`shardio.testing.store.StoreTests`.
"""

from __future__ import annotations

import mmap
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.files import Descriptor

# A Path keeps only one of the slashes after a URL's colon. A single letter before the colon is a Windows drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)

_WITH_AUTHORITY = frozenset(("s3", "gs", "az", "http", "https", "hf", "memory"))
"""The schemes whose URLs name a host or a bucket after two slashes (RFC 3986, 3.2): a third slash is a typo."""


def make_path(name: str | os.PathLike[str]) -> Path:
    """Return the path for a name. If the locale cannot encode the name, the path consists of the name's UTF-8 bytes.

    Raises:
        ValueError: If the name is empty, which a Path treats as the working directory, or contains a NUL character.
    """
    text = os.fspath(name)
    if not text:
        raise ValueError("the path is empty: pass a file or a directory, or '.' for the working directory")
    if "\0" in text:
        raise ValueError(f"the path {text!r} contains a NUL character, which file names cannot contain")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))
    return Path(text)


def absolute_path(path: Path) -> Path:
    """Return an absolute path, which stays valid when the working directory changes or is removed.

    Raises:
        FileNotFoundError: If the path is relative and the working directory does not exist.
    """
    if path.is_absolute():
        return path
    # The operating system resolves links in the working directory's path, so dropping its last part yields the parent.
    here, parts = Path.cwd(), path.parts
    while parts[:1] == ("..",):
        here, parts = here.parent, parts[1:]
    return here.joinpath(*parts)


def find_url(name: str | os.PathLike[str]) -> str | None:
    """Return a name's URL, even if the name has passed through a Path. Return None if the name is a path.

    In a Path, ``zip:///a`` and ``zip://a`` are the same, so pass a URL with three slashes as a string.

    >>> find_url("s3:/bucket/images")
    's3://bucket/images'
    >>> find_url("s3:///bucket/images")
    's3://bucket/images'
    >>> find_url("zip:///data/images.zip")
    'zip:///data/images.zip'
    >>> find_url("images")
    """
    if (match := _URL.fullmatch(os.fspath(name))) is None:
        return None
    scheme, slashes, rest = match.groups()
    keeps = len(slashes) > 2 and scheme.lower() not in _WITH_AUTHORITY
    return f"{scheme}:{slashes if keeps else '//'}{rest}"


def read_as_utf8(name: str) -> str:
    """Decode the bytes of a file's name as UTF-8 in any locale. Invalid bytes stay escaped."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")


class ReplacedError(FormatError):
    """An object was changed or replaced after it was opened."""


UNVERSIONED = "unversioned"
"""The suffix of an object's version if the store knows only the object's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """An object's status, which a store can return without reading the object.

    Attributes:
        size: The object's size in bytes.
        version: A string that changes when the content changes (an ETag, or size, modification time and inode). The
            version may also change when the content does not.
        identity: A string that is the same for all keys of one object, such as the paths of a file and of links to it.
    """

    size: int
    version: str
    identity: str


class Writer(Protocol):
    """The destination of a new object's content."""

    def write(self, content: bytes | memoryview, /) -> object:
        """Append to the object. The caller may change ``content`` afterwards."""


class StoredFile(Protocol):
    """An object that is open for reading at any position. It can be shared between threads and across a fork.

    Reads return the content that the object had when it was opened, as far as the store can detect changes. A subclass
    may override the methods that are not abstract.

    Attributes:
        location: The object's location.
        size: The object's size in bytes when it was opened.
        version: The object's version when it was opened, as in :class:`FileStat`.
        is_fetched_in_parts: Whether the object is read through a cache that fetches only the parts that are read.
    """

    location: Location
    size: int
    version: str
    is_fetched_in_parts: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the object is a local file. Its content need not be checked again after one correct read."""
        return self.location.store.is_local

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop).

        Raises:
            EOFError: If the object ends before ``stop``.
            ReplacedError: If the object changed after it was opened.
            OSError: If the object cannot be read.
        """

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        """Return the contents of many ranges. The store may combine the ranges into fewer requests.

        Args:
            starts: int64 [n], the starts of the ranges, in any order. Ranges may overlap.
            stops: int64 [n], their stops.

        Raises:
            The same errors as :meth:`read`.
        """
        return [self.read(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def read_apart(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Return the contents of ranges. The caller has joined ranges where that speeds up reading a local file.

        Raises:
            The same errors as :meth:`read`.
        """
        return self.read_many(np.array(starts, np.int64), np.array(stops, np.int64))

    def read_integers(self, starts: Sequence[int]) -> NDArray[np.int64]:
        """Return the 8-byte little-endian integer at each start, int64 [n].

        Raises:
            The same errors as :meth:`read`.
        """
        begins = np.array(starts, np.int64)
        return np.frombuffer(b"".join(self.read_many(begins, begins + 8)), "<i8")

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with the bytes that begin at its start position.

        Raises:
            The same errors as :meth:`read`. After an error, the buffers' contents are undefined.
        """
        stops = [start + len(buffer) for start, buffer in zip(starts, buffers, strict=True)]
        contents = self.read_many(np.array(starts, np.int64), np.array(stops, np.int64))
        for buffer, content in zip(buffers, contents, strict=True):
            buffer[:] = content

    def hold(self) -> Descriptor | None:
        """Return the descriptor of a local file, for later reads that do not detect changes; None for other objects."""
        return None

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges, given by start and stop, into the store's cache, if any; return when they are there."""
        return

    def discard(self, start: int, stop: int) -> bool:
        """Remove a damaged range from the cache, if there is a cache. Return whether another read may succeed."""
        return not self.is_local  # The range may have been damaged in transit.

    def close(self) -> None:
        """Close the object. Closing a closed object does nothing."""
        return


def ends_early(location: Location, size: int, start: int, stop: int) -> EOFError:
    """Return the error that :meth:`StoredFile.read` raises for an object that ends before the requested range does."""
    kind = "file" if location.store.is_local else "object"
    return EOFError(
        f"{location} ends at byte {size}, but bytes {start} to {stop} were requested: the {kind} is truncated. "
        "Restore it"
    )


class Store(Protocol):
    """A storage backend, which stores objects by key. Keys are strings whose parts are separated by slashes.

    A store is a frozen value that can be compared, hashed and pickled. Its objects must be readable in every
    process. A folder is a key prefix that ends before a slash; it need not be created. Methods that read an object
    raise FileNotFoundError if the object does not exist. These methods raise NotADirectoryError or
    FileNotFoundError if a parent of the key is an object, and IsADirectoryError or FileNotFoundError if the key
    names a folder. In a read-only store, the methods that write raise LocationError, and ``can_write`` returns
    False. A subclass may override the methods that are not abstract.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def prefix(self) -> str:
        """The text that precedes a key in messages, such as ``s3://bucket/``."""

    @property
    def is_local(self) -> bool:
        """Whether objects are local files. Other content is checked at every read: each transfer may damage it."""
        return False

    @property
    def cache_bytes(self) -> int | None:
        """The size in bytes of the cache through which open objects are read; None if the store has no cache."""
        return None

    @abstractmethod
    def stat(self, key: str) -> FileStat:
        """Return an object's size, version and identity."""

    @abstractmethod
    def open(self, key: str, *, whole: bool = False) -> StoredFile:
        """Open an object.

        Args:
            key: The object's key.
            whole: Whether a cache fetches the whole object when a part is read, and compares it with its ETag. A
                store may ignore this for a large object.
        """

    def read_whole(self, key: str) -> bytes:
        """Return an object's content."""
        with closing(self.open(key, whole=True)) as file:
            return file.read(0, file.size)

    def is_folder(self, key: str) -> bool:
        """Return whether a key names a folder."""
        return bool(self.list(key))

    @abstractmethod
    def list(self, key: str) -> list[str]:
        """Return the names of the objects and folders directly in a folder, sorted. Folder names end with a slash.

        The list is empty if the folder does not exist.
        """

    def walk(self, key: str) -> Iterator[str]:
        """Yield the keys of all objects below a folder, in any order. Names that start with a dot are skipped."""
        return (found for found, _ in self.walk_stats(key))

    @abstractmethod
    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        """Yield the key and the status of each object below a folder, as :meth:`walk` and :meth:`stat` return them."""

    @abstractmethod
    def write_whole(self, key: str) -> AbstractContextManager[Writer]:
        """Write an object atomically: it appears, complete, when the ``with`` block ends.

        If the block raises an error, the store is unchanged.
        """

    @abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """Write a small object if none exists. If several processes write it at the same time, only one succeeds.

        Returns:
            Whether the object now has this content, written by this call or by an earlier one.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove an object if it exists."""

    def can_write(self, key: str) -> bool:
        """Return whether this process may write an object, as far as the store can tell without writing."""
        return True

    def resolve(self, key: str) -> str:
        """Return the canonical form of a key, such as a path without symbolic links."""
        return self.prefix + key


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of an object or a folder: a store and a key. Messages show ``str(location)``.

    >>> from shardio.storage import parse_location
    >>> folder = parse_location("/data/train")
    >>> str(folder / "shard-000000.tar"), folder.name
    ('/data/train/shard-000000.tar', 'train')
    """

    store: Store
    key: str

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def folder(self) -> Location:
        """The folder that contains this location."""
        head, slash, _ = self.key.rpartition("/")
        return Location(store=self.store, key=head or slash)

    def __truediv__(self, name: str) -> Location:
        return Location(store=self.store, key=f"{self.key.rstrip('/')}/{name}" if self.key else name)

    def __str__(self) -> str:
        return self.store.prefix + self.key

    def exists(self) -> bool:
        """Return whether the object exists. A folder is not an object."""
        try:
            self.stat()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def stat(self) -> FileStat:
        """Return the object's size, version and identity: see :meth:`Store.stat`."""
        return self.store.stat(self.key)

    def open(self, *, whole: bool = False) -> StoredFile:
        """Open the object: see :meth:`Store.open`."""
        return self.store.open(self.key, whole=whole)

    def read_whole(self) -> bytes:
        """Return the object's content: see :meth:`Store.read_whole`."""
        return self.store.read_whole(self.key)

    def is_folder(self) -> bool:
        """Return whether this is a folder."""
        return self.store.is_folder(self.key)

    def list(self) -> list[str]:
        """Return the names in this folder: see :meth:`Store.list`."""
        return self.store.list(self.key)

    def walk(self) -> Iterator[str]:
        """Yield the keys of all objects below this folder: see :meth:`Store.walk`."""
        return self.store.walk(self.key)

    def walk_stats(self) -> Iterator[tuple[str, FileStat]]:
        """Yield the key and the status of each object below this folder: see :meth:`Store.walk_stats`."""
        return self.store.walk_stats(self.key)

    def write_whole(self) -> AbstractContextManager[Writer]:
        """Write the object atomically: see :meth:`Store.write_whole`."""
        return self.store.write_whole(self.key)

    def create(self, content: bytes) -> bool:
        """Write the object if it does not exist: see :meth:`Store.create`."""
        return self.store.create(self.key, content)

    def remove(self) -> None:
        """Remove the object if it exists."""
        self.store.remove(self.key)

    def can_write(self) -> bool:
        """Return whether this process may write the object: see :meth:`Store.can_write`."""
        return self.store.can_write(self.key)

    def resolve(self) -> str:
        """Return the canonical form of the key: see :meth:`Store.resolve`."""
        return self.store.resolve(self.key)


PIECE = 2**20
"""The size in bytes of a piece of a local file, chosen to keep the number of calls and the memory use low."""

REMOTE_PIECE = 8 * 2**20
"""The maximum number of bytes in a request to a remote store. Receiving this many bytes takes 6 ms of CPU time. Smaller
requests would incur the store's latency more often. Larger requests would save nothing and delay other requests."""

ALIGNED_FROM = 2**17
"""The minimum size, in bytes, of memory that is aligned to pages. The C library takes smaller blocks from its heap."""


def read_pieces(file: StoredFile, start: int = 0, num_bytes: int | None = None) -> Iterator[memoryview]:
    """Yield a file's content in pieces, beginning at byte ``start``. Each piece overwrites the previous piece.

    Args:
        file: The file.
        start: The offset of the first byte.
        num_bytes: The size of a piece in bytes; by default, 1 MiB, or 8 MiB if the file is remote.

    Raises:
        EOFError: If the file was truncated after it was opened.
        OSError: If the file cannot be read.
    """
    num_bytes = num_bytes or (PIECE if file.is_local else REMOTE_PIECE)
    buffer = _make_buffer(max(0, min(num_bytes, file.size - start)))
    for begin in range(start, file.size, num_bytes):
        piece = buffer[: file.size - begin]
        file.read_into([begin], [piece])
        yield piece


def _make_buffer(num_bytes: int) -> memoryview:
    # A large bytearray's memory begins 16 bytes after a page boundary. Some AMD processors copy from the page cache to
    # unaligned memory at a quarter of the usual speed. Large buffers are therefore mappings, which begin at a page
    # boundary.
    return memoryview(mmap.mmap(-1, num_bytes) if num_bytes >= ALIGNED_FROM else bytearray(num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """The limits of runs: ranges that are read together.

    Attributes:
        max_gap: The size in bytes of the largest gap to read along with its neighbors.
        max_small: The size in bytes of the largest range to read together with others.
        max_run: The approximate maximum size of a run in bytes.
    """

    max_gap: int
    max_small: int
    max_run: int


def read_runs(
    read: Callable[[Sequence[int], Sequence[int]], list[bytes]],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    limits: RunLimits,
) -> list[bytes]:
    """Read many ranges of a file. Neighboring ranges are read together.

    Args:
        read: A function that returns the bytes [start, stop) for each start and stop.
        starts: int64 [n], the starts of the ranges, in any order.
        stops: int64 [n], their stops.
        limits: The limits of runs.

    Returns:
        The n contents.
    """
    if not (starts[1:] >= starts[:-1]).all():
        order = starts.argsort(kind="stable")
        contents = [b""] * len(order)
        for i, content in zip(order.tolist(), read_runs(read, starts[order], stops[order], limits), strict=True):
            contents[i] = content
        return contents
    # Python's integers are faster here than arrays, because most calls have few ranges.
    begins, ends = starts.tolist(), stops.tolist()
    firsts = _find_runs(begins, ends, limits)
    if len(firsts) == len(begins):
        return read(begins, ends) if begins else []
    bounds = list(zip(firsts, [*firsts[1:], len(begins)], strict=True))
    run_starts = [begins[first] for first in firsts]
    runs = read(run_starts, [ends[first] if last - first == 1 else max(ends[first:last]) for first, last in bounds])
    found: list[bytes] = []
    for (first, last), start, content in zip(bounds, run_starts, runs, strict=True):
        if last - first == 1:
            found.append(content)
        else:
            found += [content[begins[i] - start : ends[i] - start] for i in range(first, last)]
    return found


def _find_runs(starts: Sequence[int], stops: Sequence[int], limits: RunLimits) -> list[int]:
    """Return the place of the first range of each run, given the sorted ranges."""
    max_gap, max_small, max_run = limits.max_gap, limits.max_small, limits.max_run
    firsts = list[int]()
    last_stop, was_small, run_start = 0, False, 0
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        is_small = stop - start <= max_small
        if not (is_small and was_small and start - last_stop <= max_gap and start - run_start < max_run):
            firsts.append(i)
            run_start = start
        last_stop, was_small = stop, is_small
    return firsts
