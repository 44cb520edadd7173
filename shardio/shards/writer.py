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

PIECE = 2**20
"""The number of bytes that are collected before they are written and hashed: few calls, and the bytes are in cache."""


def write_shard(tar: Location, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write samples to a tar in the given order, and write its index next to it.

    Each file appears whole or not at all. The index is written last.

    Returns:
        The shard's entry for the manifest, and the names of its fields.
    """
    with tar.write_whole() as file:
        writer = TarWriter(file)
        for sample in samples:
            writer.add(sample)
        writer.end()
    index = index_location(tar)
    with closing(tar.open()) as opened:
        write_index(index, opened, writer.stored, writer.digest)
    with Shard(tar, index) as shard:
        return shard.entry, shard.index.header.fields


class TarWriter:
    """Writes samples to a tar, and records where their fields are.

    Attributes:
        num_bytes: The size of the tar so far, in bytes.
        stored: The samples, in tar order.

    Args:
        file: Where to write the tar.
    """

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._buffer, self._num_pending = bytearray(PIECE), 0  # Reused: new memory costs more than the copy.
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.stored = list[StoredSample]()

    @property
    def digest(self) -> str:
        """The xxh3-128 of the tar in hexadecimal, after :meth:`end`."""
        return self._hash.hexdigest()

    def add(self, sample: Sample) -> None:
        """Write a sample."""
        fields = dict[str, StoredField]()
        for name, content in sample.fields.items():
            size = len(content)
            header, padding = make_header(join_name(sample.key, name), size), make_padding(size)
            start = self.num_bytes + len(header)
            fields[name] = StoredField(start, size, xxhash.xxh3_64_intdigest(content))
            self.num_bytes = start + size + len(padding)
            if size < PIECE:
                self._collect(header, content, padding)
            else:
                self._collect(header)
                self._flush()
                self._write(content)
                self._collect(padding)
        self.stored.append(StoredSample(sample.key, fields))

    def end(self) -> None:
        """Write the end of the tar."""
        self._collect(END)
        self.num_bytes += len(END)
        self._flush()

    def _collect(self, *pieces: bytes) -> None:
        for piece in pieces:
            if self._num_pending + len(piece) > PIECE:
                self._flush()
            self._buffer[self._num_pending : self._num_pending + len(piece)] = piece
            self._num_pending += len(piece)

    def _flush(self) -> None:
        with memoryview(self._buffer) as view:
            self._write(view[: self._num_pending])
        self._num_pending = 0

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hash.update(content)
