"""Read the fields of samples, given the samples' indices."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.reading.seen import Seen, Verify
from shardio.reading.stored import StoredSamples
from shardio.reading.threads import map_in_threads
from shardio.shards import PartCache, Shard, ShardTable
from shardio.storage import Location, ReplacedError, StoredFile, map_locations
from shardio.values import check_choice

Result = TypeVar("Result")

MAX_FAILURES = 3
"""How often to fetch a remote sample, or open a shard, that is damaged. Then the store's copy is damaged, too."""

MAX_OPEN_SHARDS = 1024
"""The maximum number of shards that a reader keeps open, at about 5 kB each. Other shards are reopened as needed."""


class SampleReader:
    """A reader of a dataset's samples by their indices in manifest order. Threads can share it.

    When a sample is first read, its tar headers and contents are compared with the index file. If a tar has changed
    when it is reopened, its samples are compared again.

    Args:
        table: The dataset's shards.
        verify: ``first`` compares samples when they are first read; ``off`` compares nothing.

    Raises:
        ValueError: If ``verify`` is not one of these.
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
        """Return a shard's tar, and where it holds some fields of some samples.

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
        """Read samples again because one is damaged. If its bytes came over a network, fetch them again."""
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

        If the shard's files were replaced, or a remote index was damaged on the way, call it again with the current
        files. A remote store is asked for their versions again, because those that are known may be outdated.
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
        """Open remote shards at the same time, because opening one takes several requests.

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
