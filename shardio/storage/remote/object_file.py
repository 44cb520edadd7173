"""Positioned reads of a remote object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardio.storage.remote.client import client
from shardio.storage.remote.messages import ReadRanges
from shardio.storage.runs import RunLimits, read_runs
from shardio.storage.store import FileStat, Location

if TYPE_CHECKING:
    from shardio.storage.remote.object_store import ObjectStore

LIMITS = RunLimits(max_gap=4096, max_small=2**40, max_run=8 * 2**20)
"""Neighbouring ranges are read together, because each request costs as much as some 300 kB of content."""

MAX_TOGETHER = 64
"""The most ranges in one message to the storage process."""


class ObjectFile:
    """A remote object that is open for positioned reads. It can be shared between threads and across a fork.

    Nothing is open: each read is a request for the version that the object had.

    Args:
        store: The store.
        key: The object's key.
        found: What the store knows about the object.
    """

    def __init__(self, store: ObjectStore, key: str, found: FileStat) -> None:
        self._store, self._key = store, key
        self.location = Location(store=store, key=key)
        self.size, self.version = found.size, found.version

    @property
    def is_local(self) -> bool:
        return False

    def read(self, start: int, stop: int) -> bytes:
        return self._read_all([start], [stop])[0]

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return read_runs(self._read_all, starts, stops, LIMITS)

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        if len(buffers) == 1 and len(buffers[0]):
            client().read_into(self._request([(starts[0], starts[0] + len(buffers[0]))]), buffers[0])
            return
        stops = [start + len(buffer) for start, buffer in zip(starts, buffers, strict=True)]
        contents = self.read_many(np.array(starts, np.int64), np.array(stops, np.int64))
        for buffer, content in zip(buffers, contents, strict=True):
            buffer[:] = content

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        pass

    def discard(self, start: int, stop: int) -> bool:
        return True  # It may have been damaged on the way.

    def close(self) -> None:
        pass

    def _read_all(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        ranges = list(zip(starts, stops, strict=True))
        wanted = [(start, stop) for start, stop in ranges if stop > start]
        contents = list[bytes]()
        for first in range(0, len(wanted), MAX_TOGETHER):
            contents += client().read(self._request(wanted[first : first + MAX_TOGETHER]))
        arrived = iter(contents)
        return [next(arrived) if stop > start else b"" for start, stop in ranges]

    def _request(self, ranges: Sequence[tuple[int, int]]) -> ReadRanges:
        for start, stop in ranges:
            check_range(self.location, self.size, start, stop)
        return ReadRanges(
            root=self._store.root,
            options=self._store.options,
            key=self._key,
            size=self.size,
            version=self.version,
            ranges=tuple(ranges),
        )


def check_range(location: Location, size: int, start: int, stop: int) -> None:
    """Raise EOFError if a range does not lie within an object."""
    if stop > size:
        raise EOFError(
            f"{location} ends at byte {size}, but bytes {start} to {stop} were requested: the object is truncated. "
            "Restore it"
        )
