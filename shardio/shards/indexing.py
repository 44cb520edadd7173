"""Index tars that other tools packed, and report what they contain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardio.shards.compressed import find_compressed_index, is_compressed, make_compressed_index
from shardio.shards.foreign import find_current_index, make_index
from shardio.shards.index import find_scattered
from shardio.shards.index_columns import find_repeated, read_columns
from shardio.storage import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """What a tar contains.

    Attributes:
        tar: The tar.
        index: Its index.
        was_current: Whether the index existed already.
        num_samples: The number of samples.
        fields: The number of samples that have each field, by its name.
        num_bytes: The size of the tar in bytes, decompressed.
        compression: ``gzip`` for a compressed tar; None for others.
        num_added_by_macos: The number of skipped files that macOS added; None if the index existed already.
        num_without_key: The number of other skipped files; None if the index existed already.
        skipped: The names of the first skipped files.
        scattered: The keys of samples whose members are not adjacent.
        repeated: The keys that several samples have.
    """

    tar: Location
    index: Location
    was_current: bool
    num_samples: int
    fields: dict[str, int]
    num_bytes: int
    compression: str | None
    num_added_by_macos: int | None
    num_without_key: int | None
    skipped: tuple[str, ...]
    scattered: tuple[str, ...]
    repeated: tuple[str, ...]


def index_tar(tar: Location) -> IndexReport:
    """Create the index of a tar, unless it has a current one, and report what the tar contains. The tar is unchanged.

    Raises:
        FormatError: If the tar cannot be indexed, or shardio packed it and its index is missing.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    if is_compressed(tar):
        index, make = find_compressed_index(tar), make_compressed_index
    else:
        index, make = find_current_index(tar), make_index
    contents = None
    was_current = index is not None
    if index is None:
        index, contents = make(tar)
    columns = read_columns(index)
    num_samples = np.count_nonzero(columns.starts >= 0, axis=1).tolist()
    return IndexReport(
        tar=tar,
        index=index,
        was_current=was_current,
        num_samples=len(columns.keys),
        fields=dict(zip(columns.header.fields, num_samples, strict=True)),
        num_bytes=columns.header.num_bytes,
        compression=columns.header.compression,
        num_added_by_macos=None if contents is None else contents.num_added_by_macos,
        num_without_key=None if contents is None else contents.num_without_key,
        skipped=() if contents is None else tuple(contents.skipped),
        scattered=tuple(map(columns.keys.text, np.flatnonzero(find_scattered(columns.starts)).tolist())),
        repeated=tuple(find_repeated(columns.keys)),
    )
