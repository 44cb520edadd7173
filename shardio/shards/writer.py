"""Write a shard: first the tar, then its index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.sample import Sample
from shardio.shards.index import index_location
from shardio.shards.index_writer import StoredField, StoredSample, write_index
from shardio.shards.manifest import ShardEntry
from shardio.shards.names import join_name
from shardio.shards.tar import BLOCK, END, make_header, make_padding
from shardio.storage import Location, Writer

PIECE = 2**20
"""The number of bytes that are collected before they are written and hashed: few calls, and the bytes are in cache."""


def write_shard(tar: Location, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write samples to a tar in the given order, and write its index next to it.

    Each file appears whole or not at all. The index is written last. Nothing is read back.

    Returns:
        The shard's entry for the manifest, and the names of its fields.
    """
    with tar.write_whole() as file:
        writer = TarWriter(file)
        for sample in samples:
            writer.add(sample)
        writer.end()
    return write_index_of(tar, writer)


def write_index_of(tar: Location, writer: TarWriter) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write the index of a tar that a writer has ended. Return what :func:`write_shard` returns."""
    samples = writer.stored
    written = _WrittenTar(location=tar, size=writer.num_bytes, headers={**writer.headers_of_first, **writer.headers})
    write_index(index_location(tar), written, samples, writer.digest)
    entry = ShardEntry(name=tar.name, num_bytes=writer.num_bytes, num_samples=len(samples), digest=writer.digest)
    return entry, tuple(sorted({field for sample in samples for field in sample.fields}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenTar:
    """A tar that was just written: see :class:`~shardio.shards.index.TarHeaders`.

    Attributes:
        location: Its location.
        size: Its size in bytes.
        headers: The plain headers of the first and the last sample's members, by the offsets of the contents.
    """

    location: Location
    size: int
    headers: dict[int, bytes]

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return [self.headers[stop] for stop in stops.tolist()]


class TarWriter:
    """Writes samples to a tar, and records where their fields are.

    Attributes:
        num_bytes: The size of the tar so far, in bytes.
        stored: The samples, in tar order.
        headers_of_first: The plain headers of the first sample's members, by the offsets of the contents.
        headers: The same of the last sample so far.

    Args:
        file: Where to write the tar.
    """

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._buffer, self._num_pending = bytearray(PIECE), 0  # Reused: new memory costs more than the copy.
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.stored = list[StoredSample]()
        self.headers_of_first = dict[int, bytes]()
        self.headers = dict[int, bytes]()

    @property
    def digest(self) -> str:
        """The xxh3-128 of the tar in hexadecimal, after :meth:`end`."""
        return self._hash.hexdigest()

    def add(self, sample: Sample) -> None:
        """Write a sample."""
        fields = dict[str, StoredField]()
        self.headers = {}
        for name, content in sample.fields.items():
            size = len(content)
            header, padding = make_header(join_name(sample.key, name), size), make_padding(size)
            start = self.num_bytes + len(header)
            self.headers[start] = header[-BLOCK:]
            fields[name] = StoredField(start, size, xxhash.xxh3_64_intdigest(content))
            self.num_bytes = start + size + len(padding)
            if size < PIECE:
                self._collect(header, content, padding)
            else:
                self._collect(header)
                self._flush()
                self._write(content)
                self._collect(padding)
        self.headers_of_first = self.headers_of_first or self.headers
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
