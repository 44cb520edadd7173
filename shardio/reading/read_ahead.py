"""Read image files and joined datasets, and fetch remote samples that will be read soon.

The order is known, so a thread plans the requests for a whole *stretch* of the epoch at once. With shuffling, a stretch
consists of one or more windows of the order. In each window, a rank's samples are adjacent in a few shards, so a few
large requests fetch these samples.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, pairwise, repeat, zip_longest
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shardio.errors import SampleError
from shardio.process import let_through
from shardio.reading.reader import SampleReader, StoredSamples, map_in_threads
from shardio.shards import BLOCK, LABEL_FIELD, Ints, ShardTable
from shardio.storage import REMOTE_PIECE, Location, ReplacedError, StoredFile
from shardio.values import format_bytes

if TYPE_CHECKING:
    from shardio.storage.listing import CachedFiles


LabeledFile = tuple[str, int]
"""An image's path (or its URL in a remote store), and its label."""

Value = TypeVar("Value")

LocatedSample = tuple[int, Any]
"""The number of a reader among the joined readers, and the sample in the form that this reader accepts."""

CHECK_S = 0.5
"""The interval in seconds at which the thread checks whether the rank has advanced or stopped."""

MAX_FILES = 1024
"""The maximum number of files in a stretch. Requests for files cannot be joined, so a longer stretch would save no
requests."""

MAX_BYTES = 256 * 2**20
"""The approximate maximum number of bytes in a stretch of files."""

SHARE_FOR_FILES = 8
"""A stretch of files takes at most the cache's size divided by this number, because the cache removes whole bundles."""

FILES_TOGETHER = 8
"""The number of files that one message to the storage process requests."""

MAX_GAP = 4096
"""Gaps of at most this many bytes between ranges are always fetched along with the ranges."""

PART_FOR_GAPS = 16
"""Larger gaps between a tar's ranges are also fetched, smallest first, up to a sum of the ranges' size divided by this
number. At the ends of a rank's part of a window, two ranks' samples alternate, so separate requests would cost more."""

MAX_RANGE = REMOTE_PIECE
"""The approximate maximum size of a range in bytes."""

SHARE_OF_CACHE = 4
"""A stretch of samples in shards takes at most the cache's size divided by this number, because two stretches are in
use at the same time."""

FIRST = 128
"""The number of samples in the first stretch, if the order is shuffled. Few of these samples are neighbors, so their
requests are small, and the first batches need not wait for most of the order's window. Meanwhile, large requests fetch
the rest of the window: each of its pieces has samples that are needed early. Smaller pieces would arrive later."""

SHUFFLED = 64 * 2**20
"""The approximate minimum size of a stretch in bytes, if the order is shuffled. With many ranks, each rank reads
only a small part of each window, so it plans several windows at once."""

UNSHUFFLED = 256 * 2**20
"""The size of a stretch in bytes if the order is not shuffled."""


