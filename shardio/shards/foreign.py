"""Index the tars that other tools packed: on first use, and again after they change.

Tars that gzip compressed are indexed only to list their contents and to extract single samples. Reading a member
decompresses everything before it, so datasets do not read them.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError
from shardio.shards.index import (
    INDEX_FORMAT,
    INDEX_SUFFIX,
    IndexHeader,
    find_repeated,
    find_scattered,
    index_location,
    read_columns,
    read_header,
)
from shardio.shards.shard import Shard, describe_offset
from shardio.shards.tar import (
    BLOCK,
    MAX_MEMBER,
    TOO_LARGE,
    gather_members,
    group_members,
    is_added_by_macos,
    join_name,
    make_header,
    split_name,
)
from shardio.shards.tar_scan import TarMember, TarScan
from shardio.shards.writer import StoredField, StoredSample, write_index
from shardio.storage import PIECE, Location, StoredFile, parse_location

PACKED_NAME = re.compile(r"shard-([0-9]{5}-)?[0-9]{6,}\.tar")
"""The names that ``pack`` and ``ShardWriter`` give to shards."""

MAX_NAMED = 20
"""The maximum number of skipped members to name."""

GZIP = "gzip"
"""The value of an index's ``compression``."""

_COMPRESSED_NAME = re.compile(r".+\.(tar\.gz|tgz)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TarContents:
    """The contents of a tar.

    Attributes:
        samples: Its samples, in the order of their first members.
        digest: The xxh3-128 of the tar, in hexadecimal.
        num_added_by_macos: The number of skipped files that macOS added.
        num_without_key: The number of other skipped files, whose names have no key.
        skipped: The names of the first skipped files.
        headers: The plain headers of the first and the last run of members that have one key, by the offsets of the
            contents. Unless the first and the last sample are scattered, they have no other members.
    """

    samples: list[StoredSample]
    digest: str
    num_added_by_macos: int
    num_without_key: int
    skipped: list[str]
    headers: dict[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundIndex:
    """The index of a tar, and the number of skipped files that macOS added if the index was just created."""

    location: Location
    num_skipped: int = 0


def find_or_make_index(tar: Location) -> FoundIndex:
    """Return the index of a tar. Create it if it does not exist, or if the tar may have changed since.

    The index is written next to the tar if this process may write there, and otherwise to the user's cache folder.
    Several processes may do this at the same time: each writes its own temporary file and renames it.

    Raises:
        FormatError: If the tar cannot be indexed, or a file that is not an index has the index's name.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    if (index := find_current_index(tar)) is not None:
        return FoundIndex(location=index)
    index, contents = make_index(tar)
    return FoundIndex(location=index, num_skipped=contents.num_added_by_macos)


def make_index(tar: Location) -> tuple[Location, TarContents]:
    """Create the index of a tar. Return its location, and the tar's contents.

    Raises:
        The same errors as :func:`find_or_make_index`.
    """
    with closing(tar.open()) as file:
        file.discard(0, file.size)  # No hash can show yet whether an earlier run left damaged bytes in a cache.
        contents = scan_contents(file)
        if tar.stat().version != file.version:
            raise FormatError(f"{tar} changed while it was being indexed: open it again when nothing is writing to it")
        index = write_where_allowed(
            tar, lambda location: write_index(location, file, contents.samples, contents.digest, file.version)
        )
    return index, contents


def scan_contents(file: StoredFile) -> TarContents:
    """Read a whole tar and return its contents.

    Raises:
        FormatError: If the tar cannot be indexed.
    """
    scan = TarScan(file)
    members = _Members(scan)
    runs = [
        (key, dict(zip(found, map(_store, found.values()), strict=True)))
        for key, found in group_members(str(file.location), members)
    ]
    samples = [StoredSample(key, fields) for key, fields in gather_members(str(file.location), runs)]
    return TarContents(
        samples=samples,
        digest=scan.digest,
        num_added_by_macos=members.num_added_by_macos,
        num_without_key=members.num_without_key,
        skipped=members.skipped,
        headers={**members.headers_of_first, **members.headers},
    )


def find_current_index(tar: Location) -> Location | None:
    """Return the index of a tar; None if there is none, or the tar has changed since it was indexed."""
    places = index_location(tar), _cached_index(tar)
    return next((index for index in places if index.exists() and _is_current(index, tar)), None)


def write_where_allowed(tar: Location, write: Callable[[Location], object]) -> Location:
    """Write the index of a tar next to it if this process may do so, otherwise to the user's cache folder.

    Args:
        tar: The tar.
        write: Writes the index to a location.

    Returns:
        The location of the index.

    Raises:
        OSError: If the index cannot be written.
    """
    beside, cached = index_location(tar), _cached_index(tar)
    with _explaining_failures(tar):
        if beside.can_write():
            with suppress(PermissionError):  # Object stores tell only when something is written.
                write(beside)
                return beside
        write(cached)
    return cached


@contextmanager
def _explaining_failures(tar: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = (
            f"{error.strerror or error}: cannot write the index of {tar}. Free some disk space, make the tar's folder "
            "writable, or set XDG_CACHE_HOME to a writable folder"
        )
        raise OSError(error.errno, message, error.filename) from error


def find_index(tar: Location) -> Location | None:
    """Return the index of a tar, next to it or in the cache, whether or not it is current; None if there is none."""
    return next((index for index in (index_location(tar), _cached_index(tar)) if index.exists()), None)


def was_packed(tar: Location) -> bool:
    """Return whether ``pack`` wrote a tar's index. The tar need not exist.

    An index that was created on first use holds the tar's version, except in early versions of shardio. So the tar
    must also have a name that ``pack`` gives, and its first member must have a header without time or owner, as
    ``pack`` writes it.

    Raises:
        FormatError: If the index is damaged.
    """
    index = index_location(tar)
    if not index.exists() or not PACKED_NAME.fullmatch(tar.name) or read_header(index).version is not None:
        return False
    return not tar.exists() or _has_packs_header(tar, index)


def _has_packs_header(tar: Location, index: Location) -> bool:
    with Shard(tar, index) as shard:
        fields = shard.index.header.fields
        if not shard.index.header.num_samples:
            return True
        starts, stops, _ = shard.index.locate(np.array([0]), fields)
        first = int(np.where(starts[0] < 0, np.iinfo(np.int64).max, starts[0]).argmin())
        start, stop = int(starts[0, first]), int(stops[0, first])
        header = make_header(join_name(shard.index.key(0), fields[first]), stop - start)
        return shard.tar.read(start - BLOCK, start) == header[-BLOCK:]


def _is_current(index: Location, tar: Location) -> bool:
    header = read_header(index)
    if header.compression is not None:  # Datasets do not read compressed tars.
        return False
    if header.version is not None:
        return header.version == tar.stat().version and not has_split_samples(index, header)
    return index == index_location(tar) and was_packed(tar)


def has_split_samples(index: Location, header: IndexHeader) -> bool:
    """Return whether an index of an early version lists the parts of scattered samples as samples.

    Args:
        index: The location of the index.
        header: Its metadata.
    """
    if header.format != INDEX_FORMAT or header.version is None:  # Packed tars have no scattered samples.
        return False
    columns = read_columns(index)
    is_there = columns.starts >= 0
    if is_there.all():  # The parts of a sample have different fields, so they lack some.
        return False
    return any(np.any(is_there[:, rows] != is_there[:, rows[:1]]) for rows in find_repeated(columns.keys).values())


def _cached_index(tar: Location) -> Location:
    import platformdirs

    name = xxhash.xxh3_128_hexdigest(os.fsencode(tar.resolve()))
    return parse_location(platformdirs.user_cache_path("shardio") / "indexes" / (name + INDEX_SUFFIX))


class _Members:
    """The members of a tar that have a key.

    Attributes:
        num_added_by_macos: The number of skipped files that macOS added.
        num_without_key: The number of other skipped files.
        skipped: The names of the first skipped files.
        headers_of_first: The plain headers of the first members that have one key, by the offsets of the contents.
        headers: Those of the last members that have one key.
    """

    def __init__(self, scan: TarScan) -> None:
        self._scan = scan
        self.num_added_by_macos = self.num_without_key = 0
        self.skipped: list[str] = []
        self.headers_of_first: dict[int, bytes] = {}
        self.headers: dict[int, bytes] = {}

    def __iter__(self) -> Iterator[tuple[tuple[str, str], TarMember]]:
        key = None
        for member in self._scan.members():
            is_added = is_added_by_macos(member.name)
            name = None if is_added else split_name(member.name)
            if name is None:  # WebDataset skips these files as well.
                self.num_added_by_macos += is_added
                self.num_without_key += not is_added
                if len(self.skipped) < MAX_NAMED:
                    self.skipped.append(member.name)
                continue
            if name[0] != key:
                self.headers_of_first = self.headers_of_first or self.headers
                key, self.headers = name[0], {}
            self.headers[member.offset] = self._scan.last_header
            yield name, member


def _store(member: TarMember) -> StoredField:
    return StoredField(offset=member.offset, size=member.size, hash=member.hash)


def is_compressed(tar: Location) -> bool:
    """Return whether a name ends in ``.tar.gz`` or ``.tgz``, in lower or upper case."""
    return _COMPRESSED_NAME.fullmatch(tar.name) is not None


def find_compressed_index(tar: Location) -> Location | None:
    """Return the index of a compressed tar; None if there is none, or the tar has changed since it was indexed."""
    index = find_index(tar)
    if index is None:
        return None
    header = read_header(index)
    is_current = header.compression == GZIP and header.version == tar.stat().version
    return index if is_current and not has_split_samples(index, header) else None


def make_compressed_index(tar: Location) -> tuple[Location, TarContents]:
    """Create the index of a compressed tar. Return its location, and the tar's contents.

    The tar is decompressed twice: once to find its size, and once to read it. Memory does not grow with its size.

    Raises:
        FormatError: If the file is not a complete tar in a complete gzip file, or cannot be indexed.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    with closing(DecompressedFile(tar)) as file:
        contents = scan_contents(file)
        file.remember(contents.headers)
        if tar.stat().version != file.version:
            raise FormatError(f"{tar} changed while it was being indexed: index it again when nothing is writing to it")
        index = write_where_allowed(
            tar, lambda location: write_index(location, file, contents.samples, contents.digest, file.version, GZIP)
        )
    return index, contents


class DecompressedFile:
    """A tar that gzip compressed, read as if it were not compressed. Threads cannot share it.

    Reading backwards decompresses the file from its beginning again.

    Args:
        location: The location of the compressed tar.
        size: The size of the decompressed tar in bytes; by default, the tar is decompressed once to find it.

    Raises:
        FormatError: If the file is not a complete gzip file.
        OSError: If it cannot be read.
    """

    def __init__(self, location: Location, size: int | None = None) -> None:
        self.location = location
        self._file = location.open()
        self.version = self._file.version
        self._known: Mapping[int, bytes] = {}
        try:
            self._restart()
            self.size = self._measure() if size is None else size
        except BaseException:  # Ctrl-C must not leave the file open either.
            self.close()
            raise

    def remember(self, headers: Mapping[int, bytes]) -> None:
        """Keep blocks, given by the offsets where they end, so that reading them again costs nothing."""
        self._known = headers

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the decompressed tar."""
        if stop - start == BLOCK and stop in self._known:
            return self._known[stop]
        content = bytearray()
        while (position := start + len(content)) < stop:  # In pieces: an index may claim more bytes than there are.
            piece = bytearray(min(PIECE, stop - position))
            self.read_into([position], [memoryview(piece)])
            content += piece
        return bytes(content)

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        """Return the contents of many ranges, which are read in the order of their starts."""
        contents = [b""] * len(starts)
        for i in np.argsort(starts, kind="stable").tolist():
            contents[i] = self.read(int(starts[i]), int(stops[i]))
        return contents

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with the bytes that begin at its start position."""
        for start, buffer in zip(starts, buffers, strict=True):
            if start < self._position:
                self._restart()
            skipped = memoryview(bytearray(min(PIECE, start - self._position)))
            while self._position < start:
                self._fill(skipped[: start - self._position])
            self._fill(buffer)

    @property
    def is_local(self) -> bool:
        """Whether the compressed tar is local."""
        return self._file.is_local

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: a compressed tar is read forwards."""

    def discard(self, start: int, stop: int) -> bool:
        """Return False: nothing is cached."""
        return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _restart(self) -> None:
        stream = io.BufferedReader(_Stream(self._file), PIECE)
        self._stream = gzip.GzipFile(fileobj=cast(BinaryIO, stream), mode="rb")
        self._position = 0

    def _measure(self) -> int:
        buffer = memoryview(bytearray(PIECE))
        while num_read := self._read_some(buffer):
            self._position += num_read
        return self._position

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            num_read = self._read_some(buffer)
            if not num_read:
                raise EOFError(f"{self.location} ends at byte {self._position} of the decompressed tar")
            self._position += num_read
            buffer = buffer[num_read:]

    def _read_some(self, buffer: memoryview) -> int:
        try:
            return self._stream.readinto(buffer)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise FormatError(
                f"{self.location} is not a complete gzip file: {error} (after {self._position} decompressed bytes). "
                "Download or create it again"
            ) from error


class CompressedShard:
    """A compressed tar and its index, from which single samples are read. A context manager closes it.

    Args:
        tar: The location of the tar.

    Raises:
        FormatError: If the tar has no current index, or two of its samples have the same key.
    """

    def __init__(self, tar: Location) -> None:
        index = find_compressed_index(tar)
        if index is None:
            raise FormatError(f"{tar} has no current index: create one with shardio index {tar}")
        self.columns = read_columns(index)
        self._file = DecompressedFile(tar, self.columns.header.num_bytes)
        self._places = dict[str, int]()
        for sample in range(len(self.columns.keys)):
            key = self.columns.keys.text(sample)
            if (other := self._places.setdefault(key, sample)) != sample:
                self.close()
                raise FormatError(
                    f"two samples of {tar} have the key {key!r}, the {other + 1}th and the {sample + 1}th: a key must "
                    "name one sample"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, sorted."""
        return self.columns.header.fields

    def sort(self, keys: Sequence[str]) -> list[str]:
        """Return keys in the order in which the tar is decompressed once. Unknown keys come first."""
        return sorted(keys, key=lambda key: self._places.get(key, -1))

    def read(self, key: str, fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Return some fields of a sample, as :meth:`shardio.KeyedShards.read` does.

        Raises:
            KeyError: If no sample has the key.
            SampleError: If the sample is damaged, or a field is too large.
        """
        if (sample := self._places.get(key)) is None:
            raise KeyError(f"no sample has the key {key!r} in {self._file.location}")
        found: dict[str, Any] = {"__key__": key}
        columns = self.columns
        for field_index in np.argsort(columns.starts[:, sample], kind="stable").tolist():
            field, start = self.fields[field_index], int(columns.starts[field_index, sample])
            if start < 0 or (fields is not None and field not in fields):
                continue
            where, num_bytes = describe_offset(self._file, start), int(columns.sizes[field_index, sample])
            if not 0 <= num_bytes <= MAX_MEMBER:
                message = f"field {field!r} of sample {key} in {where} has {num_bytes} bytes, {TOO_LARGE}"
                raise SampleError(message, key=key, where=where)
            try:
                content = self._file.read(start, start + num_bytes)
            except EOFError as error:
                raise SampleError(f"sample {key} cannot be read from {where}: {error}", key=key, where=where) from error
            if xxhash.xxh3_64_intdigest(content) != int(columns.hashes[field_index, sample]):
                message = f"field {field!r} of sample {key} in {where} is damaged: download the tar again"
                raise SampleError(message, key=key, where=where)
            found[field] = content
        return found

    def close(self) -> None:
        """Close the tar."""
        self._file.close()

    def __enter__(self) -> CompressedShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Stream(io.RawIOBase):
    def __init__(self, file: StoredFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # not any buffer
        view = memoryview(buffer)[: self._file.size - self._position]
        self._file.read_into([self._position], [view])
        self._position += len(view)
        return len(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """A report on the contents of a tar.

    Attributes:
        tar: The tar.
        index: Its index.
        was_current: Whether the index existed already.
        num_samples: The number of samples.
        fields: The number of samples that have each field, by its name.
        num_bytes: The size of the tar in bytes, decompressed.
        compression: ``gzip`` for a compressed tar; None for others.
        num_added_by_macos: The number of skipped files that macOS added; None if the index existed already.
        num_without_key: The number of other skipped files; None if the index existed already.
        skipped: The names of the first skipped files.
        scattered: The keys of samples whose members are not adjacent.
        repeated: The keys that several samples have.
    """

    tar: Location
    index: Location
    was_current: bool
    num_samples: int
    fields: dict[str, int]
    num_bytes: int
    compression: str | None
    num_added_by_macos: int | None
    num_without_key: int | None
    skipped: tuple[str, ...]
    scattered: tuple[str, ...]
    repeated: tuple[str, ...]


def index_tar(tar: Location) -> IndexReport:
    """Create the index of a tar, unless it has a current one, and report what the tar contains. The tar is unchanged.

    Raises:
        FormatError: If the tar cannot be indexed, or shardio packed it and its index is missing.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    if is_compressed(tar):
        index, make = find_compressed_index(tar), make_compressed_index
    else:
        index, make = find_current_index(tar), make_index
    contents = None
    was_current = index is not None
    if index is None:
        index, contents = make(tar)
    columns = read_columns(index)
    num_samples = np.count_nonzero(columns.starts >= 0, axis=1).tolist()
    return IndexReport(
        tar=tar,
        index=index,
        was_current=was_current,
        num_samples=len(columns.keys),
        fields=dict(zip(columns.header.fields, num_samples, strict=True)),
        num_bytes=columns.header.num_bytes,
        compression=columns.header.compression,
        num_added_by_macos=None if contents is None else contents.num_added_by_macos,
        num_without_key=None if contents is None else contents.num_without_key,
        skipped=() if contents is None else tuple(contents.skipped),
        scattered=tuple(map(columns.keys.text, np.flatnonzero(find_scattered(columns.starts)).tolist())),
        repeated=tuple(find_repeated(columns.keys)),
    )
