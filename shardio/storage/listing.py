"""List the files of a remote folder, and read them through a cache.

If each of a million images had its own copy, every scan of the cache's folder would be slow. The cache therefore keeps
the files of a listing in *bundles*: groups of files that are adjacent in the order of their keys. In a bundle, each
file begins at a multiple of 512 bytes. The hash of each file follows the file's content, because a listing, unlike a
shard's index, has no hashes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, StoreError
from shardio.files import WorkLock, write_whole
from shardio.shared import SharedList
from shardio.storage.copies import BLOCK, COPY_SUFFIX, CachedCopy
from shardio.storage.locations import map_locations
from shardio.storage.remote import MAX_FILLS, TOUCH_S, ObjectStore
from shardio.storage.store import Location, absolute_path, make_path
from shardio.values import parse_json

FORMAT = "shardio listing 1"
"""The format of a saved listing. The format is the first value in the file."""

PATIENCE_S = 300.0
"""The time, in seconds, to wait while another process lists the same folder. After this time, this process lists the
folder too, so the folder may be listed twice."""

MEAN_BYTES = 16 * 2**20
"""The mean size of a bundle in bytes: a million images of 100 kB need 6,000 bundles. The cache removes whole
bundles."""

HASH_BYTES = 16
"""The size of the hash, xxh3-128, that follows each file's content in a bundle."""