class FileReader:
    """A reader of labeled image files. Each file is a sample, and its path or URL is the sample's key.

    Args:
        root: The directory that contains the files.
        image_field: The name of the field that contains the image.
        files: The files, if they are read through a cache.
    """

    def __init__(self, root: Location, image_field: str, files: CachedFiles | None = None) -> None:
        self._root, self._image_field, self.files = root, image_field, files

    def read(
        self, samples: Sequence[LabeledFile], fields: Sequence[str], deferred: Container[str] = ()
    ) -> StoredSamples:
        """Read some files. Each sample has an image and a label, and is read in full, whatever the other arguments are.

        Raises:
            SampleError: If a file cannot be read.
            StoreError: If a remote store keeps failing.
            PermissionError: If a remote store rejects the credentials.
            TypeError: If a label is not an integer.
        """
        if self.files is None:
            images = [self._read_uncached(row, path) for row, (path, _) in enumerate(samples)]
        else:
            images = self._read_cached(self.files, samples)
        labels = [_write_label(path, label) for path, label in samples]
        return StoredSamples(
            {self._image_field: images, LABEL_FIELD: labels},
            len(samples),
            describe=lambda row, some: self.describe(samples[row], some),
            list_keys=lambda: [path for path, _ in samples],
        )

    def describe(self, sample: LabeledFile, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and the root directory, for messages."""
        return sample[0], str(self._root)

    def find_key(self, path: str) -> str:
        """Return the key of a file in its store."""
        return path.removeprefix(self._root.store.prefix)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read_uncached(self, row: int, path: str) -> bytes:
        store = self._root.store
        try:
            return store.read_whole(self.find_key(path))
        except (OSError, ReplacedError) as error:
            let_through(error)
            if not (store.is_local or isinstance(error, FileNotFoundError | ReplacedError)):
                raise  # The store or the credentials are the cause, not the sample.
            raise self._unreadable(row, path, str(error)) from error

    def _read_cached(self, files: CachedFiles, samples: Sequence[LabeledFile]) -> list[bytes]:
        keys = [self.find_key(path) for path, _ in samples]
        present = [files.read_present(key) for key in keys]
        missing = [key for key, content in zip(keys, present, strict=True) if content is None]
        if len(missing) > 1:
            # Fetch in parallel, and ignore errors: reading reports them with their samples.
            with suppress(FileNotFoundError, PermissionError, ReplacedError):
                files.prefetch(missing, is_urgent=True)
        return [
            self._read_one(files, row, samples[row][0]) if content is None else content
            for row, content in enumerate(present)
        ]

    def _read_one(self, files: CachedFiles, row: int, path: str) -> bytes:
        try:
            return files.read(self.find_key(path))
        except (FileNotFoundError, ReplacedError) as error:
            let_through(error)
            kept = files.listing.path
            remedy = f". If the bucket has changed since it was listed, delete the listing {kept}" if kept else ""
            raise self._unreadable(row, path, f"{error}{remedy}") from error

    def _unreadable(self, row: int, path: str, cause: str) -> SampleError:
        return SampleError(f"the image {path} cannot be read: {cause}", row=row, key=path, where=str(self._root))


def _write_label(path: str, label: int) -> bytes:
    try:
        return b"%d" % operator.index(label)
    except TypeError:  # b"%d" alone would truncate floats.
        raise TypeError(
            f"the labels in ImageFolder.samples must be integers, got {label!r} for {path}: set integer labels there. "
            "To return other targets, override __getitem__"
        ) from None


class JoinedReader:
    """A reader that reads each sample with one of several readers."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    def read(
        self, samples: Sequence[LocatedSample], fields: Sequence[str], deferred: Container[str] = ()
    ) -> StoredSamples:
        """Read fields of samples: see :meth:`SampleReader.read`."""
        columns: dict[str, list[Any]] = {}
        found: list[tuple[list[int], StoredSamples]] = []
        parts = np.array([part for part, _ in samples], np.int64)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part).tolist()
            try:
                inner: Any = [samples[row][1] for row in rows]
                if isinstance(self._readers[part], SampleReader):  # Other kinds of reader accept lists.
                    inner = np.array(inner, np.int64)
                stored = self._readers[part].read(inner, fields, deferred)
            except SampleError as error:
                raise error.at_row(rows[error.row]) from error
            found.append((rows, stored))
            for field, contents in stored.columns.items():
                _put(contents, columns.setdefault(field, [None] * len(samples)), rows)
        return StoredSamples(
            columns,
            len(samples),
            describe=lambda row, some: self.describe(samples[row], some),
            list_keys=partial(_list_keys, found, len(samples)),
        )

    def describe(self, sample: LocatedSample, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key, and the location of some of its fields, for messages."""
        part, inner = sample
        return self._readers[part].describe(inner, fields)

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        for reader in self._readers:
            reader.close()


SOURCE_FIELD = "source.cls"
"""The field of a mixture's samples that holds the number of each sample's source, as digits."""


class SourceReader:
    """A reader that adds :data:`SOURCE_FIELD` to a mixture's samples.

    Args:
        reader: The reader of the other fields.
        starts: int64 [sources], the index of each source's first sample, if the reader takes indices.
    """

    def __init__(self, reader: SampleReader | JoinedReader, starts: Ints) -> None:
        self._reader, self._starts = reader, starts

    def read(self, samples: Any, fields: Sequence[str], deferred: Container[str] = ()) -> StoredSamples:
        """Read fields of samples: see :class:`SampleReader` and :class:`JoinedReader`."""
        stored = self._reader.read(samples, [field for field in fields if field != SOURCE_FIELD], deferred)
        if SOURCE_FIELD in fields:
            if isinstance(self._reader, JoinedReader):
                sources = [part for part, _ in samples]
            else:
                sources = (np.searchsorted(self._starts, samples, side="right") - 1).tolist()
            stored.columns = {**stored.columns, SOURCE_FIELD: [b"%d" % source for source in sources]}
        return stored

    def describe(self, sample: Any, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key, and the location of some of its fields, for messages."""
        return self._reader.describe(sample, [field for field in fields if field != SOURCE_FIELD])

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self._reader.close()


def _list_keys(found: Sequence[tuple[list[int], StoredSamples]], num_samples: int) -> list[str]:
    keys = [""] * num_samples
    for rows, stored in found:
        _put(stored.keys(), keys, rows)
    return keys


def _put(values: Sequence[Value], column: list[Value], rows: Sequence[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        column[row] = value


Reader = SampleReader | FileReader | JoinedReader | SourceReader


class RemoteSamples(Protocol):
    """Remote samples that can be fetched into a cache."""

    def choose_lengths(self, window: int | None) -> Iterator[tuple[int, int]]:
        """Endlessly yield, for each stretch, its minimum and maximum numbers of samples, both at least 1.

        A stretch ends where a window of the order ends, unless it would be too long.

        Args:
            window: The number of the rank's samples in a window of the order, or None without shuffling.
        """

    def plan(self, indices: Ints) -> Sequence[Callable[[], object]]:
        """Return functions that fetch the samples of a stretch, in the order in which they are needed.

        Args:
            indices: int64 [n], the indices of the samples, in the order in which they are needed.
        """


def read_epoch_ahead(
    samples: RemoteSamples, upcoming: Iterator[tuple[Ints, Ints]], window: int | None = None
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which samples are read ahead in a known order.

    The context's value is a function to call with the number of samples that are about to be read.

    Args:
        samples: The samples.
        upcoming: The window numbers of the rank's samples, and the samples' indices, in the order of the epoch:
            int64 arrays of any lengths.
        window: The number of the rank's samples in a window of the order, or None without shuffling.
    """
    return _reading_ahead(ReadAhead(samples, _cut(upcoming, samples.choose_lengths(window))))


@contextmanager
def read_batches_ahead(samples: RemoteSamples) -> Iterator[Callable[[Ints], object]]:
    """Read ahead the batches of a sampler. The context's value is a function to call with each batch's indices."""
    batches = SimpleQueue[Ints | None]()

    def take() -> Iterator[Ints]:
        while (indices := batches.get()) is not None:
            yield indices

    with _reading_ahead(ReadAhead(samples, take())) as advance:

        def add(indices: Ints) -> None:
            batches.put(indices)
            advance(len(indices))

        try:
            yield add
        finally:
            batches.put(None)


def read_nothing_ahead() -> AbstractContextManager[Callable[[object], object]]:
    """Return a context in which nothing is read ahead."""
    return nullcontext(lambda samples: None)


@contextmanager
def _reading_ahead(ahead: ReadAhead) -> Iterator[Callable[[int], object]]:
    with closing(ahead):
        yield ahead.advance


def _cut(upcoming: Iterator[tuple[Ints, Ints]], lengths: Iterator[tuple[int, int]]) -> Iterator[Ints]:
    """Cut the samples of an epoch into stretches: see :func:`read_epoch_ahead` and :class:`RemoteSamples`."""
    pending, num_pending, window, (shortest, longest) = list[Ints](), 0, -1, next(lengths)
    for windows, indices in upcoming:
        bounds = np.flatnonzero(np.diff(windows, prepend=window)).tolist()
        window = windows[-1]
        for start, stop in pairwise(sorted({0, *bounds, len(indices)})):
            if start in bounds and num_pending >= shortest:
                yield np.concatenate(pending)
                pending, num_pending, (shortest, longest) = [], 0, next(lengths)
            rest = indices[start:stop]
            while num_pending + len(rest) >= longest:
                num_taken = longest - num_pending
                yield np.concatenate([*pending, rest[:num_taken]])
                pending, num_pending, rest = [], 0, rest[num_taken:]
                shortest, longest = next(lengths)
            pending.append(rest)
            num_pending += len(rest)
    if num_pending:
        yield np.concatenate(pending)


class ReadAhead:
    """A thread that fetches the samples that one rank will read soon, up to the end of the rank's next stretch.

    Args:
        samples: The samples.
        stretches: The indices of the rank's samples in the order of the epoch: int64 arrays, one for each stretch.
    """

    def __init__(self, samples: RemoteSamples, stretches: Iterator[Ints]) -> None:
        self._samples, self._stretches = samples, stretches
        self._num_read = 0
        self._moved = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardio-read-ahead", daemon=True)
        self._thread.start()

    def advance(self, num_samples: int) -> None:
        """Record that the rank has read ``num_samples`` more samples."""
        self._num_read += num_samples
        if self._moved.acquire(blocking=False):  # Do not wait for the lock: the thread checks again soon.
            self._moved.notify_all()
            self._moved.release()

    def close(self) -> None:
        """Stop the thread when its requests in progress have finished, but do not wait for the thread to end."""
        self._is_closed = True

    def _run(self) -> None:
        num_before = begin = 0
        for stretch in self._stretches:
            while self._num_read < begin and not self._is_closed:
                with self._moved:
                    self._moved.wait(CHECK_S)
            if self._is_closed:
                return
            begin, num_before = num_before, num_before + len(stretch)
            map_in_threads(self._fetch, self._samples.plan(stretch))

    def _fetch(self, fetch: Callable[[], object]) -> None:
        if not self._is_closed:
            fetch()


def find_remote_shards(table: ShardTable, fields: Sequence[str]) -> RemoteShards | None:
    """Return a dataset's shards for reading ahead, or None if they are local or have no cache."""
    cache_bytes = next((tar.store.cache_bytes for tar in table.tars if not tar.store.is_local), None)
    return None if cache_bytes is None else RemoteShards(table, fields, cache_bytes)


class RemoteShards:
    """The samples of remote shards: see :class:`RemoteSamples`. ``cache_bytes`` is the size of the cache."""

    def __init__(self, table: ShardTable, fields: Sequence[str], cache_bytes: int) -> None:
        self._reader, self._fields = SampleReader(table, "off"), tuple(fields)
        self._mean = max(1, table.manifest.num_bytes // table.manifest.num_samples)
        self._cache_bytes = cache_bytes

    def choose_lengths(self, window: int | None) -> Iterator[tuple[int, int]]:
        mean, longest = self._mean, max(1, self._cache_bytes // SHARE_OF_CACHE // self._mean)
        if window is None:
            length = min(max(1, UNSHUFFLED // mean), longest)
            return repeat((length, length))
        if window > longest:
            warnings.warn(
                f"the cache of {format_bytes(self._cache_bytes)} is too small for the shuffle: {window:,} samples of "
                f"{format_bytes(mean)} each are mixed, and the cache should hold {SHARE_OF_CACHE} times their total "
                "size. Samples may be fetched more than once. Set cache_size to "
                f"{format_bytes(SHARE_OF_CACHE * window * mean)}, or use a smaller window",
                RuntimeWarning,
                stacklevel=2,
            )
        first = min(FIRST, longest)
        return chain([(first, first)], repeat((max(1, SHUFFLED // mean), longest)))

    def plan(self, indices: Ints) -> list[Callable[[], object]]:
        found = list[_Range]()
        map_in_threads(lambda each: found.extend(self._locate(*each)), list(self._reader.by_shard(indices)))
        groups = _group(sorted(found, key=lambda each: each.row))
        return [partial(group[0].file.prefetch, [(each.start, each.stop) for each in group]) for group in groups]

    def _locate(self, shard: int, rows: Ints, inner: Ints) -> list[_Range]:
        file, starts, stops, _ = self._reader.locate(shard, inner, self._fields)  # each [n, F]
        present = starts >= 0
        rows = np.repeat(rows, present.sum(axis=1))
        joined = _join(starts[present] - BLOCK, stops[present], rows)
        return [_Range(file, *each) for each in zip(*(column.tolist() for column in joined), strict=True)]


class _Range(NamedTuple):
    """A range of a tar to fetch in one piece, and the first row of the stretch that needs the range."""

    file: StoredFile
    start: int
    stop: int
    row: int


def estimate_traffic(indices: Ints, shard_sizes: Ints, shard_bytes: Ints) -> tuple[int, int]:
    """Return the number of requests, and the number of bytes to fetch, for a rank's samples in a stretch.

    All samples of a shard are assumed to have the same size.

    Args:
        indices: int64 [n], the samples' indices in manifest order.
        shard_sizes: int64 [shards], the number of samples in each shard.
        shard_bytes: int64 [shards], each shard's size in bytes.
    """
    stops = np.cumsum(shard_sizes)
    shards = np.searchsorted(stops, indices, side="right")
    sample_bytes = shard_bytes // np.maximum(shard_sizes, 1)
    starts = (indices - (stops - shard_sizes)[shards]) * sample_bytes[shards]
    num_requests = num_bytes = 0
    for shard in np.unique(shards).tolist():
        own = starts[shards == shard]
        begins, ends, _ = _join(own, own + sample_bytes[shard], own)
        num_requests += len(begins)
        num_bytes += int((ends - begins).sum())
    return num_requests, num_bytes


def _join(starts: Ints, stops: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Join neighboring ranges of one tar.

    Args:
        starts: int64 [n], the offsets of the ranges' first bytes.
        stops: int64 [n], the offsets just after the ranges' last bytes. No two ranges overlap.
        rows: int64 [n], the rows that need the ranges.

    Returns:
        The offsets of the joined ranges' first bytes and just after their last bytes, and the first row to need each.
    """
    if not len(starts):
        return starts, stops, rows
    order = np.argsort(starts)
    starts, stops, rows = starts[order], stops[order], rows[order]
    gaps = np.maximum(starts[1:] - stops[:-1], 0)  # A sample may be repeated.
    by_size = np.argsort(gaps)
    is_affordable = np.cumsum(gaps[by_size]) <= (stops - starts).sum() // PART_FOR_GAPS
    is_first = np.empty(len(starts), np.bool_)
    is_first[0] = True
    is_first[1:] = gaps > MAX_GAP
    is_first[1:][by_size[is_affordable]] = False
    # Cut each long run of ranges at multiples of ``MAX_RANGE`` from its start.
    run_starts = starts[np.maximum.accumulate(np.where(is_first, np.arange(len(starts)), 0))]
    place = (starts - run_starts) // MAX_RANGE
    is_first[1:] |= place[1:] != place[:-1]
    firsts = is_first.nonzero()[0]
    lasts = np.append(firsts[1:], len(starts)) - 1
    return starts[firsts], stops[lasts], np.minimum.reduceat(rows, firsts)


def _group(ranges: Sequence[_Range]) -> list[list[_Range]]:
    """Group small ranges of one tar to request them in one message. Order groups by their first ranges."""
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


class RemoteFiles:
    """Remote files as samples: see :class:`RemoteSamples`.

    Args:
        files: The files.
        list_keys: A function that returns the keys of the files of some samples, given the samples' indices.
    """

    def __init__(self, files: CachedFiles, list_keys: Callable[[Ints], Sequence[str]]) -> None:
        self._files, self._list_keys = files, list_keys

    def choose_lengths(self, window: int | None) -> Iterator[tuple[int, int]]:
        mean = max(1, int(self._files.listing.sizes.mean()))
        largest = min(MAX_BYTES, self._files.cache_bytes // SHARE_FOR_FILES) // mean
        length = max(1, min(MAX_FILES, largest))
        return repeat((length, length))

    def plan(self, indices: Ints) -> list[Callable[[], object]]:
        keys = self._list_keys(indices)
        starts = range(0, len(keys), FILES_TOGETHER)
        return [partial(self._files.prefetch, keys[start : start + FILES_TOGETHER]) for start in starts]


class RemoteParts:
    """The samples of several datasets: see :class:`RemoteSamples`.

    Args:
        parts: The remote samples of each dataset, or None for a local dataset.
        divide: A function that divides indices among the datasets, in order. For each dataset, it yields the dataset's
            number, and the indices of samples in the dataset.
    """

    def __init__(
        self, parts: Sequence[RemoteSamples | None], divide: Callable[[Ints], Iterator[tuple[int, Ints]]]
    ) -> None:
        self._parts, self._divide = parts, divide

    def choose_lengths(self, window: int | None) -> Iterator[tuple[int, int]]:
        chosen = [part.choose_lengths(window) for part in self._parts if part]
        for_all = zip(*chosen, strict=True)
        return ((min(low for low, _ in lengths), min(high for _, high in lengths)) for lengths in for_all)

    def plan(self, indices: Ints) -> list[Callable[[], object]]:
        divided = self._divide(indices)
        plans = [part.plan(inner) for number, inner in divided if (part := self._parts[number])]
        # Alternate between the datasets, because their samples are mixed.
        return [fetch for fetch in chain.from_iterable(zip_longest(*plans)) if fetch is not None]
