"""Write indexes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from shardio.errors import FormatError
from shardio.shards.index import INDEX_FORMAT, IndexHeader, digest_headers
from shardio.storage import Location, StoredFile

MAX_FIELDS = 1024
"""The maximum number of fields. A tar with more does not follow WebDataset's naming."""


class StoredField(NamedTuple):
    """The offset in the tar, the size and the xxh3-64 of a field's content."""

    offset: int
    size: int
    hash: int


class StoredSample(NamedTuple):
    """The key of one sample, and its fields by name."""

    key: str
    fields: Mapping[str, StoredField]


_MISSING = StoredField(-1, -1, 0)


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
    columns = [[sample.fields.get(field, _MISSING) for sample in samples] for field in fields]
    offset, size, content_hash = (
        np.array([[field[place] for field in column] for column in columns], dtype).reshape(len(fields), len(samples))
        for place, dtype in enumerate(("<i8", "<i8", "<u8"))
    )
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
