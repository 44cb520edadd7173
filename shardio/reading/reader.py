"""From sample numbers to the bytes of their fields."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError, StaleIndexError
from shardio.reading.stored import StoredSamples
from shardio.shards import Shard, ShardTable

MAX_OPEN_SHARDS = 64
"""Shards kept open by one reader, least recently used first out; each holds two descriptors."""


class SampleReader:
    """Reads samples of a dataset by their numbers in manifest order, for any number of threads.

    Args:
        table: The dataset's shards.
    """

    def __init__(self, table: ShardTable) -> None:
        self._table = table
        self._stops = np.cumsum(table.manifest.shard_sizes)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, samples: NDArray[np.int64], fields: Sequence[str]) -> StoredSamples:
        """Read some fields of some samples.

        Args:
            samples: int64 [n], sample numbers in manifest order.
            fields: Names of fields. A sample's missing ones are missing in the result.

        Returns:
            The n samples, in the order that they were asked for.

        Raises:
            SampleError: If a sample cannot be read.
            FormatError: If a shard is not what it should be.
        """
        if samples.size and not 0 <= samples.min() <= samples.max() < self._stops[-1]:
            raise IndexError(f"samples have numbers below {self._stops[-1]}, got {samples.min()} to {samples.max()}")
        columns: list[list[bytes | None]] = [[None] * len(samples) for _ in fields]
        for shard, places, inner in self._by_shard(samples):
            try:
                found = self._shard(shard).read_many(inner, fields)
            except SampleError as error:
                raise error.moved_to(int(places[error.place])) from error
            for column, contents in zip(columns, found, strict=True):
                for place, content in zip(places.tolist(), contents, strict=True):
                    column[place] = content
        return StoredSamples(
            dict(zip(fields, columns, strict=True)),
            len(samples),
            describe=lambda place, some: self.describe(int(samples[place]), some),
            list_keys=lambda: self.keys(samples),
        )

    def keys(self, samples: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples."""
        keys = [""] * len(samples)
        for shard, places, inner in self._by_shard(samples):
            for place, key in zip(places.tolist(), self._shard(shard).index.keys(inner), strict=True):
                keys[place] = key
        return keys

    def describe(self, sample: int, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and where those of its fields lie, for messages."""
        ((shard, _, inner),) = self._by_shard(np.array([sample]))
        return self._shard(shard).describe(int(inner[0]), fields)

    def close(self) -> None:
        """Close all shards; reading again opens them again."""
        with self._lock:
            self._open.clear()

    def _by_shard(self, samples: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield for each shard its number, which of the samples lie in it, and their places there.

        In the order in which they lie on disk, so that each shard is opened once, and read forwards.
        """
        order = np.argsort(samples, kind="stable")
        shards = np.searchsorted(self._stops, samples[order], side="right")
        firsts = np.flatnonzero(np.diff(shards, prepend=-1))
        for shard, places in zip(
            shards[firsts].tolist(), np.split(order, firsts[1:]), strict=False
        ):  # One empty split for no samples.
            yield shard, places, samples[places] - (self._stops[shard - 1] if shard else 0)

    def _shard(self, number: int) -> Shard:
        with self._lock:
            shard = self._open.get(number)
            if shard is None:
                # Not closed but let go: another thread may be reading it, and the last one that does closes it.
                while len(self._open) >= MAX_OPEN_SHARDS:
                    self._open.popitem(last=False)
                shard = self._open[number] = self._open_shard(number)
            self._open.move_to_end(number)
            return shard

    def _open_shard(self, number: int) -> Shard:
        shard = Shard(self._table.tars[number], self._table.indexes[number])
        expected = self._table.manifest.shards[number]
        if (found := shard.entry) != expected:
            shard.close()
            raise StaleIndexError(
                f"{self._table.tars[number]} is not the shard that the manifest names: it is {found}, expected "
                f"{expected}. Pack the dataset again, or fetch shards and manifest together"
            )
        return shard

    def __getstate__(self) -> ShardTable:
        return self._table

    def __setstate__(self, table: ShardTable) -> None:
        self.__init__(table)  # type: ignore[misc]  # an unpickled reader starts with nothing open
