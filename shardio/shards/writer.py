"""Write a shard: first the tar, then its index."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import xxhash

from shardio.sample import Sample
from shardio.shards.index import index_location
from shardio.shards.index_writer import StoredField, StoredSample, write_index
from shardio.shards.manifest import ShardEntry
from shardio.shards.names import join_name
from shardio.shards.shard import Shard
from shardio.shards.tar import END, make_header, make_padding
from shardio.storage import Location, Writer


def write_shard(tar: Location, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write samples to a tar in the given order, and write its index next to it.

    Each file appears whole or not at all. The index is written last.

    Returns:
        The shard's entry for the manifest, and the names of its fields.
    """
    with tar.write_whole() as file:
        writer = _HashingWriter(file)
        stored = [_write_sample(writer, sample) for sample in samples]
        writer.write(END)
    index = index_location(tar)
    with closing(tar.open()) as opened:
        write_index(index, opened, stored, writer.digest.hexdigest())
    with Shard(tar, index) as shard:
        return shard.entry, shard.index.header.fields


class _HashingWriter:
    """Writes to a file and hashes what it writes.

    Attributes:
        position: The number of bytes written.
        digest: The xxh3-128 of these bytes.
    """

    def __init__(self, file: Writer) -> None:
        self._file = file
        self.position, self.digest = 0, xxhash.xxh3_128()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.digest.update(content)
        self.position += len(content)


def _write_sample(writer: _HashingWriter, sample: Sample) -> StoredSample:
    fields = dict[str, StoredField]()
    for name, content in sample.fields.items():
        writer.write(make_header(join_name(sample.key, name), len(content)))
        content_hash = xxhash.xxh3_64_intdigest(content)
        fields[name] = StoredField(offset=writer.position, size=len(content), hash=content_hash)
        writer.write(content)
        writer.write(make_padding(len(content)))
    return StoredSample(key=sample.key, fields=fields)
