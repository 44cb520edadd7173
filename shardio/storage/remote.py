"""Access object stores, web servers and repositories as stores. Open objects may be read through a cache."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardio.errors import LocationError, StoreError
from shardio.files import naming
from shardio.storage.client import Request, client
from shardio.storage.copies import CachedCopy
from shardio.storage.local import LIMITS
from shardio.storage.locations import CacheSettings, RemoteAccess, RemoteOptions, identify, split_url
from shardio.storage.store import (
    REMOTE_PIECE,
    UNVERSIONED,
    FileStat,
    Location,
    RunLimits,
    Store,
    StoredFile,
    ends_early,
    read_runs,
)

REMOTE_LIMITS = RunLimits(max_gap=4096, max_small=2**40, max_run=REMOTE_PIECE)
"""Neighboring ranges are read together, because a request's latency equals the time it takes to fetch about 300 kB."""

MAX_TOGETHER = 64
"""The maximum number of ranges in one message to the storage process."""

MAX_WHOLE = 2**20
"""The size in bytes up to which an index is fetched as a whole."""

TOUCH_S = 10.0
"""The minimum time, in seconds, between two records that a copy is in use."""

MAX_FILLS = 5
"""The maximum number of fetches for one read. If the data is removed after every fetch, the cache is too small."""

NUM_SMALL = 10
"""The number of small requests whose latency is measured."""

ENOUGH = 0.9
"""The share of the highest bandwidth at which a store is considered saturated."""


def open_url(url: str, access: RemoteAccess) -> Location:
    """Return the location that a URL names.

    Raises:
        LocationError: If the URL is invalid.
    """
    root, key = split_url(url)
    return Location(store=ObjectStore(root=root, options=access.options, cache=access.cache), key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore(Store):
    """A bucket, a container, a web server or a repository. Keys have no leading slash; "" is the root.

    A pickled store contains its options, including credentials, and the folder of the storage process. All processes of
    a training run share one such process.

    Attributes:
        root: The URL of the root, such as ``s3://bucket``.
        options: The store's settings.
        cache: The cache through which open objects are read; None to read without a cache.
    """

    root: str
    options: RemoteOptions
    cache: CacheSettings | None = None

    @property
    def prefix(self) -> str:
        return f"{self.root}/"

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache is None else int(self.ask("find_cache", "", cache=self.cache)[1])

    def request(self, operation: str, key: str, **arguments: Any) -> Request:
        """Return a request for an object or a folder of this store."""
        return Request(operation=operation, root=self.root, options=self.options, key=key, arguments=arguments)

    def ask(self, operation: str, key: str, **arguments: Any) -> Any:
        """Return the storage process's answer to a request, or raise the error that it reports."""
        return client().ask(self.request(operation, key, **arguments))

    def stat(self, key: str) -> FileStat:
        found: FileStat = self.ask("stat", key)
        return found

    def open(self, key: str, *, whole: bool = False) -> ObjectFile:
        if self.cache is None:
            return ObjectFile(self, key, self.stat(key))
        return self._open_cached(key, self.cache, whole=whole, is_fresh=False)

    def read_whole(self, key: str) -> bytes:
        if self.cache is not None:
            file = self._open_cached(key, self.cache, whole=True, is_fresh=True)
            return file.read(0, file.size)
        content: bytes = self.ask("read_whole", key)
        return content

    def _open_cached(self, key: str, cache: CacheSettings, *, whole: bool, is_fresh: bool) -> CachedFile:
        found, path = self.ask("open_cached", key, cache=cache, is_fresh=is_fresh, is_whole=whole)
        # Parts that were fetched at different times belong together only if the store has versions.
        is_divisible = not is_fresh and found.size > MAX_WHOLE and not found.version.endswith(UNVERSIONED)
        return CachedFile(self, key, found, cache, path, whole=whole and not is_divisible)

    def is_folder(self, key: str) -> bool:
        return not self.root.startswith("http") and bool(self.list(key))

    def list(self, key: str) -> list[str]:
        self._refuse_listing(key)
        found: list[str] = self.ask("list_folder", key)
        return found

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        self._refuse_listing(key)
        for found, size, version in client().walk(self.request("walk", key)):
            yield found, FileStat(size=size, version=version, identity=identify(self.root, found, version))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[BinaryIO]:
        self._refuse_writing(key)
        with client().make_file() as file:
            with naming(file.name):  # Only the temporary file's disk can be full.
                yield file
                file.flush()
            self.ask("write", key, path=Path(file.name))

    def create(self, key: str, content: bytes) -> bool:
        self._refuse_writing(key)
        is_ours: bool = self.ask("create", key, content=content)
        return is_ours

    def remove(self, key: str) -> None:
        self._refuse_writing(key)
        self.ask("remove", key)

    def can_write(self, key: str) -> bool:
        return not self.root.startswith(("http", "hf://"))

    def _refuse_writing(self, key: str) -> None:
        if self.root.startswith("hf://"):
            raise LocationError(
                f"cannot write {self.prefix}{key}: shardio only reads repositories on the Hugging Face Hub. Write to a "
                "directory, and upload it (hf upload)"
            )

    def _refuse_listing(self, key: str) -> None:
        if self.root.startswith("http"):
            raise LocationError(
                f"cannot list {self.prefix}{key}: a web server does not list its files. Name a manifest "
                "(https://…/shardio.json), or tars with a pattern (https://…/shard-{000000..000012}.tar)"
            )

    # A __getstate__ would be replaced in Python 3.10, because this dataclass has slots.
    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.root, self.options, self.cache, client().folder)


