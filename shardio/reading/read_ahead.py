"""Fetch what will be read soon into the cache, in the background.

The order is known, so a thread locates the samples of a whole stretch of the epoch at once, joins neighbouring ranges,
and fetches them in the order in which they are first needed. With shuffling, a stretch is one window in each lane: its
samples lie next to each other in few shards, so that few large requests fetch them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass

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

CHECK_S = 0.5
"""How often the thread looks whether the rank has come further or was stopped, in seconds."""

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


class ReadAhead:
    """A thread that fetches what one rank reads soon, at most one stretch further than the rank has come.

    Args:
        table: The dataset's shards.
        fields: The names of the fields that are read.
        upcoming: The indices of the rank's samples in the order of the epoch, int64 arrays of any lengths.
        first: The number of samples in the first stretch; None without windows.
        size: The number of samples in each further stretch; None without windows.
        cache_bytes: The size of the cache in bytes.
    """

    def __init__(
        self,
        table: ShardTable,
        fields: Sequence[str],
        upcoming: Iterator[NDArray[np.int64]],
        first: int | None,
        size: int | None,
        cache_bytes: int,
    ) -> None:
        self._reader, self._fields = SampleReader(table, "off"), tuple(fields)
        mean = max(1, table.manifest.num_bytes // table.manifest.num_samples)
        largest = max(1, cache_bytes // SHARE_OF_CACHE // mean)
        if size is not None and size > largest:
            warnings.warn(
                f"the cache of {cache_bytes / 1e9:.1f} GB is too small for the shuffle: {size} samples of "
                f"{mean / 1e3:.0f} kB are mixed, and the cache should hold {SHARE_OF_CACHE} times as much. Samples may "
                f"be fetched more than once. Set cache_size to {SHARE_OF_CACHE * size * mean / 1e9:.1f} GB, or a "
                "smaller window or fewer lanes",
                RuntimeWarning,
                stacklevel=2,
            )
        size = min(size or UNSHUFFLED // mean or 1, largest)
        self._stretches = _cut(upcoming, min(first or size, size), size)
        self._num_read = 0
        self._moved = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardio-read-ahead", daemon=True)
        self._thread.start()

    def advance(self, num_samples: int) -> None:
        """Note that the rank has read that many further samples."""
        self._num_read += num_samples
        if self._moved.acquire(blocking=False):  # Never wait: the thread looks again soon.
            self._moved.notify_all()
            self._moved.release()

    def close(self) -> None:
        """Stop. What is being fetched arrives all the same."""
        self._is_closed = True

    def _run(self) -> None:
        num_before = begin = 0
        for stretch in self._stretches:
            while self._num_read < begin and not self._is_closed:
                with self._moved:
                    self._moved.wait(CHECK_S)
            begin, num_before = num_before, num_before + len(stretch)
            map_in_threads(self._fetch, self._plan(stretch))
            if self._is_closed:
                return

    def _fetch(self, ranges: Sequence[_Range]) -> None:
        if not self._is_closed:
            ranges[0].file.prefetch([(each.start, each.stop) for each in ranges])

    def _plan(self, stretch: NDArray[np.int64]) -> list[list[_Range]]:
        """Return what to fetch for a stretch, in the order in which it is needed: ranges of one tar at a time."""
        found = list[_Range]()
        map_in_threads(lambda each: found.extend(self._locate(*each)), list(self._reader.by_shard(stretch)))
        return _group(sorted(found, key=lambda each: each.row))

    def _locate(self, shard: int, rows: NDArray[np.int64], inner: NDArray[np.int64]) -> list[_Range]:
        if self._is_closed:
            return []
        file, starts, stops = self._reader.locate(shard, inner, self._fields)  # each [n, F]
        present = starts >= 0
        return _join(file, starts[present] - BLOCK, stops[present], np.repeat(rows, present.sum(axis=1)))


def start_reading_ahead(
    table: ShardTable,
    fields: Sequence[str],
    upcoming: Iterator[NDArray[np.int64]],
    first: int | None = None,
    size: int | None = None,
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which a dataset's shards are read ahead, unless they are local; see :class:`ReadAhead`.

    Its value is a function to call with the number of samples that are about to be read.
    """
    cache_bytes = next((tar.store.cache_bytes for tar in table.tars if not tar.store.is_local), None)
    if cache_bytes is None:
        return nullcontext(ignore)
    return _reading_ahead(ReadAhead(table, fields, upcoming, first, size, cache_bytes))


def ignore(num_samples: int) -> None:
    """Do nothing, because nothing is read ahead."""


@contextmanager
def _reading_ahead(ahead: ReadAhead) -> Iterator[Callable[[int], object]]:
    with closing(ahead):
        yield ahead.advance


def _cut(arrays: Iterator[NDArray[np.int64]], first: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the same values in arrays of other lengths."""
    length, pending, num_pending = first, list[NDArray[np.int64]](), 0
    for array in arrays:
        pending.append(array)
        num_pending += len(array)
        while num_pending >= length:
            whole = np.concatenate(pending)
            yield whole[:length]
            pending, num_pending, length = [whole[length:]], num_pending - length, size
    if num_pending:
        yield np.concatenate(pending)


def _join(
    file: StoredFile, starts: NDArray[np.int64], stops: NDArray[np.int64], rows: NDArray[np.int64]
) -> list[_Range]:
    """Join neighbouring ranges of one tar.

    Args:
        file: The tar.
        starts: int64 [n], where the ranges start.
        stops: int64 [n], where they stop. No two overlap.
        rows: int64 [n], the rows that need them.
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
    place = (starts - run_starts) // MAX_RANGE
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
