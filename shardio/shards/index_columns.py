"""A whole index in memory, column by column, whether or not it matches its tar."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.index import IndexHeader
from shardio.shards.open_index import open_index, read_layout, read_range
from shardio.storage import Location, StoredFile


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """The keys of an index's n samples.

    Attributes:
        bounds: int64 [n + 1], where the keys start and stop in ``content``.
        content: The keys, end to end.
    """

    bounds: NDArray[np.int64]
    content: bytes

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, sample: int) -> bytes:
        return self.content[self.bounds[sample] : self.bounds[sample + 1]]

    def text(self, sample: int) -> str:
        """Return a sample's key as text."""
        return self[sample].decode(errors="surrogateescape")

    def hash_all(self) -> NDArray[np.uint64]:
        """Return the hash of each key, uint64 [n]: see :func:`hash_key`."""
        bounds = pairwise(self.bounds.tolist())
        return np.fromiter(
            (xxhash.xxh3_64_intdigest(self.content[start:stop]) for start, stop in bounds), np.uint64, len(self)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexColumns:
    """The content of an index of n samples and F fields.

    Attributes:
        header: Its metadata.
        keys: The keys.
        starts: int64 [F, n], the offset of each content in the tar; negative if the sample lacks the field.
        sizes: int64 [F, n], the size of each content in bytes.
        hashes: uint64 [F, n], the xxh3-64 of each content.
    """

    header: IndexHeader
    keys: KeyColumn
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    hashes: NDArray[np.uint64]


def hash_key(key: str) -> int:
    """Return the xxh3-64 of a key."""
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape"))


def find_repeated(keys: KeyColumn) -> dict[str, list[int]]:
    """Return the keys that several samples have, and these samples."""
    hashes = keys.hash_all()
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    found = defaultdict[str, list[int]](list)
    for sample in np.flatnonzero(counts[inverse] > 1).tolist():
        found[keys.text(sample)].append(sample)
    return {key: samples for key, samples in found.items() if len(samples) > 1}


def read_columns(location: Location) -> IndexColumns:
    """Read a whole index. It is not compared with its tar.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(open_index(location)) as file:
        header, begins, num_key_bytes = read_layout(file)
        keys = _read_keys(file, header, begins, num_key_bytes)
        shape = len(header.fields), header.num_samples
        num_bytes = 8 * shape[0] * shape[1]
        if (expected := min(begins.values()) + 3 * num_bytes + 8 * len(keys) + num_key_bytes) != file.size:
            raise FormatError(
                f"the index {location} is damaged: it has {file.size} bytes, expected {expected}. Rebuild it with "
                "shardio repair, or download it again"
            )
        starts, sizes, hashes = (
            np.frombuffer(read_range(file, begins[name], begins[name] + num_bytes), dtype).reshape(shape)
            for name, dtype in (("offset", "<i8"), ("size", "<i8"), ("hash", "<u8"))
        )
    return IndexColumns(header=header, keys=keys, starts=starts, sizes=sizes, hashes=hashes)


def read_keys(location: Location) -> KeyColumn:
    """Read the keys of an index.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(open_index(location)) as file:
        return _read_keys(file, *read_layout(file))


def _read_keys(file: StoredFile, header: IndexHeader, begins: dict[str, int], num_key_bytes: int) -> KeyColumn:
    bounds = np.zeros(header.num_samples + 1, np.int64)
    bounds[1:] = np.frombuffer(read_range(file, begins["key_stop"], begins["key_stop"] + 8 * header.num_samples), "<i8")
    if np.any(bounds[1:] < bounds[:-1]) or bounds[-1] != num_key_bytes:
        raise FormatError(
            f"the index {file.location} is damaged: keys have negative lengths or are outside it. Rebuild it with "
            "shardio repair, or download it again"
        )
    start = begins["key_bytes"]
    return KeyColumn(bounds=bounds, content=read_range(file, start, start + num_key_bytes))
