"""Tars that other tools packed. They are indexed on first use, and again after they change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import xxhash

from shardio.errors import FormatError
from shardio.shards.index import INDEX_FORMAT, INDEX_SUFFIX, IndexHeader, index_location
from shardio.shards.index_columns import find_repeated, read_columns
from shardio.shards.index_writer import StoredField, StoredSample, write_index
from shardio.shards.names import gather_members, group_members, is_added_by_macos, join_name, split_name
from shardio.shards.open_index import read_header
from shardio.shards.shard import Shard
from shardio.shards.tar import BLOCK, make_header
from shardio.shards.tar_scan import TarMember, TarScan
from shardio.storage import Location, StoredFile, parse_location

PACKED_NAME = re.compile(r"shard-([0-9]{5}-)?[0-9]{6,}\.tar")
"""The names that ``pack`` and ``ShardWriter`` give to shards."""


MAX_NAMED = 20
"""The maximum number of skipped members to name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarContents:
    """What is in a tar.

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
    """Create the index of a tar. Return its location, and what the tar contains. Errors are as above."""
    with closing(tar.open()) as file:
        file.discard(0, file.size)  # No hash shows yet whether what an earlier run left in a cache is damaged.
        contents = scan_contents(file)
        if tar.stat().version != file.version:
            raise FormatError(f"{tar} changed while it was being indexed: open it again when nothing is writing to it")
        index = write_where_allowed(
            tar, lambda location: write_index(location, file, contents.samples, contents.digest, file.version)
        )
    return index, contents


def scan_contents(file: StoredFile) -> TarContents:
    """Read a whole tar and return what it contains.

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
    """Return the index of a tar if the tar has not changed since it was indexed; None otherwise."""
    places = index_location(tar), _cached_index(tar)
    return next((index for index in places if index.exists() and _is_current(index, tar)), None)


def write_where_allowed(tar: Location, write: Callable[[Location], object]) -> Location:
    """Write the index of a tar next to it if this process may do so, otherwise to the user's cache.

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
    """Add to an OSError which tar's index cannot be written, and the remedy."""
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
        headers: The same of the last such members so far.
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
            if name is None:  # WebDataset skips the others, too.
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
