"""Write a shard: first the tar, then its index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.sample import Sample
from shardio.shards.index import (
    INDEX_FORMAT,
    SCATTERED_FORMAT,
    IndexHeader,
    TarHeaders,
    digest_headers,
    find_scattered,
    index_location,
)
from shardio.shards.manifest import ShardEntry
from shardio.shards.tar import BLOCK, END, join_name, make_header, make_padding
from shardio.storage import Location, Writer

MAX_FIELDS = 1024
"""The maximum number of fields. A tar with more does not follow WebDataset's naming."""

MAX_EMPTY = 64
"""The maximum number of entries of an index for each member of its tar. The others say that a sample lacks a field."""

MAX_CELLS = 2**18
"""The number of entries that an index may have in any case."""

PIECE = 2**20
"""The number of bytes to collect before they are written and hashed: few calls, and the bytes are still in cache."""


class StoredField(NamedTuple):
    """The offset in the tar, the size and the xxh3-64 of a field's content."""

    offset: int
    size: int
    hash: int


class StoredSample(NamedTuple):
    """The key of one sample, and its fields by name."""

    key: str
    fields: Mapping[str, StoredField]


def write_index(
    location: Location,
    tar: TarHeaders,
    samples: Sequence[StoredSample],
    digest: str,
    version: str | None = None,
    compression: str | None = None,
) -> None:
    """Write the index of a tar.

    Args:
        location: The location of the index.
        tar: The finished tar, or the headers that the index needs.
        samples: The tar's samples, in the order of their first members.
        digest: xxh3-128 of the tar, in hexadecimal.
        version: The tar's version, if shardio did not pack it.
        compression: ``gzip`` if the tar is compressed.

    Raises:
        FormatError: If the tar has more fields than an index can hold.
        OSError: If the index cannot be written.
    """
    fields = tuple(sorted({field for sample in samples for field in sample.fields}))
    if len(fields) > MAX_FIELDS:
        raise FormatError(
            f"{tar.location} has {len(fields)} different fields, but an index holds at most {MAX_FIELDS}: name its "
            "members key.field, as WebDataset expects"
        )
    field_indices = {field: i for i, field in enumerate(fields)}
    members = [
        (field_indices[name], row, field) for row, sample in enumerate(samples) for name, field in sample.fields.items()
    ]
    shape = len(fields), len(samples)
    if shape[0] * shape[1] > MAX_EMPTY * len(members) + MAX_CELLS:
        raise FormatError(
            f"{tar.location} has {shape[0]} different fields, but a sample has only {len(members) / shape[1]:.1f} "
            "of them on average: its index would be too large. Name its members key.field, as WebDataset expects"
        )
    offset, size = np.full(shape, -1, "<i8"), np.full(shape, -1, "<i8")
    content_hash = np.zeros(shape, "<u8")
    if members:
        places = tuple(np.array(each) for each in zip(*((i, row) for i, row, _ in members), strict=True))
        offset[places] = [field.offset for _, _, field in members]
        size[places] = [field.size for _, _, field in members]
        content_hash[places] = np.array([field.hash for _, _, field in members], "<u8")
    keys = [sample.key.encode(errors="surrogateescape") for sample in samples]
    num_scattered = int(np.count_nonzero(find_scattered(offset)))
    has_format_1 = version is None and not num_scattered
    header = IndexHeader(
        format=INDEX_FORMAT if has_format_1 else SCATTERED_FORMAT,
        fields=fields,
        num_samples=len(samples),
        num_bytes=tar.size,
        digest=digest,
        header_digest=digest_headers(tar, [offset[:, 0], offset[:, -1]] if samples else []),
        version=version,
        compression=compression,
        num_scattered=None if has_format_1 else num_scattered,
    )
    tensors = {
        "offset": offset,
        "size": size,
        "hash": content_hash,
        "key_stop": np.cumsum([len(key) for key in keys], dtype="<i8"),
        "key_bytes": np.frombuffer(b"".join(keys), dtype=np.uint8),
    }
    values = {name: value for name, value in asdict(header).items() if value is not None}
    metadata = {"shardio": json.dumps(values, sort_keys=True, separators=(",", ":"))}
    with location.write_whole() as file:
        file.write(safetensors.numpy.save(tensors, metadata))


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
        headers: Those of the last sample so far.

    Args:
        file: The destination of the tar.
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
