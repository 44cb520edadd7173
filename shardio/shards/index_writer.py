"""Write indexes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from shardio.errors import FormatError
from shardio.shards.index import (
    INDEX_FORMAT,
    SCATTERED_FORMAT,
    IndexHeader,
    TarHeaders,
    digest_headers,
    find_scattered,
)
from shardio.storage import Location

MAX_FIELDS = 1024
"""The maximum number of fields. A tar with more does not follow WebDataset's naming."""


MAX_EMPTY = 64
"""The maximum number of entries of an index for each member of its tar. The others say that a sample lacks a field."""

MAX_CELLS = 2**18
"""The number of entries that an index may have in any case."""


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
    location: Location, tar: TarHeaders, samples: Sequence[StoredSample], digest: str, version: str | None = None
) -> None:
    """Write the index of a tar.

    Args:
        location: The location of the index.
        tar: The finished tar, or what is known of it.
        samples: The tar's samples, in the order of their first members.
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
