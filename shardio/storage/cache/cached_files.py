"""Small remote files, such as images, that are read as a whole, through a cache."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardio.errors import StoreError
from shardio.storage.cache.bundles import HASH_BYTES, Bundles, cut_bundles, hash_content
from shardio.storage.cache.cached_copy import CachedCopy
from shardio.storage.cache.cached_store import MAX_FILLS, TOUCH_S, CachedStore
from shardio.storage.listing import Listing, open_listing
from shardio.storage.remote.client import client
from shardio.storage.remote.messages import BundledFile, FillFiles, FindCache
from shardio.storage.store import Location


class CachedFiles:
    """The files of a listing. Threads can share it, and it can be pickled.

    Args:
        store: Their store.
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
            is_urgent: Whether samples wait for them. Otherwise, they are read ahead.

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
        if hash_content(content) != digest:  # As after a power failure. It is fetched again.
            copy.unmark(start, stop + HASH_BYTES)
            return None
        return content

    def _fill(self, numbers: Sequence[int], *, is_urgent: bool) -> None:
        if self._folder is not None and not self._folder.is_dir():
            self._folder = None  # It was that of a storage process that has ended.
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
        self._folder = None  # A private cache has another one in each run.
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
        kept: See :func:`~shardio.storage.listing.open_listing`, whose errors this raises, too.
    """
    assert isinstance(folder.store, CachedStore), "the access has a cache"
    return CachedFiles(folder.store, open_listing(folder, kept))
