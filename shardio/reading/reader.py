"""Readers, which return the fields of samples in shards, or of image files, given the samples' indices or paths."""

from __future__ import annotations

import operator
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError, ShardioError, StaleIndexError, StoreError
from shardio.process import let_through
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, PartCache, Shard, ShardTable
from shardio.storage import Location, ReplacedError, StoredFile, map_locations
from shardio.values import check_choice

if TYPE_CHECKING:
    from shardio.storage.listing import CachedFiles


Columns = Mapping[str, Sequence[bytes | None]]
"""For each field, the content of each sample, or None if the sample lacks the field."""

Item = TypeVar("Item")

NUM_THREADS = 16
"""The number of calls that are made at a time."""

Verify = Literal["first", "off"]
"""Compare samples with the index file when they are first read, or never. Samples of remote shards are compared each
time, because their bytes may be fetched again."""

Result = TypeVar("Result")

MAX_FAILURES = 3
"""The number of times to fetch a damaged remote sample, or to open a damaged shard. Then, the store's copy is
probably damaged."""

MAX_OPEN_SHARDS = 1024
"""The maximum number of shards that a reader keeps open, at about 5 kB each. Other shards are reopened as needed."""

LabelledFile = tuple[str, int]
"""An image's path or, if it is in a remote store, its URL; and its label."""

Value = TypeVar("Value")

LocatedSample = tuple[int, Any]
"""The number of a reader among those that were joined, and the sample in the form that this reader takes."""


class StoredSamples(Sequence[Sample]):
    """Samples in columns, because many small objects would be slow. Single samples are created on demand.

    Args:
        columns: The contents by field, in the order in which the fields were requested.
        num_samples: The number of samples.
        describe: A function that returns the key of the sample in a row, and the place where some fields are stored.
        list_keys: A function that returns the keys of all samples.
        remedy: Another remedy for a sample that lacks a field, for messages.
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
        """Return a sample's key and where some of its fields (by default, those read) are stored, for messages."""
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
            raise IndexError(f"row {row} is out of range: there are {self._num_samples} samples")
        row %= self._num_samples
        key, origin = self.describe(row)
        fields = {field: content for field, column in self.columns.items() if (content := column[row]) is not None}
        return Sample(key=key, fields=fields, origin=origin)