Size = TypeVar("Size", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """The files in the subfolders of a folder, sorted by key.

    Attributes:
        folder: The folder.
        keys: The keys of the n files, such as ``images/cat/1.jpg``.
        sizes: int64 [n], the files' sizes in bytes.
        versions: The files' versions, as in :class:`~shardio.storage.store.FileStat`.
        hashes: uint64 [n], the hashes of the keys.
        order: int64 [n], the files' numbers in the order of their hashes.
        folders: The names of the subfolders. Some subfolders may have no files.
        path: The local file in which the listing is saved; None if the listing is not saved.
    """

    folder: Location
    keys: SharedList[str]
    sizes: NDArray[np.int64]
    versions: SharedList[str]
    hashes: NDArray[np.uint64]
    order: NDArray[np.int64]
    folders: tuple[str, ...]
    path: Path | None

    def __len__(self) -> int:
        return len(self.sizes)

    def find(self, key: str) -> int | None:
        """Return the number of the file with a given key; None if no file has this key."""
        wanted = np.uint64(_hash(key))
        place = int(np.searchsorted(self.hashes, wanted, sorter=self.order))
        while place < len(self) and self.hashes[self.order[place]] == wanted:
            number = int(self.order[place])
            if self.keys[number] == key:
                return number
            place += 1
        return None


def open_listing(folder: Location, kept: str | os.PathLike[str] | None) -> Listing:
    """Return a folder's listing.

    Args:
        folder: The folder.
        kept: A local file for the listing, which is read if it exists and written otherwise. If several processes write
            the file at the same time, only one process lists the folder. If ``kept`` is None, the folder is listed now,
            and nothing is saved.

    Raises:
        FormatError: If the file is damaged, or contains the listing of a different folder.
        OSError: If the folder cannot be listed, or the file cannot be read or written.
    """
    if kept is None:
        return list_files(folder)
    path = absolute_path(make_path(kept))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with WorkLock(lock, PATIENCE_S, 0o644).held():
            if not path.exists():  # Another process may have listed the folder in the meantime.
                listing = list_files(folder)
                if not path.exists():  # Another process may have listed the folder without the lock.
                    if len(listing):  # A folder that is still empty is listed again the next time.
                        _save(listing, path)
                    lock.unlink(missing_ok=True)  # Processes that wait for the lock then find the listing.
                    return replace(listing, path=path)
    return _load(folder, path)


def list_files(folder: Location) -> Listing:
    """List the files in the subfolders of a folder. Names that start with a dot are skipped."""
    names = [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]
    found = map_locations(_list_one, [folder / name for name in names])
    return make_listing(folder, sorted(chain.from_iterable(found)), names)


def _list_one(subfolder: Location) -> list[tuple[str, int, str]]:
    return [(key, stat.size, stat.version) for key, stat in subfolder.walk_stats()]


def make_listing(
    folder: Location, files: Sequence[tuple[str, int, str]], folders: Sequence[str], path: Path | None = None
) -> Listing:
    """Return the listing of files, given the key, size in bytes and version of each, in the order of keys."""
    keys, sizes, versions = map(list, zip(*files, strict=True)) if files else ([], [], [])
    hashes = np.fromiter(map(_hash, keys), np.uint64, len(keys))
    return Listing(
        folder=folder,
        keys=SharedList(keys),
        sizes=np.array(sizes, np.int64),
        versions=SharedList(versions),
        hashes=hashes,
        order=np.argsort(hashes, kind="stable"),
        folders=tuple(folders),
        path=path,
    )


def _hash(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape"))


def _save(listing: Listing, path: Path) -> None:
    values = {
        "format": FORMAT,
        "folder": str(listing.folder),
        "folders": listing.folders,
        "keys": list(listing.keys),
        "sizes": listing.sizes.tolist(),
        "versions": list(listing.versions),
    }
    with write_whole(path) as file:
        file.write(json.dumps(values).encode())


def _check(files: Sequence[tuple[Any, Any, Any]], folders: Sequence[Any], prefix: str) -> None:
    """Raise ValueError if the values of a saved listing cannot describe files in subfolders."""
    if not all(tuple(map(type, values)) == (str, int, str) for values in files) or set(map(type, folders)) - {str}:
        raise ValueError("a key, a size, a version or a name has the wrong type")
    if not all(0 <= size < 2**63 for _, size, _ in files):
        raise ValueError("a size is out of range")
    if not all(key.startswith(prefix) and "/" in key[len(prefix) :] for key, _, _ in files):
        raise ValueError("a key is not in a subfolder")
    if not all(one < other for (one, _, _), (other, _, _) in pairwise(files)):
        raise ValueError("the keys are not sorted, or a key occurs twice")


def _load(folder: Location, path: Path) -> Listing:
    try:
        found: Any = parse_json(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, expected {FORMAT!r}")
        where, names = str(found["folder"]), list(found["folders"])
        files = list(zip(found["keys"], found["sizes"], found["versions"], strict=True))
        if where == str(folder):
            _check(files, names, f"{folder.key}/" if folder.key else "")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is not a listing: {error}. Delete it, and shardio will create it again") from error
    if where != str(folder):
        raise FormatError(f"{path} is the listing of {where}, not of {folder}: name another file, or delete this one")
    return make_listing(folder, files, names, path)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundles:
    """The places of a listing's n files in m bundles.

    Attributes:
        numbers: int32 [n], the bundle of each file.
        starts: int64 [n], the offset of each file in its bundle.
        sizes: int64 [m], the size of each bundle in bytes.
        names: The names of the bundles in the cache's folder. A bundle's name depends on the files in the bundle.
    """

    numbers: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: list[str]


def cut_bundles(listing: Listing) -> Bundles:
    """Cut the files of a listing into bundles.

    The hash of a file's key, together with the file's size, decides whether a bundle ends after this file. Therefore, a
    file that is added or replaced changes only its own bundle (content-defined chunking: Muthitacharoen et al., A
    Low-Bandwidth Network File System, 2001).
    """
    spans = size_in_bundle(listing.sizes)  # [n]
    is_last = listing.hashes.astype(np.float64) < spans * (2.0**64 / MEAN_BYTES)
    is_last[-1:] = True
    stops = np.cumsum(spans)
    lasts = np.flatnonzero(is_last)  # [m]
    numbers = np.zeros(len(listing), np.int32)
    numbers[1:] = np.cumsum(is_last[:-1])
    begins = np.concatenate([[0], stops[lasts][:-1]]).astype(np.int64)[: len(lasts)]
    return Bundles(
        numbers=numbers,
        starts=stops - spans - begins[numbers],
        sizes=stops[lasts] - begins,
        names=_name_bundles(listing, lasts),
    )


def size_in_bundle(size: Size) -> Size:
    """Return the number of bytes that a file of a given size occupies in a bundle. ``size`` may also be an array."""
    return -(-(size + HASH_BYTES) // BLOCK) * BLOCK


def make_tail(content: bytes | memoryview) -> bytes:
    """Return the bytes that follow a file's content in a bundle: its hash, and zeros up to the end of the block."""
    return xxhash.xxh3_128_digest(content) + bytes(-(len(content) + HASH_BYTES) % BLOCK)


def _name_bundles(listing: Listing, lasts: NDArray[np.int64]) -> list[str]:
    names, start = list[str](), 0
    prefix, sizes = listing.folder.store.prefix, listing.sizes.tolist()
    for last in lasts.tolist():
        stop = last + 1
        files = zip(listing.keys[start:stop], sizes[start:stop], listing.versions[start:stop], strict=True)
        text = "\n".join([prefix, *(f"{key}\t{size}\t{version}" for key, size, version in files)])
        names.append(xxhash.xxh3_128_hexdigest(text.encode(errors="surrogateescape")) + COPY_SUFFIX)
        start = stop
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledFile:
    """A small object, and the place of its content in a bundle.

    Attributes:
        key: The object's key.
        size: The object's size in bytes.
        version: The object's version.
        bundle: The bundle.
        start: The offset of the content in the bundle.
    """

    key: str
    size: int
    version: str
    bundle: CachedCopy
    start: int


class CachedFiles:
    """The files of a listing, read through a cache. Threads can share this object, and it can be pickled.

    Args:
        store: The store of the files.
        listing: The listing.
    """

    _folder: Path | None

    def __init__(self, store: ObjectStore, listing: Listing) -> None:
        self.store, self.listing = store, listing
        self._bundles = cut_bundles(listing)
        self._begin()

    @property
    def cache_bytes(self) -> int:
        """The size of the cache in bytes."""
        return self.store.cache_bytes or 0

    def read_present(self, key: str) -> bytes | None:
        """Return the content of a file; None if the file is not in the cache or not in the listing."""
        number = self.listing.find(key)
        return None if number is None else self._read(number)

    def read(self, key: str) -> bytes:
        """Return the content of a file. A file that is not in the listing is read from the store.

        Raises:
            FileNotFoundError: If the file no longer exists.
            ReplacedError: If the file has been replaced since it was listed.
            OSError: If the file cannot be read.
        """
        number = self.listing.find(key)
        if number is None:
            return self.store.read_whole(key)
        for num_fills in range(MAX_FILLS + 1):
            if num_fills:
                self._fill([number], is_urgent=True)
            if (content := self._read(number)) is not None:
                return content
        raise StoreError(
            f"the cache is too small, or its disk is damaged: the fetched part of {self.store.prefix}{key} was removed "
            f"or changed before it was read, {MAX_FILLS} times in a row. Set a larger cache_size, or a different cache"
        )

    def prefetch(self, keys: Sequence[str], *, is_urgent: bool = False) -> None:
        """Put files into the cache, and wait until all of them are present.

        Args:
            keys: The keys of the files. Keys that the listing lacks are ignored.
            is_urgent: Whether samples are waiting for the files. Otherwise, the files are read ahead.

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
        if xxhash.xxh3_128_digest(content) != digest:  # A power failure may have damaged the content.
            copy.unmark(start, stop + HASH_BYTES)
            return None
        return content

    def _fill(self, numbers: Sequence[int], *, is_urgent: bool) -> None:
        if self._folder is not None and not self._folder.is_dir():
            self._folder = None  # The storage process has ended and removed the folder.
        files = tuple(map(self._describe, numbers))
        self.store.ask("fill_files", self.listing.folder.key, cache=self.store.cache, files=files, is_urgent=is_urgent)

    def _describe(self, number: int) -> BundledFile:
        return BundledFile(
            key=self.listing.keys[number],
            size=int(self.listing.sizes[number]),
            version=self.listing.versions[number],
            bundle=self._copy_of(number),
            start=int(self._bundles.starts[number]),
        )

    def _copy_of(self, number: int) -> CachedCopy:
        if self._folder is None:
            self._folder = Path(self.store.ask("find_cache", "", cache=self.store.cache)[0])
        bundle = int(self._bundles.numbers[number])
        return CachedCopy(
            path=f"{self._folder}/{self._bundles.names[bundle]}",
            size=int(self._bundles.sizes[bundle]),
            is_shared=self.store.cache is not None and self.store.cache.is_shared,
        )

    def __getstate__(self) -> tuple[ObjectStore, Listing, Bundles]:
        return self.store, self.listing, self._bundles

    def __setstate__(self, state: tuple[ObjectStore, Listing, Bundles]) -> None:
        self.store, self.listing, self._bundles = state
        self._begin()

    def _begin(self) -> None:
        self._folder = None  # A private cache has a different folder in each run.
        self._touched = np.full(len(self._bundles.names), -np.inf)

    def _touch(self, number: int, copy: CachedCopy) -> None:
        now, bundle = time.monotonic(), self._bundles.numbers[number]
        if now - self._touched[bundle] > TOUCH_S:
            self._touched[bundle] = now
            copy.touch()


def open_files(folder: Location, kept: str | os.PathLike[str] | None) -> tuple[Listing, CachedFiles | None]:
    """Return a folder's listing and its files. If the folder's store has no cache, return None instead of the files.

    Args:
        folder: The folder.
        kept: A local file for the listing: see :func:`~shardio.storage.listing.open_listing`.

    Raises:
        The same errors as :func:`~shardio.storage.listing.open_listing`.
    """
    listing, store = open_listing(folder, kept), folder.store
    return listing, CachedFiles(store, listing) if isinstance(store, ObjectStore) else None