def _unpickle(root: str, options: RemoteOptions, cache: CacheSettings | None, folder: Path | None) -> ObjectStore:
    if folder is not None:
        client().adopt(folder)
    return ObjectStore(root=root, options=options, cache=cache)


class ObjectFile(StoredFile):
    """A remote object that is open for positioned reads. The object can be shared between threads and across a fork.

    No connection stays open: each read requests the version that the object had when it was opened.

    Args:
        store: The store.
        key: The object's key.
        found: The object's status in the store.
    """

    limits = REMOTE_LIMITS

    def __init__(self, store: ObjectStore, key: str, found: FileStat) -> None:
        self._store, self._key = store, key
        self.location = Location(store=store, key=key)
        self.size, self.version = found.size, found.version

    def read(self, start: int, stop: int) -> bytes:
        return self._read_all([start], [stop])[0]

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return read_runs(self._read_all, starts, stops, self.limits)

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        if len(buffers) == 1 and len(buffers[0]):
            ranges = [(starts[0], starts[0] + len(buffers[0]))]
            self._check(ranges)
            client().read_into(self._request("read_ranges", ranges), buffers[0])
        else:
            super().read_into(starts, buffers)

    def _read_all(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        ranges = list(zip(starts, stops, strict=True))
        wanted = [(start, stop) for start, stop in ranges if stop > start]
        self._check(wanted)
        contents = list[bytes]()
        for first in range(0, len(wanted), MAX_TOGETHER):
            contents += client().read(self._request("read_ranges", wanted[first : first + MAX_TOGETHER]))
        arrived = iter(contents)
        return [next(arrived) if stop > start else b"" for start, stop in ranges]

    def _request(self, operation: str, ranges: Sequence[tuple[int, int]], **arguments: Any) -> Request:
        known = {"size": self.size, "version": self.version, "ranges": tuple(ranges)}
        return self._store.request(operation, self._key, **known, **arguments)

    def _check(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, stop in ranges:
            if stop > self.size:
                raise ends_early(self.location, self.size, start, stop)


class CachedFile(ObjectFile):
    """A remote object that is read through its copy in a cache. It can be shared between threads and across a fork.

    Args:
        store: The store.
        key: The object's key.
        found: The object's status in the store.
        cache: The cache.
        path: The path of the object's copy.
        whole: Whether to fetch the whole object when a part is read.
    """

    limits = LIMITS  # Most ranges are read from a local file.

    def __init__(
        self, store: ObjectStore, key: str, found: FileStat, cache: CacheSettings, path: str, *, whole: bool
    ) -> None:
        super().__init__(store, key, found)
        self._cache = cache
        self._copy = CachedCopy(path=path, size=found.size, is_sealed=whole, is_shared=cache.is_shared)
        self._is_examined = self.is_fetched_in_parts = not whole
        self._touched = 0.0

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for start, buffer in zip(starts, buffers, strict=True):
            self._check([(start, start + len(buffer))])
            self._examine()
            for _ in range(MAX_FILLS):
                if not len(buffer) or self._copy.read_into(start, buffer):
                    break
                self._fill([(start, start + len(buffer))], is_urgent=True)
            else:
                raise self._removed()

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        if ranges:
            self._fill(ranges, is_urgent=False)

    def discard(self, start: int, stop: int) -> bool:
        return self._copy.unmark(*((0, self.size) if self._copy.is_sealed else (start, stop)))

    def _read_all(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        self._touch()
        self._examine()
        self._check(list(zip(starts, stops, strict=True)))
        contents = self._copy.read(starts, stops)
        for _ in range(MAX_FILLS):
            missing = [i for i, content in enumerate(contents) if content is None]
            if not missing:
                break
            self._fill(_join([(starts[i], stops[i]) for i in missing]), is_urgent=True)
            found = self._copy.read([starts[i] for i in missing], [stops[i] for i in missing])
            for i, content in zip(missing, found, strict=True):
                contents[i] = content
        found_all = [content for content in contents if content is not None]
        if len(found_all) < len(contents):
            raise self._removed()
        return found_all

    def _fill(self, ranges: Sequence[tuple[int, int]], *, is_urgent: bool) -> None:
        request = self._request("fill", ranges, copy=self._copy, cache=self._cache, is_urgent=is_urgent)
        if (warning := client().ask(request)) is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)

    def _examine(self) -> None:
        """Unmark a sealed copy that is damaged, for example after a power failure. Check only once."""
        if not self._is_examined:
            if self._copy.is_damaged():
                self._copy.unmark(0, self.size)
            self._is_examined = True  # Set this last: other threads must not read an unexamined copy.

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched > TOUCH_S:
            self._touched = now
            self._copy.touch()

    def _removed(self) -> StoreError:
        return StoreError(
            f"the cache is too small: the fetched part of {self.location} was removed before it was read, {MAX_FILLS} "
            "times in a row. Set a larger cache_size"
        )


def _join(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighboring ranges, such as an image and its label, because each range requires a request."""
    joined = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= LIMITS.max_gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """The latency and the bandwidth of a store.

    Attributes:
        latency_s: The median time in seconds until one byte has arrived.
        bytes_per_s: The bandwidth in bytes per second, by the number of simultaneous requests.
    """

    latency_s: float
    bytes_per_s: dict[int, float]

    @property
    def best(self) -> float:
        """The highest bandwidth in bytes per second."""
        return max(self.bytes_per_s.values())

    @property
    def num_saturating(self) -> int:
        """The smallest number of simultaneous requests that nearly reaches the highest bandwidth."""
        return min(number for number, rate in self.bytes_per_s.items() if rate >= ENOUGH * self.best)


def measure_store(files: Sequence[StoredFile], nums_requests: Sequence[int], seconds: float) -> StoreSpeed:
    """Measure the latency and the bandwidth of a store.

    Args:
        files: Open objects that are not read through a cache.
        nums_requests: The numbers of simultaneous requests to measure, one number after another.
        seconds: The time in seconds to spend on measuring each number. Requests in progress at the end are completed.

    Raises:
        ValueError: If all objects are empty.
    """
    pieces = [
        (file, start, min(start + REMOTE_PIECE, file.size))
        for file in files
        for start in range(0, file.size, REMOTE_PIECE)
    ]
    if not pieces:
        raise ValueError("cannot measure with empty objects: name a dataset that has samples")
    latencies = list[float]()
    for file, start, _ in itertools.islice(itertools.cycle(pieces), NUM_SMALL + 1):
        began = time.perf_counter()
        file.read(start, start + 1)
        latencies.append(time.perf_counter() - began)
    # The first request also opens a connection.
    latency_s = statistics.median(latencies[1:])
    return StoreSpeed(
        latency_s=latency_s, bytes_per_s={number: _measure_rate(pieces, number, seconds) for number in nums_requests}
    )


def _measure_rate(pieces: Sequence[tuple[StoredFile, int, int]], num_requests: int, seconds: float) -> float:
    remaining, lock = itertools.cycle(pieces), threading.Lock()
    began = time.perf_counter()

    def read() -> int:
        num_read = 0
        while time.perf_counter() - began < seconds:
            with lock:
                file, start, stop = next(remaining)
            num_read += len(file.read(start, stop))
        return num_read

    with ThreadPoolExecutor(num_requests) as pool:
        reading = [pool.submit(read) for _ in range(num_requests)]
        num_bytes = sum(each.result() for each in reading)
    return num_bytes / (time.perf_counter() - began)
