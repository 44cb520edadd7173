"""Tars that others packed: they are indexed on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path

import xxhash

from shardio.errors import FormatError
from shardio.shards.index import INDEX_SUFFIX, StoredField, StoredSample, index_path, write_index
from shardio.shards.names import split_name
from shardio.shards.tar import TarScan
from shardio.storage import LocalFile


def find_or_make_index(tar: Path) -> Path:
    """Return the index of a local tar; make it if there is none.

    It lies next to the tar if that directory is writable, else in the user's cache folder. Many processes
    may do this at once: each writes a file of its own and renames it.
    """
    beside, cached = index_path(tar), _cached_index_path(tar)
    for path in beside, cached:
        if path.exists():
            return path
    path = beside if os.access(tar.parent, os.W_OK) else cached
    path.parent.mkdir(parents=True, exist_ok=True)
    scan = TarScan(tar)
    samples = list(_group(tar, scan))
    with closing(LocalFile(tar)) as file:
        write_index(path, file, samples, scan.digest)
    return path


def _cached_index_path(tar: Path) -> Path:
    import platformdirs

    name = xxhash.xxh3_128_hexdigest(str(tar.resolve()).encode())
    return platformdirs.user_cache_path("shardio") / "indexes" / (name + INDEX_SUFFIX)


def _group(tar: Path, scan: TarScan) -> Iterator[StoredSample]:
    """Group neighbouring members of one key into samples; members without a key are passed over, as by WebDataset."""
    named = ((name, member) for member in scan.members() if (name := split_name(member.name)) is not None)
    for key, members in groupby(named, lambda pair: pair[0][0]):
        fields: dict[str, StoredField] = {}
        for (_, field), member in members:
            if field in fields:
                raise FormatError(f"{tar} holds the field {field} of sample {key} twice (at byte {member.offset})")
            fields[field] = StoredField(
                offset=member.offset, size=len(member.content), hash=xxhash.xxh3_64_intdigest(member.content)
            )
        yield StoredSample(key=key, fields=fields)
