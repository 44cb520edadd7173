"""The index: where every field of every sample of one shard lies.

A safetensors file (https://github.com/huggingface/safetensors) beside the tar. F fields, n samples, little-endian:

    offset      int64  [F, n]   first byte of the content in the tar; -1 where a sample lacks the field
    size        int64  [F, n]   bytes of the content; -1 likewise
    hash        uint64 [F, n]   xxh3-64 of the content; 0 likewise
    key_stop    int64  [n]      where each key ends in key_bytes
    key_bytes   uint8  [...]    the keys in UTF-8, end to end

Its metadata has one key, ``shardio``, with a canonical JSON object (see :class:`IndexHeader`): several keys
would be written in random order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.sample import ByteRange
from shardio.shards.tar import BLOCK
from shardio.storage import LocalFile, write_whole

INDEX_FORMAT = 1
INDEX_SUFFIX = ".idx"

MAX_FIELDS = 1024
"""More different fields than this in one shard are taken for a tar that is not in WebDataset's naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredField:
    """Where the content of one field lies in the tar, and its xxh3-64."""

    offset: int
    size: int
    hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """Where the fields of one sample lie."""

    key: str
    fields: Mapping[str, StoredField]


@dataclass(frozen=True, slots=True, kw_only=True)
class TarStamp:
    """What the file system says of a tar: if it is the same, the tar was not written again."""

    num_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """What an index says of its shard.

    Attributes:
        format: The index format's version.
        fields: The names of the fields, sorted.
        num_samples: The samples of the shard.
        num_bytes: The size of the tar.
        digest: xxh3-128 of the tar, in hexadecimal.
        header_digest: xxh3-64 of the tar headers of the first and the last sample, in hexadecimal: with the
            tar's size it shows, at opening, whether the tar is the one that was indexed.
        mtime_ns: The tar's modification time in nanoseconds, in indexes that were made on first use alone: shards that
            shardio packed may be copied, and equal input gives equal indexes.
        inode: The tar's inode, likewise.
    """

    format: int
    fields: tuple[str, ...]
    num_samples: int
    num_bytes: int
    digest: str
    header_digest: str
    mtime_ns: int | None = None
    inode: int | None = None

    @property
    def stamp(self) -> TarStamp | None:
        """The tar's stamp, where the index was made on first use."""
        if self.mtime_ns is None or self.inode is None:
            return None
        return TarStamp(num_bytes=self.num_bytes, mtime_ns=self.mtime_ns, inode=self.inode)


def index_path(tar: Path) -> Path:
    """Return where the index of a tar lies: beside it."""
    return tar.with_name(tar.name + INDEX_SUFFIX)


def write_index(
    path: Path, tar: LocalFile, samples: Sequence[StoredSample], digest: str, stamp: TarStamp | None = None
) -> None:
    """Write the index of a tar.

    Args:
        path: Where to write it.
        tar: The finished tar.
        samples: What lies in the tar, in its order.
        digest: xxh3-128 of the tar, in hexadecimal.
        stamp: Of a tar that shardio did not pack.
    """
    fields = tuple(sorted({field for sample in samples for field in sample.fields}))
    if len(fields) > MAX_FIELDS:
        raise FormatError(
            f"{tar.path} has {len(fields)} different fields, and {MAX_FIELDS} are the most that an index holds: "
            "its members are not named key.field as WebDataset wants it"
        )
    row = {field: i for i, field in enumerate(fields)}
    offset = np.full((len(fields), len(samples)), -1, dtype="<i8")
    size = offset.copy()
    content_hash = np.zeros(offset.shape, dtype="<u8")
    for column, sample in enumerate(samples):
        for name, field in sample.fields.items():
            offset[row[name], column], size[row[name], column] = field.offset, field.size
            content_hash[row[name], column] = field.hash
    keys = [sample.key.encode(errors="surrogateescape") for sample in samples]
    header = IndexHeader(
        format=INDEX_FORMAT,
        fields=fields,
        num_samples=len(samples),
        num_bytes=tar.size,
        digest=digest,
        header_digest=digest_headers(tar, [offset[:, 0], offset[:, -1]] if samples else []),
        mtime_ns=None if stamp is None else stamp.mtime_ns,
        inode=None if stamp is None else stamp.inode,
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
    with write_whole(path) as file:
        file.write(safetensors.numpy.save(tensors, metadata))


def digest_headers(tar: LocalFile, columns: Iterable[NDArray[np.int64]]) -> str:
    """Hash the blocks before the contents of some samples: their plain tar headers.

    Args:
        tar: The tar.
        columns: For each sample where the content of each field begins, int64 [F], -1 where it lacks one.

    Returns:
        xxh3-64 in hexadecimal.
    """
    digest = xxhash.xxh3_64()
    for column in columns:
        for start in column[column >= BLOCK].tolist():
            digest.update(tar.read(ByteRange(start=start - BLOCK, stop=start)))
    return digest.hexdigest()
