"""Plan what to fetch of remote shards.

The samples of a whole stretch are located at once, and neighbouring ranges are joined. With shuffling, a stretch is one
window in each lane: its samples lie next to each other in few shards, so that few large requests fetch them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from shardio.reading.reader import SampleReader
from shardio.reading.threads import map_in_threads
from shardio.shards import BLOCK, ShardTable
from shardio.storage import StoredFile

MAX_GAP = 4096
"""The largest gap in bytes that is fetched along with its neighbours."""

MAX_RANGE = 8 * 2**20
"""The approximate limit of a range in bytes."""

SHARE_OF_CACHE = 4
"""A stretch takes at most the cache's size divided by this number: two of them are in use at a time."""

FIRST = 128
"""The samples of the first stretch, if the order is shuffled. Few of them are neighbours, so their requests are small,
and the first batches need not wait until most of a window has arrived."""

START_RANGE = 2**20
"""The limit of ranges in the first window, in bytes. With ranges of r samples, the share 1 - (1 - x)^r of a window must
arrive before the share x of its samples can be read. So large ranges would delay the first batches."""

UNSHUFFLED = 256 * 2**20
"""The bytes of a stretch if the order has no windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """A range that is fetched at once.

    Attributes:
        file: The tar.
        start: Its first byte.
        stop: The byte after its last.
        row: The first row in the stretch that needs it.
    """

    file: StoredFile
    start: int
    stop: int
    row: int


class RemoteShards:
    """The samples of remote shards: see :class:`~shardio.reading.read_ahead.RemoteSamples`.

    Args:
        table: The dataset's shards.
        fields: The names of the fields that are read.
        cache_bytes: The size of the cache in bytes.
    """

    def __init__(self, table: ShardTable, fields: Sequence[str], cache_bytes: int) -> None:
        self._reader, self._fields = SampleReader(table, "off"), tuple(fields)
        self._mean = max(1, table.manifest.num_bytes // table.manifest.num_samples)
        self._cache_bytes = cache_bytes

    def choose_lengths(self, first: int | None, size: int | None) -> Iterator[int]:
        mean, largest = self._mean, max(1, self._cache_bytes // SHARE_OF_CACHE // self._mean)
        if size is not None and size > largest:
            warnings.warn(
                f"the cache of {self._cache_bytes / 1e9:.1f} GB is too small for the shuffle: {size} samples of "
                f"{mean / 1e3:.0f} kB are mixed, and the cache should hold {SHARE_OF_CACHE} times as much. Samples may "
                f"be fetched more than once. Set cache_size to {SHARE_OF_CACHE * size * mean / 1e9:.1f} GB, or a "
                "smaller window or fewer lanes",
                RuntimeWarning,
                stacklevel=2,
            )
        is_shuffled = size is not None
        size = min(size or UNSHUFFLED // mean or 1, largest)
        first = min(first or size, size)
        if is_shuffled and first > 2 * FIRST:
            return chain([FIRST, first - FIRST], repeat(size))
        return chain([first], repeat(size))

    def plan(self, indices: NDArray[np.int64], num_before: int) -> list[Callable[[], object]]:
        found = list[_Range]()
        max_bytes = START_RANGE if num_before <= FIRST else MAX_RANGE
        map_in_threads(lambda each: found.extend(self._locate(*each, max_bytes)), list(self._reader.by_shard(indices)))
        groups = _group(sorted(found, key=lambda each: each.row))
        return [partial(group[0].file.prefetch, [(each.start, each.stop) for each in group]) for group in groups]

    def _locate(self, shard: int, rows: NDArray[np.int64], inner: NDArray[np.int64], max_bytes: int) -> list[_Range]:
        file, starts, stops = self._reader.locate(shard, inner, self._fields)  # each [n, F]
        present = starts >= 0
        return _join(file, starts[present] - BLOCK, stops[present], np.repeat(rows, present.sum(axis=1)), max_bytes)


def find_remote_shards(table: ShardTable, fields: Sequence[str]) -> RemoteShards | None:
    """Return what can be read ahead of a dataset's shards; None if they are local or have no cache."""
    cache_bytes = next((tar.store.cache_bytes for tar in table.tars if not tar.store.is_local), None)
    return None if cache_bytes is None else RemoteShards(table, fields, cache_bytes)


def _join(
    file: StoredFile, starts: NDArray[np.int64], stops: NDArray[np.int64], rows: NDArray[np.int64], max_bytes: int
) -> list[_Range]:
    """Join neighbouring ranges of one tar.

    Args:
        file: The tar.
        starts: int64 [n], where the ranges start.
        stops: int64 [n], where they stop. No two overlap.
        rows: int64 [n], the rows that need them.
        max_bytes: The approximate limit of a joined range.
    """
    if not len(starts):
        return []
    order = np.argsort(starts)
    starts, stops, rows = starts[order], stops[order], rows[order]
    is_first = np.empty(len(starts), np.bool_)
    is_first[0] = True
    is_first[1:] = starts[1:] - stops[:-1] > MAX_GAP
    # Long runs are cut where they pass a multiple of the limit, counted from their starts.
    run_starts = starts[np.maximum.accumulate(np.where(is_first, np.arange(len(starts)), 0))]
    place = (starts - run_starts) // max_bytes
    is_first[1:] |= place[1:] != place[:-1]
    firsts = is_first.nonzero()[0]
    lasts = np.append(firsts[1:], len(starts)) - 1
    found = zip(starts[firsts].tolist(), stops[lasts].tolist(), np.minimum.reduceat(rows, firsts).tolist(), strict=True)
    return [_Range(file=file, start=start, stop=stop, row=row) for start, stop, row in found]


def _group(ranges: Sequence[_Range]) -> list[list[_Range]]:
    """Group small ranges of the same tar, so that one message asks for many of them. Keep the order of the first."""
    groups, growing = list[list[_Range]](), dict[int, list[_Range]]()
    sizes = dict[int, int]()
    for each in ranges:
        name = id(each.file)
        if name not in growing or sizes[name] + each.stop - each.start > MAX_RANGE:
            growing[name], sizes[name] = [], 0
            groups.append(growing[name])
        growing[name].append(each)
        sizes[name] += each.stop - each.start
    return groups
