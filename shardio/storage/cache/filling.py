"""Fill copies in a cache for the other processes. Only storage processes write to a cache."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import xxhash

from shardio.errors import StoreError
from shardio.files import WorkLock
from shardio.storage.cache.copies import BLOCK, CachedCopy, make_tail, size_in_bundle
from shardio.storage.options import (
    COPY_SUFFIX,
    Budget,
    CacheSettings,
    RemoteOptions,
    choose_size,
    find_cache_folder,
    find_file_mode,
    make_cache_folder,
)
from shardio.storage.remote.backends import Attempts, NoRangesError
from shardio.storage.remote.messages import BundledFile, Fill, FillFiles, OpenCached, Request, Stat
from shardio.storage.remote.operations import UNVERSIONED, copy_range, copy_whole, read_version, stat
from shardio.storage.store import FileStat, ReplacedError

PIECE = 8 * 2**20
"""The maximum bytes of a request, which take 6 ms of CPU time. Longer requests would save nothing, and delay others."""

NUM_LOCKS = 64
"""The number of lock files. Objects that share one are fetched one after the other."""

PATIENCE_S, SHARD_PATIENCE_S = 30.0, 600.0
"""The times in seconds to wait for another process that fetches the same manifest or index, and the same whole shard.

After them, it is fetched twice.
"""

LARGE_AHEAD = 16
"""The maximum number of large ranges of a store that are read ahead at a time."""

AHEAD = 0.75
"""The share of a store's requests that may read ahead. The others are for samples that a batch waits for."""

SMALL = 2**20
"""The largest size of a small range in bytes."""

Item = TypeVar("Item")

_Kind = Literal["urgent", "small", "large"]
"""The kinds of requests: those for which a sample waits, and small and large ones that read ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A range that is being fetched."""

    start: int
    stop: int
    arrival: Future[None] = field(default_factory=Future)