class SampleReader:
    """A reader of a dataset's samples by their indices in manifest order. Threads can share it.

    When a sample is first read, its tar headers and contents are compared with the index file. If a tar has changed
    when it is reopened, its samples are compared again.

    Args:
        table: The dataset's shards.
        verify: ``first`` compares samples when they are first read; ``off`` compares nothing.

    Raises:
        ValueError: If ``verify`` is neither.
    """

    def __init__(self, table: ShardTable, verify: Verify = "first") -> None:
        self._table = table
        self._verify: Verify = check_choice("verify", verify, Verify)
        self._stops = np.cumsum(table.manifest.shard_sizes)
        self._seen = Seen(table.manifest.shard_sizes)
        # Neither has a lock, because a forked child could find it held. Each operation on them is atomic.
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._parts = PartCache()

    def read(self, indices: NDArray[np.int64], fields: Sequence[str]) -> StoredSamples:
        """Read some fields of some samples.

        Args:
            indices: int64 [n], the samples' indices in manifest order.
            fields: The names of the fields to read. The result omits fields that a sample lacks.

        Returns:
            The n samples, in the order of ``indices``.

        Raises:
            SampleError: If a sample cannot be read.
            FormatError: If a shard is invalid or does not match the manifest.
            IndexError: If an index is out of range.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self._stops[-1]:
            raise IndexError(
                f"the dataset has {self._stops[-1]} samples, got indices {indices.min()} to {indices.max()}"
            )
        columns: list[list[bytes | None]] = [[None] * len(indices) for _ in fields]
        by_shard = list(self.by_shard(indices))
        self._open_remote([shard for shard, _, _ in by_shard])
        for shard, rows, inner in by_shard:
            try:
                found = self._read_checked(shard, inner, fields)
            except SampleError as error:
                raise error.at_row(int(rows[error.row])) from error
            for column, contents in zip(columns, found, strict=True):
                for row, content in zip(rows.tolist(), contents, strict=True):
                    column[row] = content
        return StoredSamples(
            dict(zip(fields, columns, strict=True)),
            len(indices),
            describe=lambda row, some: self.describe(int(indices[row]), some),
            list_keys=lambda: self.keys(indices),
        )

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples."""
        keys = [""] * len(indices)
        for shard, rows, inner in self.by_shard(indices):
            found = self._use(shard, partial(_keys, inner))
            for row, key in zip(rows.tolist(), found, strict=True):
                keys[row] = key
        return keys

    def describe(self, index: int, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and where some of its fields are stored, for messages."""
        ((shard, _, inner),) = self.by_shard(np.array([index]))
        return self._use(shard, lambda opened: opened.describe(int(inner[0]), fields))

    def close(self) -> None:
        """Close all shards. The next read reopens them."""
        self._open.clear()
        self._parts.clear()

    def locate(
        self, shard: int, inner: NDArray[np.int64], fields: Sequence[str]
    ) -> tuple[StoredFile, NDArray[np.int64], NDArray[np.int64]]:
        """Locate some fields of some samples in a shard's tar.

        Args:
            shard: The shard's place in the manifest.
            inner: int64 [n], the samples' indices in the shard.
            fields: F names of fields.

        Returns:
            The open tar; the start and the stop of each content, int64 [n, F], -1 if the sample lacks the field.
        """

        def locate(opened: Shard) -> tuple[StoredFile, NDArray[np.int64], NDArray[np.int64]]:
            there = tuple(field for field in fields if field in opened.index.field_indices)
            starts, stops, _ = opened.index.locate(inner, there)
            return opened.tar, starts, stops

        return self._use(shard, locate)

    def by_shard(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield each shard's place in the manifest, the rows of its samples in ``indices``, and their indices in it.

        Shards and samples come in manifest order, so each shard is opened once and read forward.
        """
        order = np.argsort(indices, kind="stable")
        shards = np.searchsorted(self._stops, indices[order], side="right")
        firsts = np.flatnonzero(np.diff(shards, prepend=-1))
        for shard, rows in zip(
            shards[firsts].tolist(), np.split(order, firsts[1:]), strict=False
        ):  # Without samples, there is one empty split.
            yield shard, rows, indices[rows] - (self._stops[shard - 1] if shard else 0)

    def _read_shard(
        self, shard: int, inner: NDArray[np.int64], fields: Sequence[str], opened: Shard
    ) -> list[list[bytes | None]]:
        if self._verify == "off":
            return opened.read_many(inner, fields)
        seen = self._seen.of_shard(shard, fields, opened.tar)
        unseen = seen.find_unseen(inner)
        found = opened.read_many(inner, fields, unseen)
        if unseen is not None:
            seen.add(inner[unseen])
        return found

    def _read_checked(self, shard: int, inner: NDArray[np.int64], fields: Sequence[str]) -> list[list[bytes | None]]:
        try:
            return self._use(shard, partial(self._read_shard, shard, inner, fields))
        except SampleError as error:
            return self._read_again(shard, inner, fields, error)

    def _read_again(
        self, shard: int, inner: NDArray[np.int64], fields: Sequence[str], error: SampleError
    ) -> list[list[bytes | None]]:
        """Read samples again because one is damaged. If its bytes came over a network, they are fetched again."""
        num_failures = Counter[int]()
        while True:
            sample, opened = int(inner[error.row]), self._get_open(shard)
            num_failures[sample] += 1
            if num_failures[sample] > MAX_FAILURES or not opened.discard(sample, fields):
                raise error
            if num_failures[sample] > 1:
                opened.index.discard()
                self._open.pop(shard, None)
            try:
                return self._use(shard, partial(self._read_shard, shard, inner, fields))
            except SampleError as another:
                error = another

    def _use(self, shard: int, use: Callable[[Shard], Result]) -> Result:
        """Call a function with an open shard.

        If the shard's files were replaced, or a remote index was damaged in transit, call it again with the current
        files. Ask a remote store for their versions again, because the known ones may be outdated.
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
            self._open.pop(shard, None)
            if not is_local:
                map_locations(Location.exists, [self._table.tars[shard], self._table.indexes[shard]])

    def _open_remote(self, shards: Sequence[int]) -> None:
        """Open remote shards in parallel, because opening one takes several requests.

        Raises:
            StoreError: If a remote store keeps failing.
        """
        tars = self._table.tars
        missing = [shard for shard in shards if shard not in self._open and not tars[shard].store.is_local]
        if len(missing) > 1 and (errors := map_in_threads(self._get_open, missing)):
            raise errors[0]

    def _get_open(self, shard: int) -> Shard:
        opened = self._open.get(shard)
        if opened is None:
            opened = self._open_shard(shard)
            self._open[shard] = opened
            with suppress(KeyError):
                while len(self._open) > MAX_OPEN_SHARDS:
                    # Not closed here: another thread may be reading it. It closes when the last reference is gone.
                    self._open.popitem(last=False)
        with suppress(KeyError):  # Another thread has removed it.
            self._open.move_to_end(shard)
        return opened

    def _open_shard(self, shard: int) -> Shard:
        tar, index = self._table.tars[shard], self._table.indexes[shard]
        opened = Shard(tar, index, self._parts)
        expected = self._table.manifest.shards[shard]
        if (found := opened.entry) != expected:
            opened.close()
            raise StaleIndexError(
                f"{tar} does not match the manifest: got {found}, expected {expected}. Pack the dataset again, or "
                "download shards and manifest together"
            )
        if other := set(opened.index.header.fields).difference(self._table.manifest.fields):
            opened.close()
            raise StaleIndexError(
                f"{index} has the fields {', '.join(sorted(other))}, but the manifest has only "
                f"{', '.join(self._table.manifest.fields)}. Pack the dataset again, or download shards, index files "
                "and manifest together"
            )
        return opened

    def __getstate__(self) -> tuple[ShardTable, Verify]:
        return self._table, self._verify

    def __setstate__(self, state: tuple[ShardTable, Verify]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # an unpickled reader starts with nothing open


def _keys(inner: NDArray[np.int64], opened: Shard) -> list[str]:
    return opened.index.keys(inner)


class Seen:
    """The samples *seen* so far, which means compared with the index file. Threads can share it.

    If two threads record samples at the same moment, one record may be lost. Its samples are then compared again.

    Args:
        shard_sizes: int64 [shards], the number of samples in each shard.
    """

    def __init__(self, shard_sizes: NDArray[np.int64]) -> None:
        self._shard_sizes = shard_sizes
        self._seen: dict[tuple[int, tuple[str, ...]], _SeenOfShard] = {}

    def of_shard(self, shard: int, fields: Sequence[str], tar: StoredFile) -> _SeenOfShard:
        """Return the record of the samples of a shard that were seen with these fields.

        Args:
            shard: The shard's place in the manifest.
            fields: The names of the fields that are read.
            tar: The shard's open tar. If its version has changed, the record starts empty.
        """
        name = shard, tuple(fields)
        seen = self._seen.get(name)
        if seen is None or seen.version != tar.version:
            seen = self._seen[name] = _SeenOfShard(int(self._shard_sizes[shard]), tar.version, is_kept=tar.is_local)
        return seen


class _SeenOfShard:
    __slots__ = ("_bits", "_is_kept", "_num_unseen", "version")

    def __init__(self, num_samples: int, version: str, *, is_kept: bool = True) -> None:
        self.version, self._is_kept = version, is_kept
        self._bits = np.packbits(np.arange(-num_samples % 8 + num_samples) >= num_samples, bitorder="little")
        self._num_unseen = num_samples  # Approximate: threads update it concurrently.

    def find_unseen(self, samples: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return a mask of the samples that were not seen, bool [n]; None if all were seen."""
        bits = self._bits  # Read once: another thread may drop them.
        if not len(bits):
            return None
        unseen: NDArray[np.bool_] = (bits[samples >> 3] & _bits_of(samples)) == 0
        return unseen if unseen.any() else None

    def add(self, samples: NDArray[np.int64]) -> None:
        bits = self._bits
        if not len(bits) or not self._is_kept:
            return
        np.bitwise_or.at(bits, samples >> 3, _bits_of(samples))
        self._num_unseen -= len(samples)
        if self._num_unseen <= 0:
            self._num_unseen = int(np.unpackbits(~bits).sum())
            if self._num_unseen == 0:
                self._bits = bits[:0]  # All were seen: the bits are no longer needed.


def _bits_of(samples: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (samples & 7).astype(np.uint8))


class FileReader:
    """A reader of labelled image files. Each file is a sample, and its path or URL is the sample's key.

    Args:
        root: The directory that contains the files.
        image_field: The name of the field that contains the image.
        files: The files, if they are in a remote store.
    """

    def __init__(self, root: Location, image_field: str, files: CachedFiles | None = None) -> None:
        self._root, self._image_field, self.files = root, image_field, files

    def read(self, samples: Sequence[LabelledFile], fields: Sequence[str]) -> StoredSamples:
        """Read some files.

        Args:
            samples: n files.
            fields: Ignored. Every sample has an image and a label.

        Raises:
            SampleError: If a file cannot be read.
            StoreError: If a remote store keeps failing.
            PermissionError: If a remote store refuses the credentials.
            TypeError: If a label is not an integer.
        """
        if self.files is None:
            images = [self._read_local(row, path) for row, (path, _) in enumerate(samples)]
        else:
            images = self._read_remote(self.files, samples)
        labels = [_write_label(path, label) for path, label in samples]
        return StoredSamples(
            {self._image_field: images, LABEL_FIELD: labels},
            len(samples),
            describe=lambda row, some: self.describe(samples[row], some),
            list_keys=lambda: [path for path, _ in samples],
        )

    def describe(self, sample: LabelledFile, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and the root directory, for messages."""
        return sample[0], str(self._root)

    def find_key(self, path: str) -> str:
        """Return the key of a file in its store."""
        return path.removeprefix(self._root.store.prefix)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read_local(self, row: int, path: str) -> bytes:
        try:
            return self._root.store.read_whole(path)
        except OSError as error:
            let_through(error)
            raise self._unreadable(row, path, str(error)) from error

    def _read_remote(self, files: CachedFiles, samples: Sequence[LabelledFile]) -> list[bytes]:
        keys = [self.find_key(path) for path, _ in samples]
        present = [files.read_present(key) for key in keys]
        missing = [key for key, content in zip(keys, present, strict=True) if content is None]
        if len(missing) > 1:
            # In parallel. The sample with an error is found below.
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
    """A reader of samples that belong to several readers.

    Args:
        readers: The readers.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    def read(self, samples: Sequence[LocatedSample], fields: Sequence[str]) -> StoredSamples:
        """Read some fields of some samples.

        Args:
            samples: n samples of any of the readers.
            fields: The names of the fields to read. The result omits fields that a sample lacks.

        Raises:
            SampleError: If a sample cannot be read.
        """
        columns: dict[str, list[bytes | None]] = {}
        found: list[tuple[list[int], StoredSamples]] = []
        parts = np.array([part for part, _ in samples], np.int64)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part).tolist()
            try:
                stored = self._readers[part].read(self._take(part, [samples[row][1] for row in rows]), fields)
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
        """Return a sample's key and where some of its fields are stored, for messages."""
        part, inner = sample
        return self._readers[part].describe(inner, fields)

    def close(self) -> None:
        """Close all files. The next read reopens them."""
        for reader in self._readers:
            reader.close()

    def _take(self, part: int, samples: list[Any]) -> Any:
        # A SampleReader takes an array of indices, any other reader a list.
        return np.array(samples, np.int64) if isinstance(self._readers[part], SampleReader) else samples


def _list_keys(found: Sequence[tuple[list[int], StoredSamples]], num_samples: int) -> list[str]:
    keys = [""] * num_samples
    for rows, stored in found:
        _put(stored.keys(), keys, rows)
    return keys


def _put(values: Sequence[Value], column: list[Value], rows: Sequence[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        column[row] = value


Reader = SampleReader | FileReader | JoinedReader


def map_in_threads(function: Callable[[Item], object], items: Sequence[Item]) -> list[StoreError]:
    """Call a function with each item, in several daemon threads.

    Returns:
        The errors of stores that kept failing, because repeating such a request takes as long again. Other errors are
        ignored: reading the item fetches it again, and reports the error with the sample.
    """
    remaining = iter(items)  # Threads share it: next() is atomic for iterators of sequences.
    errors = list[StoreError]()

    def work() -> None:
        for item in remaining:
            try:
                function(item)
            except StoreError as error:  # noqa: PERF203  # A request takes much longer.
                errors.append(error)
            except (ShardioError, OSError, EOFError):
                continue

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(NUM_THREADS, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
