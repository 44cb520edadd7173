"""Tars that other tools packed. They are indexed on first use, and again after they change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import xxhash

from shardio.errors import FormatError
from shardio.shards.index import INDEX_SUFFIX, index_location
from shardio.shards.index_writer import StoredField, StoredSample, write_index
from shardio.shards.names import is_added_by_macos, join_name, split_name
from shardio.shards.open_index import read_header
from shardio.shards.shard import Shard
from shardio.shards.tar import BLOCK, make_header
from shardio.shards.tar_scan import TarMember, TarScan
from shardio.storage import Location, parse_location

_PACKED_NAME = re.compile(r"shard-[0-9]{6,}\.tar")
"""The names that ``pack`` gives to shards."""


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
    beside, cached = index_location(tar), _cached_index(tar)
    for index in beside, cached:
        if index.exists() and _is_current(index, tar):
            return FoundIndex(location=index)
    index = beside if beside.can_write() else cached
    with closing(tar.open()) as file:
        scan = TarScan(file)
        members = _Members(scan)
        samples = list(_group(tar, members))
        if tar.stat().version != file.version:
            raise FormatError(f"{tar} changed while it was being indexed: open it again when nothing is writing to it")
        with _explaining_failures(tar):
            write_index(index, file, samples, scan.digest, file.version)
    return FoundIndex(location=index, num_skipped=members.num_skipped)


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
    if not index.exists() or not _PACKED_NAME.fullmatch(tar.name) or read_header(index).version is not None:
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
    version = read_header(index).version
    if version is not None:
        return version == tar.stat().version
    return index == index_location(tar) and was_packed(tar)


def _cached_index(tar: Location) -> Location:
    import platformdirs

    name = xxhash.xxh3_128_hexdigest(os.fsencode(tar.resolve()))
    return parse_location(platformdirs.user_cache_path("shardio") / "indexes" / (name + INDEX_SUFFIX))


class _Members:
    """The members of a tar that have a key, and the number of skipped files that macOS added."""

    def __init__(self, scan: TarScan) -> None:
        self._scan = scan
        self.num_skipped = 0

    def __iter__(self) -> Iterator[tuple[tuple[str, str], TarMember]]:
        for member in self._scan.members():
            if is_added_by_macos(member.name):
                self.num_skipped += 1
            elif (name := split_name(member.name)) is not None:  # WebDataset also skips the others.
                yield name, member


def _group(tar: Location, named: _Members) -> Iterator[StoredSample]:
    """Group adjacent members with the same key into samples."""
    for key, members in groupby(named, lambda pair: pair[0][0]):
        fields: dict[str, StoredField] = {}
        for (_, field), member in members:
            if field in fields:
                raise FormatError(
                    f"{tar} holds field {field!r} of sample {key} twice, the second time at byte {member.offset}: "
                    "create the tar again without one of them"
                )
            fields[field] = StoredField(offset=member.offset, size=member.size, hash=member.hash)
        yield StoredSample(key=key, fields=fields)