class Filler:
    """Fills copies. This process fetches no byte twice, however many clients ask for it at the same time.

    Args:
        private_folder: The folder of the private cache.
    """

    def __init__(self, private_folder: Path) -> None:
        self._private_folder = private_folder
        self._lock = threading.Lock()
        self._budgets: dict[CacheSettings, Budget] = {}
        self._found: dict[tuple[str, RemoteOptions, str], FileStat] = {}
        self._flights: dict[str, list[_Flight]] = {}
        self._threads = WeakKeyDictionary[Attempts, dict[_Kind, ThreadPoolExecutor]]()  # They end with their store.
        self._fetch_locks: dict[tuple[Path, float], WorkLock] = {}
        self._in_one = set[str]()  # The paths of copies of objects that their server sends only as a whole.
        self._warned = set[str]()  # The roots of stores about which the user was warned.
        self._run = os.urandom(8).hex()

    def open(self, attempts: Attempts, request: OpenCached) -> tuple[FileStat, str]:
        """Return an object's status and the path of its copy.

        Unless the request says otherwise, the store is asked once for each object. :meth:`stat` notices a replaced
        object, and so does each request for a range, because it names the version.

        If the store knows no versions, a cached manifest or index may be outdated. So it has another copy in each run,
        and after each request that asks the store again. Shards are compared with hashes.
        """
        name = request.root, request.options, request.key
        found = self._found.get(name)
        if found is None or request.is_fresh:
            found = stat(attempts, Stat(root=request.root, options=request.options, key=request.key))
            self._found[name] = found
        is_doubtful = request.is_whole and found.version.endswith(UNVERSIONED)
        if is_doubtful and request.is_fresh:
            self._run = os.urandom(8).hex()
        run = self._run if is_doubtful else ""
        return found, str(self._budget(request.cache).folder / name_copy(found, run))

    def stat(self, attempts: Attempts, request: Stat) -> FileStat:
        """Return an object's status. An object that was opened before is opened with this status from now on."""
        found = stat(attempts, request)
        name = request.root, request.options, request.key
        if name in self._found:
            self._found[name] = found
        return found

    def find(self, cache: CacheSettings) -> tuple[str, int]:
        """Return the path of a cache's folder, and the size of the cache in bytes."""
        budget = self._budget(cache)
        return str(budget.folder), budget.max_bytes

    def forget(self, request: Request) -> None:
        """Forget the status of an object that is about to change."""
        self._found.pop((request.root, request.options, request.key), None)

    def fill(self, attempts: Attempts, request: Fill) -> str | None:
        """Make ranges present. Return a warning for the user, or None.

        Raises:
            OSError: If the cache cannot be written.
            Exception: The same errors as :meth:`Attempts.make`.
        """
        copy = CachedCopy(
            path=request.path,
            size=request.size,
            is_sealed=request.is_whole,
            is_shared=request.cache.is_shared,
        )
        if request.is_whole:
            pieces, fetch = [(0, request.size)], partial(self._fetch_whole, attempts, request, copy)
        else:
            pieces = [piece for start, stop in request.ranges for piece in _split(start, stop, request.size)]
            fetch = partial(self._fetch_range, attempts, request, copy)
        try:
            self._map(
                attempts,
                lambda piece: self._fill_piece(copy, *piece, fetch, is_divisible=not request.is_whole),
                pieces,
                "urgent" if request.is_urgent else "small" if _are_small(pieces) else "large",
            )
        except ReplacedError:
            self.forget(request)
            raise
        with self._lock:
            if request.path not in self._in_one or request.root in self._warned:
                return None
            self._warned.add(request.root)
        return (
            f"{request.root} does not send parts of {request.key}, so such files are fetched as a whole before one of "
            "their samples is read. Use a server that supports Range requests, such as nginx, or a cache_size that "
            "holds all shards"
        )

    def fill_files(self, attempts: Attempts, request: FillFiles) -> None:
        """Make small objects present in their bundles.

        Raises:
            OSError: If the cache cannot be written.
            Exception: The same errors as :meth:`Attempts.make`.
        """

        def fill(file: BundledFile) -> None:
            bundle = CachedCopy(path=file.path, size=file.bundle_size, is_shared=request.cache.is_shared)
            stop = file.start + size_in_bundle(file.size)
            fetch = partial(self._fetch_file, attempts, request, bundle, file)
            self._fill_piece(bundle, file.start, stop, fetch, is_divisible=False)

        self._map(attempts, fill, request.files, "urgent" if request.is_urgent else "small")

    def _fill_piece(
        self,
        copy: CachedCopy,
        start: int,
        stop: int,
        fetch: Callable[[int, int], None],
        *,
        is_divisible: bool,
    ) -> None:
        """Fetch the missing parts of a range that no other thread is fetching. Return when the range is present."""
        with self._lock:
            if is_divisible:
                missing = copy.find_missing(start, stop)
            else:
                missing = [] if copy.has(start, stop) else [(start, stop)]
            others = [each for each in self._flights.get(copy.path, ()) if _overlaps(each, start, stop)]
            own = [_Flight(*part) for each in missing for part in _subtract(each, others)]
            self._flights.setdefault(copy.path, []).extend(own)
        try:
            for flight in own:
                fetch(flight.start, flight.stop)
        except BaseException as error:
            for flight in own:
                flight.arrival.set_exception(error)
            raise
        else:
            for flight in own:
                flight.arrival.set_result(None)
        finally:
            self._forget(copy.path, own)
        for flight in others:
            flight.arrival.result()

    def _fetch_range(self, attempts: Attempts, request: Fill, copy: CachedCopy, start: int, stop: int) -> None:
        if copy.path not in self._in_one:
            try:
                with self._adding(copy, request.cache, start, stop) as write:
                    copy_range(attempts, request, start, stop, write)
            except NoRangesError:
                self._in_one.add(copy.path)
        if copy.path in self._in_one:
            self._fetch_in_one(attempts, request, copy, start, stop)

    def _fetch_in_one(self, attempts: Attempts, request: Fill, copy: CachedCopy, start: int, stop: int) -> None:
        """Fetch a shard with one request, unless another thread or process has done so in the meantime."""
        budget = self._budget(request.cache)
        if request.size > budget.max_bytes:
            raise StoreError(
                f"cannot read {request.root}/{request.key}: the server does not send parts of it, and the whole object "
                f"has {request.size} bytes, more than the cache of {budget.max_bytes}. Set a larger cache_size, or use "
                "a server that supports Range requests, such as nginx"
            )
        with self._locking(copy, request.cache, SHARD_PATIENCE_S):
            if copy.find_missing(start, stop):
                with self._adding(copy, request.cache, 0, request.size) as write:
                    copy_whole(attempts, request, write)

    def _fetch_file(
        self, attempts: Attempts, request: FillFiles, bundle: CachedCopy, file: BundledFile, start: int, stop: int
    ) -> None:
        named = Request(root=request.root, options=request.options, key=file.key)
        content = read_version(attempts, named, file.version, file.size)
        with self._adding(bundle, request.cache, start, stop) as write:
            write(start, content)
            write(start + len(content), memoryview(make_tail(content)))

    def _fetch_whole(self, attempts: Attempts, request: Fill, copy: CachedCopy, start: int, stop: int) -> None:
        """Fetch an object as a whole: a manifest or an index. One of the processes that share the cache does so."""
        with self._locking(copy, request.cache, PATIENCE_S):
            if copy.find_missing(0, request.size):
                content = read_version(attempts, request, request.version, request.size)
                with self._adding(copy, request.cache, 0, request.size) as write:
                    write(0, content)

    @contextmanager
    def _locking(self, copy: CachedCopy, cache: CacheSettings, patience_s: float) -> Iterator[None]:
        """Hold the lock that processes hold while they fetch an object as a whole into a shared cache."""
        folder = self._budget(cache).folder
        path = folder / f".lock-{int(Path(copy.path).stem, 16) % NUM_LOCKS}"
        with _explaining(folder):
            make_cache_folder(cache, folder)  # It may have been removed.
            mode = find_file_mode(cache, folder)
        with self._lock:
            lock = self._fetch_locks.setdefault((path, patience_s), WorkLock(path, patience_s, mode))
        with lock.held():
            yield

    @contextmanager
    def _adding(
        self, copy: CachedCopy, cache: CacheSettings, start: int, stop: int
    ) -> Iterator[Callable[[int, memoryview], None]]:
        """Yield a function that writes a part of a range. Mark the range as present at the end of the block."""
        budget = self._budget(cache)
        with ExitStack() as stack:
            with _explaining(budget.folder):
                make_cache_folder(cache, budget.folder)  # Another storage process may have removed it.
                budget.reserve(stop - start, copy.path)
                addition = stack.enter_context(copy.adding(start, stop))

            def write(position: int, part: memoryview) -> None:
                with _explaining(budget.folder):
                    addition.write(position, part)

            yield write
            with _explaining(budget.folder):
                addition.mark()

    def _map(self, attempts: Attempts, function: Callable[[Item], None], items: Sequence[Item], kind: _Kind) -> None:
        """Call a function with each item, in a store's threads for one kind of requests. Raise the first error."""
        if len(items) == 1 and kind == "urgent":
            function(items[0])
        else:
            list(self._find_threads(attempts, kind).map(function, items))

    def _find_threads(self, attempts: Attempts, kind: _Kind) -> ThreadPoolExecutor:
        with self._lock:
            threads = self._threads.setdefault(attempts, {})
            if kind not in threads:
                num_ahead = max(1, int(AHEAD * attempts.max_requests))
                sizes = {"urgent": attempts.max_requests, "small": num_ahead, "large": min(LARGE_AHEAD, num_ahead)}
                threads[kind] = ThreadPoolExecutor(sizes[kind])
            return threads[kind]

    def _forget(self, path: str, flights: list[_Flight]) -> None:
        with self._lock:
            left = [each for each in self._flights.pop(path, ()) if each not in flights]
            if left:
                self._flights[path] = left

    def _budget(self, cache: CacheSettings) -> Budget:
        with self._lock:
            if cache not in self._budgets:
                folder = self._private_folder if cache.folder is None else Path(cache.folder)
                with _explaining(folder):
                    folder = find_cache_folder(cache, folder)
                    make_cache_folder(cache, folder)
                    self._budgets[cache] = Budget(folder, choose_size(cache, folder), find_file_mode(cache, folder))
            return self._budgets[cache]


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """Add the cache's folder and the remedy to an OSError of its disk."""
    try:
        yield
    except StoreError:  # It says what is wrong with the folder.
        raise
    except OSError as error:
        remedy = (
            "Free some space, set cache_size, or set cache to a folder on another disk"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Set cache to a folder on a local disk in which you may write"
        )
        found = error.strerror or error
        raise OSError(error.errno, f"{found}: cannot write to the cache {folder}. {remedy}") from error


def name_copy(found: FileStat, run: str = "") -> str:
    """Return the name of an object's copy. If a run is given, the name is different in each run."""
    text = f"{found.identity}\n{found.version}\n{found.size}" + (f"\n{run}" if run else "")
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogateescape")) + COPY_SUFFIX


def _are_small(pieces: Sequence[tuple[int, int]]) -> bool:
    return all(stop - start <= SMALL for start, stop in pieces)


def _split(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield a range in pieces of whole blocks."""
    stop = min(-(-stop // BLOCK) * BLOCK, size)
    for begin in range(start // BLOCK * BLOCK, stop, PIECE):
        yield begin, min(begin + PIECE, stop)


def _overlaps(flight: _Flight, start: int, stop: int) -> bool:
    return flight.start < stop and start < flight.stop


def _subtract(missing: tuple[int, int], flights: list[_Flight]) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that are not being fetched."""
    start, stop = missing
    for flight in sorted(flights, key=lambda each: each.start):
        if flight.start > start and start < stop:
            yield start, min(flight.start, stop)
        start = max(start, flight.stop)
    if start < stop:
        yield start, stop
