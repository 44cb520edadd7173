"""Tars that others packed: they are indexed on first use, and again when they have changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import xxhash

from shardio.errors import FormatError
from shardio.sample import ByteRange
from shardio.shards.index import INDEX_SUFFIX, StoredField, StoredSample, TarStamp, index_path, write_index
from shardio.shards.names import is_added_by_macos, join_name, split_name
from shardio.shards.open_index import read_header
from shardio.shards.shard import Shard
from shardio.shards.tar import BLOCK, TarMember, TarScan, make_header
from shardio.storage import LocalFile

_PACKED_NAME = re.compile(r"shard-[0-9]{6,}\.tar")
"""How ``pack`` names shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundIndex:
    """The index of a tar, and how many files of macOS's were skipped when it was made just now."""

    path: Path
    num_skipped: int = 0


def find_or_make_index(tar: Path) -> FoundIndex:
    """Return the index of a local tar; make it if there is none, or if the tar may have changed since.

    It lies next to the tar if that directory is writable, else in the user's cache folder. Many processes
    may do this at once: each writes a file of its own and renames it.

    Raises:
        FormatError: If the tar cannot be indexed, or what lies in the index's place is no index.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    beside, cached = index_path(tar), _cached_index_path(tar)
    for path in beside, cached:
        if path.exists() and _is_current(path, tar):
            return FoundIndex(path=path)
    path = beside if os.access(tar.parent, os.W_OK) else cached
    with _explaining_failures(tar):
        path.parent.mkdir(parents=True, exist_ok=True)
    stamp, scan = _stamp(tar), TarScan(tar)
    members = _Members(scan)
    samples = list(_group(tar, members))
    if _stamp(tar) != stamp:
        raise FormatError(f"{tar} changed while it was indexed: open it when it is finished")
    with closing(LocalFile(tar)) as file, _explaining_failures(tar):
        write_index(path, file, samples, scan.digest, stamp)
    return FoundIndex(path=path, num_skipped=members.num_skipped)


@contextmanager
def _explaining_failures(tar: Path) -> Iterator[None]:
    """Add to an error of the system that the index of a tar cannot be written, and what helps."""
    try:
        yield
    except OSError as error:
        message = (
            f"{error.strerror or error}; so the index of {tar} cannot be written. Make room there, make the tar's "
            "folder writable, or point XDG_CACHE_HOME at a folder that is"
        )
        raise OSError(error.errno, message, error.filename) from error


def was_packed(tar: Path) -> bool:
    """Say whether a tar's index was written by ``pack``, and not on first use. The tar need not be there.

    Only indexes that are made on first use carry a stamp. Those of earlier versions carry none either: then the tar
    must have the name that ``pack`` gives, and its first member a header as ``pack`` writes it, without time or owner.

    Raises:
        FormatError: If the index is not one.
    """
    index = index_path(tar)
    if not index.exists() or not _PACKED_NAME.fullmatch(tar.name) or read_header(index).stamp is not None:
        return False
    return not tar.exists() or _has_packs_header(tar, index)


def _has_packs_header(tar: Path, index: Path) -> bool:
    with Shard(tar, index) as shard:
        fields = shard.index.header.fields
        if not shard.index.header.num_samples:
            return True
        starts, stops, _ = shard.index.locate(np.array([0]), fields)
        field = int(np.where(starts[0] < 0, np.iinfo(np.int64).max, starts[0]).argmin())
        start, stop = int(starts[0, field]), int(stops[0, field])
        header = make_header(join_name(shard.index.key(0), fields[field]), stop - start)
        return shard.tar.read(ByteRange(start=start - BLOCK, stop=start)) == header[-BLOCK:]


def _is_current(index: Path, tar: Path) -> bool:
    stamp = read_header(index).stamp
    if stamp is not None:
        return stamp == _stamp(tar)
    return index == index_path(tar) and was_packed(tar)


def _stamp(tar: Path) -> TarStamp:
    found = tar.stat()
    return TarStamp(num_bytes=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino)


def _cached_index_path(tar: Path) -> Path:
    import platformdirs

    name = xxhash.xxh3_128_hexdigest(os.fsencode(tar.resolve()))
    return platformdirs.user_cache_path("shardio") / "indexes" / (name + INDEX_SUFFIX)


class _Members:
    """The members of a tar that have a key, and how many were skipped that macOS added."""

    def __init__(self, scan: TarScan) -> None:
        self._scan = scan
        self.num_skipped = 0

    def __iter__(self) -> Iterator[tuple[tuple[str, str], TarMember]]:
        for member in self._scan.members():
            if is_added_by_macos(member.name):
                self.num_skipped += 1
            elif (name := split_name(member.name)) is not None:  # Others are passed over, as by WebDataset.
                yield name, member


def _group(tar: Path, named: _Members) -> Iterator[StoredSample]:
    """Group neighbouring members of one key into samples."""
    for key, members in groupby(named, lambda pair: pair[0][0]):
        fields: dict[str, StoredField] = {}
        for (_, field), member in members:
            if field in fields:
                raise FormatError(f"{tar} holds the field {field} of sample {key} twice (at byte {member.offset})")
            fields[field] = StoredField(offset=member.offset, size=member.size, hash=member.hash)
        yield StoredSample(key=key, fields=fields)
