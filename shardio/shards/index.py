"""The index: the offset, size and hash of each field of each sample in one shard.

A safetensors file (https://github.com/huggingface/safetensors) next to the tar. F fields, n samples, little-endian:

    offset      int64  [F, n]   offset of the content in the tar; -1 if the sample lacks the field
    size        int64  [F, n]   size of the content in bytes; -1 if the sample lacks the field
    hash        uint64 [F, n]   xxh3-64 of the content; 0 if the sample lacks the field
    key_stop    int64  [n]      the end of each key in key_bytes
    key_bytes   uint8  [...]    the keys in UTF-8, end to end

Its metadata has one key, ``shardio``, with a canonical JSON object (see :class:`IndexHeader`), because safetensors
writes several keys in random order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.tar import BLOCK
from shardio.storage import Location, StoredFile

INDEX_FORMAT = 1
INDEX_SUFFIX = ".idx"

MAX_FIELDS = 1024
"""The maximum number of fields. A tar with more does not follow WebDataset's naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredField:
    """The offset in the tar, the size and the xxh3-64 of a field's content."""

    offset: int
    size: int
    hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """The key of one sample, and its fields by name."""

    key: str
    fields: Mapping[str, StoredField]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """The metadata of an index, which describes its shard.

    Attributes:
        format: The version of the index format.
        fields: The names of the fields, sorted.
        num_samples: The number of samples in the shard.
        num_bytes: The size of the tar.
        digest: xxh3-128 of the tar, in hexadecimal.
        header_digest: xxh3-64 of the tar headers of the first and the last sample, in hexadecimal. Together with the
            tar's size, it shows at opening whether the tar is the one that was indexed.
        version: The tar's version in its store if the tar was indexed on first use. None for a packed shard, because
            the shard may be copied and equal input must give equal indexes.
    """

    format: int
    fields: tuple[str, ...]
    num_samples: int
    num_bytes: int
    digest: str
    header_digest: str
    version: str | None = None


def index_location(tar: Location) -> Location:
    """Return the location of a tar's index next to the tar."""
    return tar.folder / (tar.name + INDEX_SUFFIX)


def write_index(
    location: Location, tar: StoredFile, samples: Sequence[StoredSample], digest: str, version: str | None = None
) -> None:
    """Write the index of a tar.

    Args:
        location: The location of the index.
        tar: The finished tar.
        samples: The tar's samples, in tar order.
        digest: xxh3-128 of the tar, in hexadecimal.
        version: The tar's version, if shardio did not pack it.

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
    offset = np.full((len(fields), len(samples)), -1, dtype="<i8")
    size = offset.copy()
    content_hash = np.zeros(offset.shape, dtype="<u8")
    for i, sample in enumerate(samples):
        for name, field in sample.fields.items():
            at = field_indices[name], i
            offset[at], size[at], content_hash[at] = field.offset, field.size, field.hash
    keys = [sample.key.encode(errors="surrogateescape") for sample in samples]
    header = IndexHeader(
        format=INDEX_FORMAT,
        fields=fields,
        num_samples=len(samples),
        num_bytes=tar.size,
        digest=digest,
        header_digest=digest_headers(tar, [offset[:, 0], offset[:, -1]] if samples else []),
        version=version,
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


def digest_headers(tar: StoredFile, starts: Iterable[NDArray[np.int64]]) -> str:
    """Hash the plain tar headers of some samples, which are the blocks before their contents.

    Args:
        tar: The tar.
        starts: For each sample, the offset of each field's content, int64 [F]; -1 if the sample lacks the field.

    Returns:
        xxh3-64 in hexadecimal.
    """
    digest = xxhash.xxh3_64()
    for fields in starts:
        for start in fields[fields >= BLOCK].tolist():
            digest.update(tar.read(start - BLOCK, start))
    return digest.hexdigest()
