"""Read the samples of datasets in any order, to copy them. Contents and tar headers are compared with the indexes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from shardio.sample import Sample
from shardio.shards import PartCache, Shard, ShardTable

MAX_OPEN = 256
"""The maximum number of open shards."""

MAX_SAMPLES = 256
"""The maximum number of samples that are read together."""

MAX_BYTES = 32 * 2**20
"""The maximum number of bytes that are read together, unless one sample has more."""


class CopySource:
    """The samples of one or more datasets, numbered through. A context manager closes their shards.

    Args:
        tables: The datasets.
    """

    def __init__(self, tables: Sequence[ShardTable]) -> None:
        self._files = [pair for table in tables for pair in zip(table.tars, table.indexes, strict=True)]
        self._stops = np.cumsum([entry.num_samples for table in tables for entry in table.manifest.shards])
        self._parts = PartCache()
        self._open = OrderedDict[int, Shard]()

    def __len__(self) -> int:
        return int(self._stops[-1])

    def read(self, order: NDArray[np.int64] | None = None) -> Iterator[Sample]:
        """Yield samples with all their fields, sorted by name. Memory is bounded.

        Args:
            order: int64 [n], the samples' numbers; by default, all in their order.

        Raises:
            SampleError: If a sample is damaged or cannot be read.
            StaleIndexError: If a tar has changed since it was indexed.
        """
        num_samples = len(self) if order is None else len(order)
        for first in range(0, num_samples, MAX_SAMPLES):
            stop = min(first + MAX_SAMPLES, num_samples)
            numbers = np.arange(first, stop) if order is None else order[first:stop]
            shards = np.searchsorted(self._stops, numbers, side="right")
            sizes = self._measure(shards, numbers)
            start = 0
            while start < len(numbers):
                within = np.cumsum(sizes[start:]) <= MAX_BYTES
                stop = start + max(1, int(np.count_nonzero(within)))
                yield from self._read_together(shards[start:stop], numbers[start:stop])
                start = stop

    def _measure(self, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of bytes of the contents of some samples, int64 [n]."""
        sizes = np.zeros(len(numbers), np.int64)
        for shard_id in np.unique(shards).tolist():
            rows = shards == shard_id
            index = self._shard(shard_id).index
            starts, stops, _ = index.locate(self._within(shard_id, numbers[rows]), index.header.fields)
            sizes[rows] = (stops - starts).sum(axis=1)
        return sizes

    def _read_together(self, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[Sample]:
        found = dict[int, Sample]()
        for shard_id in np.unique(shards).tolist():
            shard, rows = self._shard(shard_id), np.flatnonzero(shards == shard_id)
            samples = self._within(shard_id, numbers[rows])
            fields, keys = shard.index.header.fields, shard.index.keys(samples)
            columns = shard.read_many(samples, fields, np.ones(len(samples), np.bool_))
            for i, row in enumerate(rows.tolist()):
                contents = {field: column[i] for field, column in zip(fields, columns, strict=True)}
                there = {field: content for field, content in contents.items() if content is not None}
                found[row] = Sample(key=keys[i], fields=there, origin=str(shard.tar.location))
        return [found[row] for row in range(len(numbers))]

    def _within(self, shard_id: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of samples in their shard."""
        first = int(self._stops[shard_id - 1]) if shard_id else 0
        return numbers - first

    def _shard(self, shard_id: int) -> Shard:
        if shard_id not in self._open:
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[shard_id] = Shard(*self._files[shard_id], self._parts)
        self._open.move_to_end(shard_id)
        return self._open[shard_id]

    def __enter__(self) -> CopySource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._open.values():
            shard.close()
        self._open.clear()
