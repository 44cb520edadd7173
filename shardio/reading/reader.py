"""Read the samples of shards, by their indices or by their keys."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError, ShardioError, StaleIndexError, StoreError
from shardio.sample import Sample
from shardio.shards import Ints, Manifest, SeenShards, Shard, ShardTable, Unseen, hash_key, read_keys, read_shards
from shardio.storage import Location, ReplacedError, StorageOptions, StoredFile, make_access, map_locations
from shardio.values import check_choice, count

if TYPE_CHECKING:
    from shardio.shards import DatasetSource

Columns = Mapping[str, Sequence[bytes | None]]
"""For each field, the content of each sample, or None if the sample lacks the field."""

Item = TypeVar("Item")

Result = TypeVar("Result")

NUM_THREADS = 16
"""The maximum number of threads that open shards or fetch samples at the same time."""

Verify = Literal["first", "off"]
"""When samples are compared with the index file: on their first read, or never. With ``first``, samples of
remote shards are compared at each read, because their bytes may be fetched again."""

MAX_FAILURES = 3
"""The number of times to fetch a damaged remote sample, or to open a damaged shard. If all attempts fail, the store's
copy is probably damaged."""

MAX_OPEN_SHARDS = 1024
"""The maximum number of shards that a reader keeps open, at about 5 kB each. Other shards are reopened as needed."""

MAX_INDEX_BYTES = 128 * 2**20
"""The maximum memory that the indexes of open shards take, in bytes."""

SHARDS_AT_ONCE = 64
"""The number of shards whose samples are read together."""

KEYS_AT_ONCE = 4096
"""The number of keys to read at a time while iterating."""


class StoredSamples(Sequence[Sample]):
    """Samples in columns, because many small objects would be slow. Sample objects are created on demand.

    Args:
        columns: The contents by field, in the order in which the fields were requested.
        num_samples: The number of samples.
        describe: A function that returns the key of the sample in a row, and the place where some fields are stored.
        list_keys: A function that returns the keys of all samples.
        remedy: A remedy to add to messages about a sample that lacks a field.
    """

    def __init__(
        self,
        columns: Columns,
        num_samples: int,
        *,
        describe: Callable[[int, Sequence[str]], tuple[str, str]],
        list_keys: Callable[[], list[str]],
        remedy: str = "",
    ) -> None:
        self.columns = columns
        self.remedy = remedy
        self._num_samples = num_samples
        self._describe = describe
        self._list_keys = list_keys

    def keys(self) -> list[str]:
        """Return the samples' keys."""
        return self._list_keys()

    def describe(self, row: int, fields: Sequence[str] | None = None) -> tuple[str, str]:
        """Return a sample's key, and the location of some fields (by default, those that were read), for messages."""
        return self._describe(row, tuple(self.columns) if fields is None else fields)

    def __len__(self) -> int:
        return self._num_samples

    @overload
    def __getitem__(self, row: int) -> Sample: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Sample]: ...
    def __getitem__(self, row: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._num_samples))]
        if not -self._num_samples <= row < self._num_samples:
            raise IndexError(f"row {row} is out of range: the dataset has {count(self._num_samples, 'sample')}")
        row %= self._num_samples
        key, origin = self.describe(row)
        fields = {field: content for field, column in self.columns.items() if (content := column[row]) is not None}
        return Sample(key=key, fields=fields, origin=origin)


