"""Read remote objects and small files through the cache."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.errors import StoreError
from shardio.storage.cache.copies import HASH_BYTES, Bundles, CachedCopy, cut_bundles, hash_content
from shardio.storage.listing import Listing, open_listing
from shardio.storage.local import LIMITS
from shardio.storage.options import CacheSettings
from shardio.storage.remote.client import client
from shardio.storage.remote.messages import BundledFile, Fill, FillFiles, FindCache, OpenCached
from shardio.storage.remote.object_store import ObjectStore, check_range
from shardio.storage.store import FileStat, Location, Writer, read_runs

TOUCH_S = 10.0
"""The time in seconds between two records that a copy is in use, while its file is read."""

MAX_FILLS = 5
"""The number of times that one read fetches what it needs. If it was removed each time, the cache is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStore:
    """A remote store whose open objects are read through a cache. Other calls go to the store.

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
        found: The object's status in the store.
        path: The path of its copy.
        whole: Whether to fetch the whole object when a part is read.
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
        return read_runs(self._read_all, starts, stops, LIMITS)  # Most ranges are present in a local file.

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
        """Unmark a sealed copy that an earlier run left damaged, such as by a power failure. Look only once."""
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
    """Join neighbouring ranges, such as an image and its label, because each range is a request."""
    joined = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= LIMITS.max_gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


class CachedFiles:
    """The files of a listing, read through a cache. Threads can share it, and it can be pickled.

    Args:
        store: The store of the files.
        listing: The listing.
    """

    _folder: Path | None

    def __init__(self, store: CachedStore, listing: Listing) -> None:
        self.store, self.listing = store, listing
        self._bundles = cut_bundles(listing)
        self._begin()

    def read_present(self, key: str) -> bytes | None:
        """Return the content of a file if it is in the cache; None otherwise, or if the listing lacks the file."""
        number = self.listing.find(key)
        return None if number is None else self._read(number)

    def read(self, key: str) -> bytes:
        """Return the content of a file. One that is not in the listing is read from the store.

        Raises:
            FileNotFoundError: If it does not exist any more.
            ReplacedError: If it was replaced since it was listed.
            OSError: If it cannot be read.
        """
        number = self.listing.find(key)
        if number is None:
            return self.store.read_whole(key)
        for _ in range(MAX_FILLS):
            if (content := self._read(number)) is not None:
                return content
            self._fill([number], is_urgent=True)
        if (content := self._read(number)) is not None:
            return content
        raise StoreError(
            f"the cache is too small, or its disk is damaged: what was fetched of {self.store.prefix}{key} was removed "
            f"or changed before it was read, {MAX_FILLS} times in a row. Set a larger cache_size, or another cache"
        )

    def prefetch(self, keys: Sequence[str], *, is_urgent: bool = False) -> None:
        """Put files into the cache. Return when they are there.

        Args:
            keys: Their keys. Those that the listing lacks are ignored.
            is_urgent: Whether samples wait for the files. Otherwise, they are read ahead.

        Raises:
            The same errors as :meth:`read`, for any of the files.
        """
        numbers = [number for key in keys if (number := self.listing.find(key)) is not None]
        missing = [number for number in numbers if not self._has(number)]
        if missing:
            self._fill(missing, is_urgent=is_urgent)

    def _has(self, number: int) -> bool:
        start = int(self._bundles.starts[number])
        return self._copy_of(number).has(start, start + int(self.listing.sizes[number]) + HASH_BYTES)

    def _read(self, number: int) -> bytes | None:
        copy, start = self._copy_of(number), int(self._bundles.starts[number])
        stop = start + int(self.listing.sizes[number])
        content, digest = copy.read([start, stop], [stop, stop + HASH_BYTES])
        if content is None or digest is None:
            return None
        self._touch(number, copy)
        if hash_content(content) != digest:  # Such as after a power failure. It is fetched again.
            copy.unmark(start, stop + HASH_BYTES)
            return None
        return content

    def _fill(self, numbers: Sequence[int], *, is_urgent: bool) -> None:
        if self._folder is not None and not self._folder.is_dir():
            self._folder = None  # It belonged to a storage process that has ended.
        inner = self.store.inner
        files = tuple(map(self._describe, numbers))
        client().ask(
            FillFiles(
                root=inner.root,
                options=inner.options,
                key=self.listing.folder.key,
                cache=self.store.cache,
                files=files,
                is_urgent=is_urgent,
            )
        )

    def _describe(self, number: int) -> BundledFile:
        copy = self._copy_of(number)
        return BundledFile(
            key=self.listing.keys[number],
            size=int(self.listing.sizes[number]),
            version=self.listing.versions[number],
            path=copy.path,
            bundle_size=copy.size,
            start=int(self._bundles.starts[number]),
        )

    def _copy_of(self, number: int) -> CachedCopy:
        if self._folder is None:
            inner = self.store.inner
            folder, _ = client().ask(FindCache(root=inner.root, options=inner.options, key="", cache=self.store.cache))
            self._folder = Path(folder)
        bundle = int(self._bundles.numbers[number])
        return CachedCopy(
            path=f"{self._folder}/{self._bundles.names[bundle]}",
            size=int(self._bundles.sizes[bundle]),
            is_shared=self.store.cache.is_shared,
        )

    def __getstate__(self) -> tuple[CachedStore, Listing, Bundles]:
        return self.store, self.listing, self._bundles

    def __setstate__(self, state: tuple[CachedStore, Listing, Bundles]) -> None:
        self.store, self.listing, self._bundles = state
        self._begin()

    def _begin(self) -> None:
        self._folder = None  # A private cache has another folder in each run.
        self._touched = np.full(len(self._bundles.names), -np.inf)

    def _touch(self, number: int, copy: CachedCopy) -> None:
        now, bundle = time.monotonic(), self._bundles.numbers[number]
        if now - self._touched[bundle] > TOUCH_S:
            self._touched[bundle] = now
            copy.touch()


def open_files(folder: Location, kept: str | os.PathLike[str] | None) -> CachedFiles:
    """Return the files of a remote folder.

    Args:
        folder: The folder, in a store with a cache.
        kept: The local file that keeps the listing: see :func:`~shardio.storage.listing.open_listing`.

    Raises:
        The same errors as :func:`~shardio.storage.listing.open_listing`.
    """
    assert isinstance(folder.store, CachedStore), "the access has a cache"
    return CachedFiles(folder.store, open_listing(folder, kept))
