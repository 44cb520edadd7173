"""From sample numbers to the bytes of their fields."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError, StaleIndexError
from shardio.reading.seen import Seen, Verify
from shardio.reading.stored import StoredSamples
from shardio.shards import PartCache, Shard, ShardTable
from shardio.storage import ReplacedError
from shardio.values import check_choice

Result = TypeVar("Result")

MAX_OPEN_SHARDS = 1024
"""Shards of which one reader keeps what their indexes say of the whole, about 5 kB each; the rest are opened again."""


class SampleReader:
    """Reads samples of a dataset by their numbers in manifest order, for any number of threads.

    Where a sample is first read, its tar header and its content are compared with the index; and again where its tar
    turns out to be another file, or changed, when it is opened again.

    Args:
        table: The dataset's shards.
        verify: ``off`` compares nothing.

    Raises:
        ValueError: If ``verify`` is something else.
    """

    def __init__(self, table: ShardTable, verify: Verify = "first") -> None:
        self._table = table
        self._verify: Verify = check_choice("verify", verify, Verify)
        self._stops = np.cumsum(table.manifest.shard_sizes)
        self._seen = Seen(table.manifest.shard_sizes)
        # Neither has a lock, which a forked child could find taken: each step on them is atomic.
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._parts = PartCache()

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
        for shard, rows, inner in self._by_shard(samples):
            try:
                found = self._use(shard, partial(self._read_shard, shard, inner, fields))
            except SampleError as error:
                raise error.at_row(int(rows[error.row])) from error
            for column, contents in zip(columns, found, strict=True):
                for row, content in zip(rows.tolist(), contents, strict=True):
                    column[row] = content
        return StoredSamples(
            dict(zip(fields, columns, strict=True)),
            len(samples),
            describe=lambda row, some: self.describe(int(samples[row]), some),
            list_keys=lambda: self.keys(samples),
        )

    def keys(self, samples: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples."""
        keys = [""] * len(samples)
        for shard, rows, inner in self._by_shard(samples):
            found = self._use(shard, partial(_keys, inner))
            for row, key in zip(rows.tolist(), found, strict=True):
                keys[row] = key
        return keys

    def describe(self, sample: int, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and where those of its fields lie, for messages."""
        ((shard, _, inner),) = self._by_shard(np.array([sample]))
        return self._use(shard, lambda opened: opened.describe(int(inner[0]), fields))

    def close(self) -> None:
        """Close all shards; reading again opens them again."""
        self._open.clear()
        self._parts.clear()

    def _by_shard(self, samples: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield for each shard its number, which of the samples lie in it, and their places there.

        In the order in which they lie on disk, so that each shard is opened once, and read forwards.
        """
        order = np.argsort(samples, kind="stable")
        shards = np.searchsorted(self._stops, samples[order], side="right")
        firsts = np.flatnonzero(np.diff(shards, prepend=-1))
        for shard, rows in zip(
            shards[firsts].tolist(), np.split(order, firsts[1:]), strict=False
        ):  # One empty split for no samples.
            yield shard, rows, samples[rows] - (self._stops[shard - 1] if shard else 0)

    def _read_shard(
        self, number: int, inner: NDArray[np.int64], fields: Sequence[str], shard: Shard
    ) -> list[list[bytes | None]]:
        if self._verify == "off":
            return shard.read_many(inner, fields)
        seen = self._seen.of_shard(number, fields, shard.tar)
        unseen = seen.find_unseen(inner)
        found = shard.read_many(inner, fields, unseen)
        if unseen is not None:
            seen.add(inner[unseen])
        return found

    def _use(self, number: int, use: Callable[[Shard], Result]) -> Result:
        """Do something with a shard; if its files are not those that were opened before, with the new ones."""
        try:
            return use(self._shard(number))
        except ReplacedError:
            self._open.pop(number, None)
            return use(self._shard(number))

    def _shard(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is None:
            shard = self._open_shard(number)
            self._open[number] = shard
            with suppress(KeyError):
                while len(self._open) > MAX_OPEN_SHARDS:
                    # Not closed but let go: another thread may be reading it, and the last one that does closes it.
                    self._open.popitem(last=False)
        with suppress(KeyError):  # Another thread has let it go.
            self._open.move_to_end(number)
        return shard

    def _open_shard(self, number: int) -> Shard:
        shard = Shard(self._table.tars[number], self._table.indexes[number], self._parts)
        expected = self._table.manifest.shards[number]
        if (found := shard.entry) != expected:
            shard.close()
            raise StaleIndexError(
                f"{self._table.tars[number]} is not the shard that the manifest names: it is {found}, expected "
                f"{expected}. Pack the dataset again, or fetch shards and manifest together"
            )
        if other := set(shard.index.header.fields).difference(self._table.manifest.fields):
            shard.close()
            raise StaleIndexError(
                f"{self._table.indexes[number]} has the fields {', '.join(sorted(other))}, and the manifest names only "
                f"{', '.join(self._table.manifest.fields)}. Pack the dataset again, or fetch shards, indexes and "
                "manifest together"
            )
        return shard

    def __getstate__(self) -> tuple[ShardTable, Verify]:
        return self._table, self._verify

    def __setstate__(self, state: tuple[ShardTable, Verify]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # an unpickled reader starts with nothing open


def _keys(samples: NDArray[np.int64], shard: Shard) -> list[str]:
    return shard.index.keys(samples)