class SampleReader:
    """A reader of a dataset's samples by their indices in manifest order. Threads can share a reader.

    When a sample is first read, its tar headers and contents are compared with the index file. If a tar has changed
    when it is reopened, its samples are compared again.

    Args:
        table: The dataset's shards.
        verify: ``first`` compares samples when they are first read; ``off`` compares nothing.

    Raises:
        ValueError: If ``verify`` is neither ``first`` nor ``off``.
    """

    def __init__(self, table: ShardTable, verify: Verify = "first") -> None:
        self._table = table
        self._verify: Verify = check_choice("verify", verify, Verify)
        self._stops = np.cumsum(table.manifest.shard_sizes)
        self._starts = self._stops - table.manifest.shard_sizes
        self._seen = SeenShards(table.manifest.shard_sizes)
        # There are no locks, because a forked child could inherit a held lock. Each operation is atomic.
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._num_index_bytes = 0  # An upper bound on the memory that the indexes of open shards take.

    def read(self, indices: Ints, fields: Sequence[str], deferred: Container[str] = ()) -> StoredSamples:
        """Read fields of samples.

        Args:
            indices: int64 [n], the samples' indices in manifest order.
            fields: The names of the fields to read. The result omits fields that a sample lacks.
            deferred: The fields for which the result may have a FileRange instead of the content. A field has a
                FileRange only if its shard is local and the field need not be compared with the index file.

        Returns:
            The n samples, in the order of ``indices``.

        Raises:
            SampleError: If a sample cannot be read.
            FormatError: If a shard is invalid or does not match the manifest.
            IndexError: If an index is out of range.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self._stops[-1]:
            raise IndexError(
                f"the dataset has {count(int(self._stops[-1]), 'sample')}, got indices {indices.min()} to "
                f"{indices.max()}"
            )
        columns: list[list[Any]] = [[None] * len(indices) for _ in fields]
        by_shard = list(self.by_shard(indices))
        self._open_remote([shard for shard, _, _ in by_shard])
        for first in range(0, len(by_shard), SHARDS_AT_ONCE):
            for rows, found in self._read_together(by_shard[first : first + SHARDS_AT_ONCE], fields, deferred):
                for column, contents in zip(columns, found, strict=True):
                    for row, content in zip(rows, contents, strict=True):
                        column[row] = content
        return StoredSamples(
            dict(zip(fields, columns, strict=True)),
            len(indices),
            describe=lambda row, some: self.describe(int(indices[row]), some),
            list_keys=lambda: self.keys(indices),
        )

    def keys(self, indices: Ints) -> list[str]:
        """Return the keys of samples."""
        keys = [""] * len(indices)
        for shard, rows, inner in self.by_shard(indices):
            found = self._use(shard, lambda opened: opened.index.keys(inner))  # noqa: B023  # Called now.
            for row, key in zip(rows.tolist(), found, strict=True):
                keys[row] = key
        return keys

    def describe(self, index: int, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key, and the location of some of its fields, for messages."""
        ((shard, _, inner),) = self.by_shard(np.array([index]))
        return self._use(shard, lambda opened: opened.describe(int(inner[0]), fields))

    def close(self) -> None:
        """Close all shards; the next read reopens those that it needs."""
        self._open.clear()
        self._num_index_bytes = 0

    def locate(
        self, shard: int, inner: Ints, fields: tuple[str, ...]
    ) -> tuple[StoredFile, Ints, Ints, NDArray[np.uint64]]:
        """Locate fields of samples in a shard's tar.

        Args:
            shard: The shard's place in the manifest.
            inner: int64 [n], the samples' indices in the shard.
            fields: The names of F fields.

        Returns:
            The open tar; the start and the stop of each content, int64 [n, F], or -1 if the sample lacks the field; and
            the hash of each content, uint64 [n, F].
        """

        def locate(opened: Shard) -> tuple[StoredFile, Ints, Ints, NDArray[np.uint64]]:
            opened.index.prefetch(inner, fields)
            return opened.tar, *opened.index.locate(inner, fields)

        return self._use(shard, locate)

    def by_shard(self, indices: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield each shard's place in the manifest, its samples' rows in ``indices``, and their indices in the shard.

        Shards and samples are in manifest order, so each shard is opened once and read forward.
        """
        order = indices.argsort(kind="stable")
        ordered = indices[order]
        shards = self._stops.searchsorted(ordered, side="right")
        inner = ordered - self._starts[shards]
        firsts = np.flatnonzero(shards[1:] != shards[:-1]) + 1
        for start, stop in pairwise([0, *firsts.tolist(), len(order)] if len(order) else []):
            yield int(shards[start]), order[start:stop], inner[start:stop]

    def _read_together(
        self, parts: Sequence[tuple[int, Ints, Ints]], fields: Sequence[str], deferred: Container[str]
    ) -> list[tuple[list[int], list[list[Any]]]]:
        """Return the rows and the fields of the samples that :meth:`by_shard` found.

        All shards are read together. If anything is wrong, each shard is read alone instead, to fetch damaged
        bytes again, reopen replaced files, and raise the errors.
        """
        if len(parts) > 1:
            with suppress(SampleError, FormatError):
                visits = [(self._get_open(shard), shard, inner) for shard, _, inner in parts]
                found = self._read(visits, fields, deferred)
                return [(np.concatenate([rows for _, rows, _ in parts]).tolist(), found)]
        return [(rows.tolist(), self._read_alone(shard, rows, inner, fields, deferred)) for shard, rows, inner in parts]

    def _read(
        self, visits: Sequence[tuple[Shard, int, Ints]], fields: Sequence[str], deferred: Container[str]
    ) -> list[list[Any]]:
        """Read fields of samples: see :func:`read_shards`. A visit is a shard, its place and the samples to read."""
        opened = [(shard, inner) for shard, _, inner in visits]
        if self._verify == "off":
            return read_shards(opened, fields, deferred=deferred)
        names = tuple(fields)
        records = [
            self._seen.find(place, names, shard.tar.version, is_kept=shard.tar.is_local) for shard, place, _ in visits
        ]
        unseen = Unseen(records, [inner for _, _, inner in visits])
        found = read_shards(opened, fields, unseen.mask, deferred)
        unseen.mark_seen()
        return found

    def _read_alone(
        self, shard: int, rows: Ints, inner: Ints, fields: Sequence[str], deferred: Container[str]
    ) -> list[list[Any]]:
        """Read fields of samples from one shard, given the samples' rows in the request."""
        try:
            return self._use(shard, lambda opened: self._read([(opened, shard, inner)], fields, deferred))
        except SampleError as error:
            return self._read_again(shard, rows, inner, fields, error)

    def _read_again(
        self, shard: int, rows: Ints, inner: Ints, fields: Sequence[str], error: SampleError
    ) -> list[list[Any]]:
        """Read samples again because one is damaged. If the bytes came over a network, fetch them again."""
        num_failures = Counter[int]()
        while True:
            sample, opened = int(inner[error.row]), self._get_open(shard)
            num_failures[sample] += 1
            if num_failures[sample] > MAX_FAILURES or not opened.discard(sample, fields):
                raise error.at_row(int(rows[error.row])) from error
            if num_failures[sample] > 1:
                opened.index.discard()
                self._open.pop(shard, None)
            try:
                return self._use(shard, lambda opened: self._read([(opened, shard, inner)], fields, ()))
            except SampleError as another:
                error = another

    def _use(self, shard: int, use: Callable[[Shard], Result]) -> Result:
        """Call a function with an open shard.

        If the shard's files were replaced, or a remote index was damaged in transit, call the function again with the
        current files. Request the versions of remote files again, because the known versions may be outdated.
        """
        num_failures = 0
        while True:
            try:
                return use(self._get_open(shard))
            except FormatError as error:
                num_failures += 1
                is_local = self._table.tars[shard].store.is_local
                if num_failures > (1 if is_local else MAX_FAILURES) or (
                    is_local and not isinstance(error, ReplacedError)
                ):
                    raise
            opened = self._open.pop(shard, None)
            if not is_local:
                if opened is not None:
                    opened.index.discard()  # Parts of an index may be damaged, and no ETag shows this.
                map_locations(Location.exists, [self._table.tars[shard], self._table.indexes[shard]])

    def _open_remote(self, shards: Sequence[int]) -> None:
        tars = self._table.tars
        missing = [shard for shard in shards if shard not in self._open and not tars[shard].store.is_local]
        # Open shards in parallel, because opening a shard needs several requests.
        if len(missing) > 1 and (errors := map_in_threads(self._get_open, missing)):
            raise errors[0]

    def _get_open(self, shard: int) -> Shard:
        opened = self._open.get(shard)
        if opened is None:
            opened = self._open_shard(shard)
            self._open[shard] = opened
            self._num_index_bytes += opened.index.num_bytes
            self._close_oldest()
        with suppress(KeyError):  # Another thread has removed the shard.
            self._open.move_to_end(shard)
        return opened

    def _close_oldest(self) -> None:
        """Close the shards that were used least recently if too many are open.

        Another thread may still be reading a shard; the shard is closed when its last reference is gone.
        """
        with suppress(KeyError):
            while len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            if self._num_index_bytes > MAX_INDEX_BYTES:
                # The number includes closed shards. Make room for many shards, because counting again is slow.
                self._num_index_bytes = sum(opened.index.num_bytes for opened in list(self._open.values()))
                while self._num_index_bytes > MAX_INDEX_BYTES * 3 // 4 and len(self._open) > 1:
                    _, oldest = self._open.popitem(last=False)
                    self._num_index_bytes -= oldest.index.num_bytes

    def _open_shard(self, shard: int) -> Shard:
        tar, index = self._table.tars[shard], self._table.indexes[shard]
        opened = Shard(tar, index)
        expected = self._table.manifest.shards[shard]
        if (found := opened.entry) != expected:
            opened.close()
            raise StaleIndexError(
                f"{tar} does not match the manifest: got {found}, expected {expected}. Pack the dataset again, or "
                "download the shards and the manifest together"
            )
        if other := set(opened.index.header.fields).difference(self._table.manifest.fields):
            opened.close()
            raise StaleIndexError(
                f"{index} has the fields {', '.join(sorted(other))}, but the manifest has only "
                f"{', '.join(self._table.manifest.fields)}. Pack the dataset again, or download the shards, index "
                "files and manifest together"
            )
        return opened

    def __reduce__(self) -> tuple[type[SampleReader], tuple[ShardTable, Verify]]:
        return type(self), (self._table, self._verify)  # An unpickled reader has no open shards.


def map_in_threads(function: Callable[[Item], object], items: Sequence[Item]) -> list[StoreError]:
    """Call a function with each item, in several daemon threads.

    Returns:
        The errors from stores that kept failing. The caller should raise one of these errors immediately, because
        repeating the requests would take just as long. Other errors are ignored: reading an item fetches the item
        again, and reports the error with the sample.
    """
    remaining = iter(items)  # Threads share the iterator: next() is atomic for iterators over sequences.
    errors = list[StoreError]()

    def work() -> None:
        for item in remaining:
            try:
                function(item)
            except StoreError as error:  # noqa: PERF203  # Requests are slow.
                errors.append(error)
            except (ShardioError, OSError, EOFError):
                continue

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(NUM_THREADS, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class KeyedShards(Mapping[str, dict[str, Any]]):
    """The samples of a dataset by key. The context manager closes the shards.

    Iteration yields the keys in manifest order.

    Opening reads only the manifest, or the headers of the indexes. The first lookup by key reads all keys once and
    keeps an 8-byte hash and a 4-byte or 8-byte index for each sample. Each lookup takes logarithmic time, and reads
    some keys from an index file to compare the whole key. Threads can share the object.

    >>> with shardio.open("out") as samples:  # doctest: +SKIP
    ...     image = samples["cats/0001"]["jpg"]

    Args:
        table: The dataset's shards.
        verify: ``first`` compares each sample with its index when the sample is first read; ``off`` compares nothing.
    """

    def __init__(self, table: ShardTable, verify: Verify = "first") -> None:
        self._table = table
        self._verify: Verify = verify
        self._reader = SampleReader(table, verify)
        self._known: tuple[NDArray[np.uint64], NDArray[np.uint32] | Ints] | None = None

    @property
    def manifest(self) -> Manifest:
        """The contents of the dataset."""
        return self._table.manifest

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, sorted. A sample may lack some fields."""
        return self._table.manifest.fields

    def read(self, key: str, fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Return fields of a sample.

        Args:
            key: The sample's key.
            fields: The names of the fields to read; by default, all fields.

        Returns:
            The sample's key as ``__key__``, and the contents of the sample's fields, as bytes by name.

        Raises:
            KeyError: If no sample has the key.
            SampleError: If the sample cannot be read or is damaged.
            FormatError: If two samples have the same key, or a shard is invalid.
        """
        stored = self._reader.read(np.array([self._find(key)]), self.fields if fields is None else list(fields))
        columns = {field: column[0] for field, column in stored.columns.items()}
        return {"__key__": key, **{field: content for field, content in columns.items() if content is not None}}

    def describe(self, key: str) -> str:
        """Return the location of a sample as text. Raise KeyError if no sample has the key."""
        return self._reader.describe(self._find(key), self.fields)[1]

    def close(self) -> None:
        """Close all shards; the next read reopens those that it needs."""
        self._reader.close()

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self.read(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._look_up(key) is not None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), KEYS_AT_ONCE):
            yield from self._reader.keys(np.arange(start, min(start + KEYS_AT_ONCE, len(self))))

    def __len__(self) -> int:
        return self._table.manifest.num_samples

    def __enter__(self) -> KeyedShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KeyedShards of {count(len(self), 'sample')} in {self._table.tars[0].folder}>"

    def __reduce__(self) -> tuple[type[KeyedShards], tuple[ShardTable, Verify]]:
        return type(self), (self._table, self._verify)

    def _find(self, key: str) -> int:
        if (index := self._look_up(key)) is None:
            raise KeyError(f"no sample has the key {key!r} in {self._table.tars[0].folder}")
        return index

    def _look_up(self, key: str) -> int | None:
        if self._known is None:
            self._known = self._read_hashes()
        hashes, indices = self._known
        wanted = np.array([hash_key(key)], np.uint64)
        start, stop = (int(hashes.searchsorted(wanted, side)[0]) for side in ("left", "right"))
        found = indices[start:stop].astype(np.int64)  # Usually at most one sample has the hash.
        keys = self._reader.keys(found) if len(found) else []
        return next((index for index, other in zip(found.tolist(), keys, strict=True) if other == key), None)

    def _read_hashes(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32] | Ints]:
        """Return the sorted hashes of all keys, uint64 [samples], and the index of each sample in the same order."""
        hashes = np.empty(len(self), np.uint64)
        stops = np.cumsum(self._table.manifest.shard_sizes).tolist()
        for index, (start, stop) in zip(self._table.indexes, pairwise([0, *stops]), strict=True):
            keys = read_keys(index)
            if len(keys) != stop - start:
                raise FormatError(
                    f"{index} has {count(len(keys), 'sample')}, but the manifest says {stop - start:,}: run shardio "
                    "verify, or download the shards, index files and manifest together"
                )
            hashes[start:stop] = keys.hash_all()
        order = hashes.argsort(kind="stable")
        hashes = hashes[order]
        self._refuse_duplicates(hashes, order)
        return hashes, order.astype(np.uint32) if len(order) <= 2**32 else order

    def _refuse_duplicates(self, hashes: NDArray[np.uint64], order: Ints) -> None:
        # Keys must be compared, because different keys may have the same hash.
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


def open(  # noqa: A001  # The name follows tarfile and PIL.Image.
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
        verify: ``first`` compares each sample with its index when the sample is first read; ``off`` compares nothing.
        storage_options: Settings for the store of a remote source, as for :class:`shardio.ShardDataset`.
        cache: A local folder for the fetched parts of a remote source. Processes share this folder, which is never
            removed. By default, shardio uses a private folder and removes it when the program ends.
        cache_size: The size of the cache, such as ``"200GB"``; by default, a fifth of the free space, and at most
            32 GiB if the cache is private.
        cache_shared: Whether to share the folder ``cache`` with other users, and to trust copies that they wrote.
            By default, only this user and root may have write access to the folder.

    Returns:
        A read-only mapping from keys to samples.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
        FormatError: If a file is invalid or the dataset has no samples.
        OSError: If a remote store denies access, or cannot be reached.
        ValueError: If ``verify``, or a setting of the store or the cache, is invalid.
    """
    from shardio.shards import open_table  # Importing tarfile, which open_table needs, takes 4 ms.

    return KeyedShards(open_table(source, make_access(storage_options, cache, cache_size, cache_shared)), verify)
