"""Read samples by their keys, without a loader."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.reading.reader import SampleReader, Verify
from shardio.shards import DatasetSource, Manifest, ShardTable, hash_key, open_table, read_keys
from shardio.storage import StorageOptions, make_access

KEYS_AT_ONCE = 4096
"""The number of keys to read at a time while iterating."""


class _Lookup(NamedTuple):
    """The indices of the samples, by the hashes of their keys.

    Attributes:
        hashes: uint64 [samples], sorted.
        indices: The index of each sample in the dataset, in the same order: uint32 or int64 [samples].
    """

    hashes: NDArray[np.uint64]
    indices: NDArray[np.uint32] | NDArray[np.int64]

    def find(self, key: str) -> NDArray[np.int64]:
        """Return the indices of the samples whose keys may equal ``key``: nearly always one or none."""
        wanted = np.array([hash_key(key)], np.uint64)
        start, stop = (int(self.hashes.searchsorted(wanted, side)[0]) for side in ("left", "right"))
        return self.indices[start:stop].astype(np.int64)


class KeyedShards(Mapping[str, dict[str, Any]]):
    """The samples of a dataset by key. Iteration yields the keys in manifest order. A context manager closes it.

    Opening reads only the manifest, or the headers of the indexes. The first lookup by key reads all keys once and
    keeps a hash of 8 bytes and an index of 4 or 8 bytes for each sample. Lookups then take logarithmic time and read
    the keys' neighbourhood from the index to compare the key itself. Threads can share it.

    >>> with shardio.open("out") as samples:  # doctest: +SKIP
    ...     image = samples["cats/0001"]["jpg"]

    Args:
        table: The dataset's shards.
        verify: ``first`` compares each sample with its index when it is first read; ``off`` compares nothing.
    """

    def __init__(self, table: ShardTable, verify: Verify = "first") -> None:
        self._table = table
        self._reader = SampleReader(table, verify)
        self._known: _Lookup | None = None

    @property
    def manifest(self) -> Manifest:
        """The contents of the dataset."""
        return self._table.manifest

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, sorted. Some samples may lack some."""
        return self._table.manifest.fields

    def read(self, key: str, fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Return some fields of a sample.

        Args:
            key: The sample's key.
            fields: The names of the fields to read; by default, all.

        Returns:
            The contents of those fields that the sample has, as bytes by name, after its key as ``__key__``.

        Raises:
            KeyError: If no sample has the key.
            SampleError: If the sample cannot be read or is damaged.
            FormatError: If two samples have the same key, or a shard is invalid.
        """
        if (index := self._find(key)) is None:
            raise KeyError(f"no sample has the key {key!r} in {self._table.tars[0].folder}")
        stored = self._reader.read(np.array([index]), self.fields if fields is None else list(fields))
        columns = {field: column[0] for field, column in stored.columns.items()}
        return {"__key__": key, **{field: content for field, content in columns.items() if content is not None}}

    def describe(self, key: str) -> str:
        """Return where a sample is stored, as text. Raise KeyError if no sample has the key."""
        if (index := self._find(key)) is None:
            raise KeyError(f"no sample has the key {key!r} in {self._table.tars[0].folder}")
        return self._reader.describe(index, self.fields)[1]

    def close(self) -> None:
        """Close all shards. The next read reopens them."""
        self._reader.close()

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self.read(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), KEYS_AT_ONCE):
            yield from self._reader.keys(np.arange(start, min(start + KEYS_AT_ONCE, len(self))))

    def __len__(self) -> int:
        return self._table.manifest.num_samples

    def __enter__(self) -> KeyedShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KeyedShards of {len(self)} samples in {self._table.tars[0].folder}>"

    def __getstate__(self) -> tuple[ShardTable, SampleReader]:
        return self._table, self._reader

    def __setstate__(self, state: tuple[ShardTable, SampleReader]) -> None:
        self._table, self._reader = state
        self._known = None

    def _find(self, key: str) -> int | None:
        if self._known is None:
            self._known = self._read_lookup()
        found = self._known.find(key)
        keys = self._reader.keys(found) if len(found) else []
        return next((index for index, other in zip(found.tolist(), keys, strict=True) if other == key), None)

    def _read_lookup(self) -> _Lookup:
        hashes = np.empty(len(self), np.uint64)
        stops = np.cumsum(self._table.manifest.shard_sizes).tolist()
        for index, (start, stop) in zip(self._table.indexes, pairwise([0, *stops]), strict=True):
            keys = read_keys(index)
            if len(keys) != stop - start:
                raise FormatError(
                    f"{index} has {len(keys)} samples, but the manifest says {stop - start}: run shardio verify, or "
                    "download shards, index files and manifest together"
                )
            hashes[start:stop] = keys.hash_all()
        order = hashes.argsort(kind="stable")
        hashes = hashes[order]
        self._refuse_duplicates(hashes, order)
        return _Lookup(hashes, order.astype(np.uint32) if len(order) <= 2**32 else order)

    def _refuse_duplicates(self, hashes: NDArray[np.uint64], order: NDArray[np.int64]) -> None:
        """Raise FormatError if two samples have the same key. Different keys may have the same hash."""
        first = dict[str, int]()
        is_repeated = hashes[1:] == hashes[:-1]
        for place in np.flatnonzero(is_repeated).tolist():
            for index in order[place : place + 2].tolist():
                (key,) = self._reader.keys(np.array([index]))
                if (other := first.setdefault(key, index)) != index:
                    places = [self._reader.describe(each, self.fields)[1] for each in (other, index)]
                    raise FormatError(
                        f"two samples have the key {key!r}, in {places[0]} and in {places[1]}: a key must name one "
                        "sample. shardio verify lists all such keys"
                    )


def open(  # noqa: A001  # As in tarfile and PIL.Image.
    source: DatasetSource,
    *,
    verify: Verify = "first",
    storage_options: StorageOptions | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: str | int | None = None,
    cache_shared: bool = False,
) -> KeyedShards:
    """Open a dataset to read its samples by key.

    >>> with shardio.open("out") as samples:  # doctest: +SKIP
    ...     print(len(samples), "cats/0001" in samples)
    ...     sample = samples["cats/0001"]  # {"__key__": "cats/0001", "cls": b"0", "jpg": b"..."}

    Args:
        source: A packed directory, a manifest, a tar, a pattern of tars, a directory of tars, or a list of tars. Tars
            without an index are indexed first.
        verify: ``first`` compares each sample with its index when it is first read; ``off`` compares nothing.
        storage_options: Settings of the store of a remote source, as for :class:`shardio.ShardDataset`.
        cache: A local folder for the fetched parts of a remote source, which processes share and which stays; by
            default, a private one, which is removed at the end.
        cache_size: Its size, such as ``"200GB"``; by default, a fifth of the free space, and at most 32 GiB if the
            cache is private.
        cache_shared: Whether to share the folder ``cache`` with other users, and to trust copies that they wrote.
            Otherwise, only this user and root may be able to write to it.

    Returns:
        A read-only mapping from keys to samples.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
        FormatError: If a file is invalid or the dataset has no samples.
        OSError: If a remote store denies access, or cannot be reached.
        ValueError: If ``verify`` is neither, or a setting of the store or the cache is invalid.
    """
    return KeyedShards(open_table(source, make_access(storage_options, cache, cache_size, cache_shared)), verify)
