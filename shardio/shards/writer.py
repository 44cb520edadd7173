"""Writing one shard: the tar and, when that is whole, its index."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import xxhash

from shardio.sample import Sample
from shardio.shards.index import StoredField, StoredSample, index_path, write_index
from shardio.shards.manifest import ShardEntry
from shardio.shards.names import join_name
from shardio.shards.shard import Shard
from shardio.shards.tar import END, make_header, make_padding
from shardio.storage import LocalFile, write_whole


def write_shard(path: Path, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write a tar with the samples in their order, and its index beside it.

    Both appear under their names only when they are whole; the index comes last.

    Returns:
        The shard's entry for the manifest, and the names of its fields.
    """
    digest = xxhash.xxh3_128()
    with write_whole(path) as file:
        stored = [_write_sample(file, sample, digest) for sample in samples]
        file.write(END)
        digest.update(END)
    index = index_path(path)
    with closing(LocalFile(path)) as tar:
        write_index(index, tar, stored, digest.hexdigest())
    with Shard(path, index) as shard:
        return shard.entry, shard.index.header.fields


def _write_sample(file: BinaryIO, sample: Sample, digest: xxhash.xxh3_128) -> StoredSample:
    fields = {}
    for name, content in sample.fields.items():
        header = make_header(join_name(sample.key, name), len(content))
        offset = file.tell() + len(header)
        for part in header, content, make_padding(len(content)):
            file.write(part)
            digest.update(part)
        fields[name] = StoredField(offset=offset, size=len(content), hash=xxhash.xxh3_64_intdigest(content))
    return StoredSample(key=sample.key, fields=fields)
