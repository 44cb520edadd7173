"""Object stores and HTTP servers as a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardio.errors import LocationError
from shardio.files import naming
from shardio.storage.options import RemoteOptions
from shardio.storage.remote.client import client
from shardio.storage.remote.messages import (
    Create,
    ListFolder,
    ReadRanges,
    ReadWhole,
    Remove,
    Stat,
    Walk,
    Write,
    identify,
)
from shardio.storage.store import FileStat, Location, RunLimits, read_runs

LIMITS = RunLimits(max_gap=4096, max_small=2**40, max_run=8 * 2**20)
"""Neighbouring ranges are read together, because each request costs as much as some 300 kB of content."""

MAX_TOGETHER = 64
"""The maximum number of ranges in one message to the storage process."""


class ObjectFile:
    """A remote object that is open for positioned reads. It can be shared between threads and across a fork.

    Nothing is open: each read is a request for the version that the object had.

    Args:
        store: The store.
        key: The object's key.
        found: The object's status in the store.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """A bucket, a container, an HTTP server or a repository. Keys have no leading slash; "" is the root.

    A pickled store carries its options, with credentials, and the folder of the storage process, so that the processes
    of a training run share one.

    Attributes:
        root: The URL of the root, such as ``s3://bucket``.
        options: The store's settings.
    """

    root: str
    options: RemoteOptions

    @property
    def prefix(self) -> str:
        return f"{self.root}/"

    @property
    def is_local(self) -> bool:
        return False

    @property
    def cache_bytes(self) -> None:
        return None

    def stat(self, key: str) -> FileStat:
        found: FileStat = client().ask(Stat(root=self.root, options=self.options, key=key))
        return found

    def open(self, key: str, *, whole: bool = False) -> ObjectFile:
        return ObjectFile(self, key, self.stat(key))

    def read_whole(self, key: str) -> bytes:
        content: bytes = client().ask(ReadWhole(root=self.root, options=self.options, key=key))
        return content

    def is_folder(self, key: str) -> bool:
        return not self._is_web_server and bool(self.list(key))

    def list(self, key: str) -> list[str]:
        self._refuse_listing(key)
        found: list[str] = client().ask(ListFolder(root=self.root, options=self.options, key=key))
        return found

    def walk(self, key: str) -> Iterator[str]:
        return (found for found, _, _ in self._walk(key))

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        for found, size, version in self._walk(key):
            yield found, FileStat(size=size, version=version, identity=identify(self.root, found, version))

    def _walk(self, key: str) -> Iterator[tuple[str, int, str]]:
        self._refuse_listing(key)
        return client().walk(Walk(root=self.root, options=self.options, key=key))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[BinaryIO]:
        self._refuse_writing(key)
        with client().make_file() as file:
            with naming(file.name):  # If a disk is full, it is that of the temporary file.
                yield file
                file.flush()
            client().ask(Write(root=self.root, options=self.options, key=key, path=str(file.name)))

    def create(self, key: str, content: bytes) -> bool:
        self._refuse_writing(key)
        is_ours: bool = client().ask(Create(root=self.root, options=self.options, key=key, content=content))
        return is_ours

    def remove(self, key: str) -> None:
        self._refuse_writing(key)
        client().ask(Remove(root=self.root, options=self.options, key=key))

    def can_write(self, key: str) -> bool:
        return not (self._is_web_server or self._is_repository)

    @property
    def _is_web_server(self) -> bool:
        return self.root.startswith("http")

    @property
    def _is_repository(self) -> bool:
        return self.root.startswith("hf://")

    def _refuse_writing(self, key: str) -> None:
        if self._is_repository:
            raise LocationError(
                f"cannot write {self.prefix}{key}: shardio only reads repositories of the Hugging Face Hub. Write to a "
                "directory, and upload it (hf upload)"
            )

    def _refuse_listing(self, key: str) -> None:
        if self._is_web_server:
            raise LocationError(
                f"cannot list {self.prefix}{key}: a web server does not list its files. Name a manifest "
                "(https://…/shardio.json), or tars with a pattern (https://…/shard-{000000..000012}.tar)"
            )

    def resolve(self, key: str) -> str:
        return f"{self.root}/{key}"

    def __getstate__(self) -> tuple[str, RemoteOptions, Path | None]:
        return self.root, self.options, client().folder

    def __setstate__(self, state: tuple[str, RemoteOptions, Path | None]) -> None:
        root, options, folder = state
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "options", options)
        if folder is not None:
            client().adopt(folder)
