"""A remote store whose objects are read through a cache."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.errors import StoreError
from shardio.storage.cache.cached_copy import CachedCopy
from shardio.storage.cache.settings import CacheSettings
from shardio.storage.remote.client import client
from shardio.storage.remote.messages import Fill, FindCache, OpenCached
from shardio.storage.remote.object_file import check_range
from shardio.storage.remote.object_store import ObjectStore
from shardio.storage.runs import RunLimits, read_runs
from shardio.storage.store import FileStat, Location, Writer

LIMITS = RunLimits(max_gap=4096, max_small=16 * 1024, max_run=2**20)
"""As for local files, because most ranges are present."""

TOUCH_S = 10.0
"""How often a file that is read records that its copy is in use, in seconds."""

MAX_FILLS = 5
"""How often one read may find that what was just fetched has been removed: the cache is too small then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStore:
    """A remote store whose open objects are read through a cache. All else goes to the store.

    Attributes:
        inner: The remote store.
        cache: The cache.
    """

    inner: ObjectStore
    cache: CacheSettings

    @property
    def prefix(self) -> str:
        return self.inner.prefix

    @property
    def is_local(self) -> bool:
        return False

    @property
    def cache_bytes(self) -> int:
        _, max_bytes = client().ask(
            FindCache(root=self.inner.root, options=self.inner.options, key="", cache=self.cache)
        )
        return int(max_bytes)

    def stat(self, key: str) -> FileStat:
        return self.inner.stat(key)

    def open(self, key: str, *, whole: bool = False) -> CachedFile:
        return self._open(key, whole=whole, is_fresh=False)

    def read_whole(self, key: str) -> bytes:
        file = self._open(key, whole=True, is_fresh=True)
        return file.read(0, file.size)

    def _open(self, key: str, *, whole: bool, is_fresh: bool) -> CachedFile:
        inner = self.inner
        request = OpenCached(
            root=inner.root, options=inner.options, key=key, cache=self.cache, is_fresh=is_fresh, is_whole=whole
        )
        found, path = client().ask(request)
        return CachedFile(self, key, found, path, whole=whole)

    def is_folder(self, key: str) -> bool:
        return self.inner.is_folder(key)

    def list(self, key: str) -> list[str]:
        return self.inner.list(key)

    def walk(self, key: str) -> Iterator[str]:
        return self.inner.walk(key)

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        return self.inner.walk_stats(key)

    def write_whole(self, key: str) -> AbstractContextManager[Writer]:
        return self.inner.write_whole(key)

    def create(self, key: str, content: bytes) -> bool:
        return self.inner.create(key, content)

    def remove(self, key: str) -> None:
        self.inner.remove(key)

    def can_write(self, key: str) -> bool:
        return self.inner.can_write(key)

    def resolve(self, key: str) -> str:
        return self.inner.resolve(key)


class CachedFile:
    """A remote object that is read through its copy in a cache. It can be shared between threads and across a fork.

    Args:
        store: The store.
        key: The object's key.
        found: What the store knows about the object.
        path: The path of its copy.
        whole: Whether to fetch all of it when a part is read.
    """

    def __init__(self, store: CachedStore, key: str, found: FileStat, path: str, *, whole: bool) -> None:
        self._store, self._key, self._is_whole = store, key, whole
        self._copy = CachedCopy(path=path, size=found.size, is_sealed=whole, is_shared=store.cache.is_shared)
        self._is_examined = not whole
        self._touched = 0.0
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
        for start, buffer in zip(starts, buffers, strict=True):
            check_range(self.location, self.size, start, start + len(buffer))
            self._examine()
            for _ in range(MAX_FILLS):
                if not len(buffer) or self._copy.read_into(start, buffer):
                    break
                self._fill([(start, start + len(buffer))], is_urgent=True)
            else:
                self._raise_removed()

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        if ranges:
            self._fill(ranges, is_urgent=False)

    def discard(self, start: int, stop: int) -> bool:
        return self._copy.unmark(*((0, self.size) if self._is_whole else (start, stop)))

    def close(self) -> None:
        pass

    def _read_all(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        self._touch()
        self._examine()
        for start, stop in zip(starts, stops, strict=True):
            check_range(self.location, self.size, start, stop)
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
            self._raise_removed()
        return found_all

    def _fill(self, ranges: Sequence[tuple[int, int]], *, is_urgent: bool) -> None:
        inner = self._store.inner
        request = Fill(
            root=inner.root,
            options=inner.options,
            key=self._key,
            size=self.size,
            version=self.version,
            ranges=tuple(ranges),
            path=self._copy.path,
            cache=self._store.cache,
            is_urgent=is_urgent,
            is_whole=self._is_whole,
        )
        if (warning := client().ask(request)) is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)

    def _examine(self) -> None:
        """Unmark a sealed copy that an earlier run left damaged, as a power failure does. Look only once."""
        if not self._is_examined:
            if self._copy.is_damaged():
                self._copy.unmark(0, self.size)
            self._is_examined = True  # Last: other threads must not read it before.

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched > TOUCH_S:
            self._touched = now
            self._copy.touch()

    def _raise_removed(self) -> None:
        raise StoreError(
            f"the cache is too small: what was fetched of {self.location} was removed before it was read, {MAX_FILLS} "
            "times in a row. Set a larger cache_size"
        )


def _join(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges, such as an image and its label, because each is a request."""
    joined = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= LIMITS.max_gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined
