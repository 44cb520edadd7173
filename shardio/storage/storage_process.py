"""Run the storage process: the background process that makes all requests to remote stores and fills caches.

obstore's threads do not survive a fork, and torch's DataLoader forks. Processes that may fork therefore do not use
obstore. Instead, all processes of a training run connect to the storage process that the run's first process started.
The storage process ends when the first process and its forked children have ended and the last connection is closed.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import obstore.exceptions
import obstore.store  # noqa: F401  # Imported now: threads that import it at the same time would see an incomplete module.

from shardio.errors import StoreError
from shardio.files import WorkLock
from shardio.storage import operations
from shardio.storage.client import Done, Part, Request, StorageConnection, read_process_id
from shardio.storage.copies import BLOCK, Budget, CachedCopy, name_copy
from shardio.storage.listing import BundledFile, make_tail, size_in_bundle
from shardio.storage.locations import CacheSettings, RemoteOptions, check_key
from shardio.storage.operations import Attempts, Expected
from shardio.storage.store import REMOTE_PIECE, UNVERSIONED, FileStat, ReplacedError
from shardio.values import format_bytes

NUM_LOCKS = 64
"""The number of lock files. Objects that share a lock file are fetched one after another."""

MAX_REFETCHED = 2**18
"""The maximum size in bytes of a range that is present but fetched again, so that one request replaces two."""

PATIENCE_S, SHARD_PATIENCE_S = 30.0, 600.0
"""The times in seconds to wait while another process fetches the same manifest or index, or the same whole shard.

After this time, this process fetches the object too, so the object may be fetched twice.
"""

LARGE_AHEAD = 16
"""The maximum number of large ranges of a store that are read ahead at a time."""

AHEAD = 0.75
"""The share of a store's requests that may read ahead. The rest are reserved for samples that a batch waits for."""

SMALL = 2**20
"""The maximum size, in bytes, of a small range."""

MAX_THREADS = 64
"""The maximum number of ranges that are read at a time from all stores together."""

MAX_STORES = 16
"""The maximum number of stores that keep their connections and threads. The least recently used store is dropped first.
A store that is opened with two sets of options counts as two stores."""

CHECK_S = 0.2
"""The interval, in seconds, between checks of whether the last connections are closed."""

CACHE = "cache"
"""The name of the private cache in the process's folder."""

SIMPLE = (
    operations.read_whole,
    operations.list_folder,
    operations.walk,
    operations.write,
    operations.create,
    operations.remove,
)
"""The operations that use no cache. A request contains the operation's name."""

CACHING = ("stat", "open_cached", "find_cache", "fill", "fill_files")
"""The operations of the filler."""

WRITING = ("write", "create", "remove")
"""The operations that change an object."""

Item = TypeVar("Item")

_Kind = Literal["urgent", "small", "large"]
"""The kinds of requests: those that a sample is waiting for, and small and large requests that read ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A range that is being fetched."""

    start: int
    stop: int
    arrival: Future[None] = field(default_factory=Future)


class Filler:
    """The part of the storage process that fills copies. Bytes that several clients request at once are fetched once.

    Args:
        private_folder: The folder of the private cache.
    """

    def __init__(self, private_folder: Path) -> None:
        self._private_folder = private_folder
        self._lock = threading.Lock()
        self._budgets: dict[CacheSettings, Budget] = {}
        self._found: dict[tuple[str, RemoteOptions, str], FileStat] = {}
        self._flights: dict[str, list[_Flight]] = {}
        self._threads = WeakKeyDictionary[Attempts, dict[_Kind, ThreadPoolExecutor]]()
        self._fetch_locks: dict[tuple[Path, float], WorkLock] = {}
        self._in_one = set[str]()  # The paths of copies of objects that their server sends only as a whole.
        self._warned = set[str]()  # The roots of stores about which the user has been warned.
        self._run = os.urandom(8).hex()

    def open_cached(
        self, attempts: Attempts, key: str, cache: CacheSettings, is_fresh: bool, is_whole: bool
    ) -> tuple[FileStat, str]:
        """Return an object's status and the path of its copy.

        Unless ``is_fresh`` is set, the store is asked about each object only once. :meth:`stat` detects a replaced
        object, and so does each request for a range, because the request names the version.

        If the store has no versions, a cached manifest or index may be outdated. Such an object is therefore copied
        again in each run, after each fresh request, and after each request for a status. Shards need no new copy,
        because their contents are checked against hashes.

        Args:
            attempts: The store.
            key: The object's key.
            cache: The cache.
            is_fresh: Whether to ask the store even if the status is known.
            is_whole: Whether the object will be fetched as a whole.
        """
        name = attempts.root, attempts.options, key
        found = self._found.get(name)
        if found is None or is_fresh:
            found = self._found[name] = operations.stat(attempts, key)
        is_doubtful = is_whole and found.version.endswith(UNVERSIONED)
        if is_doubtful and is_fresh:
            self._run = os.urandom(8).hex()
        run = self._run if is_doubtful else ""
        return found, str(self._budget(cache).folder / name_copy(found, run))

    def stat(self, attempts: Attempts, key: str) -> FileStat:
        """Return an object's status. If the object has been opened before, later calls open it with this status."""
        found = operations.stat(attempts, key)
        name = attempts.root, attempts.options, key
        if name in self._found:
            self._found[name] = found
            if found.version.endswith(UNVERSIONED):
                self._run = os.urandom(8).hex()
        return found

    def find_cache(self, attempts: Attempts, key: str, cache: CacheSettings) -> tuple[str, int]:
        """Return the path of a cache's folder, and the size of the cache in bytes."""
        budget = self._budget(cache)
        return str(budget.folder), budget.max_bytes

    def forget(self, attempts: Attempts, key: str) -> None:
        """Forget the status of an object that is about to change."""
        self._found.pop((attempts.root, attempts.options, key), None)

    def fill(
        self,
        attempts: Attempts,
        key: str,
        size: int,
        version: str,
        ranges: Sequence[tuple[int, int]],
        copy: CachedCopy,
        cache: CacheSettings,
        is_urgent: bool,
    ) -> str | None:
        """Fetch missing ranges of an object into its copy, or the whole object if the copy is sealed.

        Args:
            attempts: The store.
            key: The object's key.
            size: The object's size in bytes.
            version: The object's version.
            ranges: The start and the stop of each range.
            copy: The copy.
            cache: The cache of the copy.
            is_urgent: Whether a sample is waiting for the ranges. Otherwise, the ranges are read ahead.

        Returns:
            A warning for the user, or None.

        Raises:
            OSError: If the cache cannot be written.
            Exception: The same errors as :meth:`Attempts.make`.
        """
        expected, budget = Expected(root=attempts.root, key=key, version=version, size=size), self._budget(cache)
        if copy.is_sealed:
            pieces, fetch = [(0, size)], partial(self._fetch_whole, attempts, expected, copy, budget)
        else:
            pieces = [piece for start, stop in ranges for piece in _split(start, stop, size)]
            fetch = partial(self._fetch_range, attempts, expected, copy, budget)
        are_small = all(stop - start <= SMALL for start, stop in pieces)
        try:
            self._map(
                attempts,
                lambda piece: self._fill_piece(copy, *piece, fetch, is_divisible=not copy.is_sealed),
                pieces,
                "urgent" if is_urgent else "small" if are_small else "large",
            )
        except ReplacedError:
            self.forget(attempts, key)
            raise
        with self._lock:
            if copy.path not in self._in_one or attempts.root in self._warned:
                return None
            self._warned.add(attempts.root)
        return (
            f"{attempts.root} does not send parts of {key}, so such files are fetched as a whole before any of their "
            "samples is read. Use a server that supports Range requests, such as nginx, or a cache_size that holds all "
            "shards"
        )

    def fill_files(
        self, attempts: Attempts, key: str, cache: CacheSettings, files: Sequence[BundledFile], is_urgent: bool
    ) -> None:
        """Fetch missing small objects of a folder into their bundles.

        Args:
            attempts: The store.
            key: The folder.
            cache: The cache of the bundles.
            files: The objects.
            is_urgent: Whether samples are waiting for the objects. Otherwise, the objects are read ahead.

        Raises:
            OSError: If the cache cannot be written.
            Exception: The same errors as :meth:`Attempts.make`.
        """
        budget = self._budget(cache)

        def fill(file: BundledFile) -> None:
            stop = file.start + size_in_bundle(file.size)
            fetch = partial(self._fetch_file, attempts, file, budget)
            self._fill_piece(file.bundle, file.start, stop, fetch, is_divisible=False)

        self._map(attempts, fill, files, "urgent" if is_urgent else "small")

    def _fill_piece(
        self, copy: CachedCopy, start: int, stop: int, fetch: Callable[[int, int], None], *, is_divisible: bool
    ) -> None:
        """Fetch those missing parts of a range that no other thread is fetching. Wait until the range is present."""
        with self._lock:
            if is_divisible:
                missing = copy.find_missing(start, stop)
            else:
                missing = [] if copy.has(start, stop) else [(start, stop)]
            flights = self._flights.get(copy.path, ())
            others = [each for each in flights if each.start < stop and start < each.stop]
            own = [_Flight(*part) for part in choose_parts(missing, [(each.start, each.stop) for each in others])]
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
            with self._lock:
                left = [each for each in self._flights.pop(copy.path, ()) if each not in own]
                if left:
                    self._flights[copy.path] = left
        for flight in others:
            flight.arrival.result()

    def _fetch_range(
        self, attempts: Attempts, expected: Expected, copy: CachedCopy, budget: Budget, start: int, stop: int
    ) -> None:
        if copy.path not in self._in_one:
            try:
                with self._adding(copy, budget, start, stop) as write:
                    operations.copy_range(attempts, expected, start, stop, write)
            except operations.NoRangesError:
                self._in_one.add(copy.path)
        if copy.path in self._in_one:
            self._fetch_in_one(attempts, expected, copy, budget, start, stop)

    def _fetch_in_one(
        self, attempts: Attempts, expected: Expected, copy: CachedCopy, budget: Budget, start: int, stop: int
    ) -> None:
        """Fetch a shard with one request, unless another thread or process has done so in the meantime."""
        if copy.size > budget.max_bytes:
            raise StoreError(
                f"cannot read {attempts.root}/{expected.key}: the server does not send parts of it, and the whole "
                f"object is {format_bytes(copy.size)}, more than the cache of {format_bytes(budget.max_bytes)}. Set a "
                "larger cache_size, or use a server that supports Range requests, such as nginx"
            )
        with self._locking(copy, budget, SHARD_PATIENCE_S):
            if copy.find_missing(start, stop):
                with self._adding(copy, budget, 0, copy.size) as write:
                    operations.copy_whole(attempts, expected, copy.size, write)

    def _fetch_file(self, attempts: Attempts, file: BundledFile, budget: Budget, start: int, stop: int) -> None:
        expected = Expected(root=attempts.root, key=file.key, version=file.version, size=file.size)
        content = operations.read_version(attempts, expected)
        with self._adding(file.bundle, budget, start, stop) as write:
            write(start, content)
            write(start + len(content), memoryview(make_tail(content)))

    def _fetch_whole(
        self, attempts: Attempts, expected: Expected, copy: CachedCopy, budget: Budget, start: int, stop: int
    ) -> None:
        """Fetch a whole manifest or index, unless another process that shares the cache has just done so."""
        with self._locking(copy, budget, PATIENCE_S):
            if copy.find_missing(start, stop):
                content = operations.read_version(attempts, expected)
                with self._adding(copy, budget, start, stop) as write:
                    write(start, content)

    @contextmanager
    def _locking(self, copy: CachedCopy, budget: Budget, patience_s: float) -> Iterator[None]:
        """Hold the lock that processes hold while they fetch an object as a whole into a shared cache."""
        path = budget.folder / f".lock-{int(Path(copy.path).stem, 16) % NUM_LOCKS}"
        with _explaining(budget.folder):
            budget.make_folder()  # The folder may have been removed.
            mode = budget.file_mode
        with self._lock:
            lock = self._fetch_locks.setdefault((path, patience_s), WorkLock(path, patience_s, mode))
        with lock.held():
            yield

    @contextmanager
    def _adding(
        self, copy: CachedCopy, budget: Budget, start: int, stop: int
    ) -> Iterator[Callable[[int, memoryview], None]]:
        """Yield a function that writes a part of a range. Mark the range as present on exit."""
        with ExitStack() as stack:
            with _explaining(budget.folder):
                budget.make_folder()  # Another storage process may have removed the folder.
                budget.reserve(stop - start, copy.path)
                addition = stack.enter_context(copy.adding(start, stop))

            def write(position: int, part: memoryview) -> None:
                with _explaining(budget.folder):
                    addition.write(position, part)

            yield write
            with _explaining(budget.folder):
                addition.mark()

    def _map(self, attempts: Attempts, function: Callable[[Item], None], items: Sequence[Item], kind: _Kind) -> None:
        """Call a function with each item, in a store's threads for one kind of request. Raise the first error."""
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

    def _budget(self, cache: CacheSettings) -> Budget:
        with self._lock:
            if cache not in self._budgets:
                with _explaining(self._private_folder if cache.folder is None else Path(cache.folder)):
                    self._budgets[cache] = Budget(cache, self._private_folder)
            return self._budgets[cache]


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """Add the cache's folder and a remedy to an OSError from the cache's disk."""
    try:
        yield
    except StoreError:  # The error's message already names the folder and the remedy.
        raise
    except OSError as error:
        remedy = (
            "Free some space, set cache_size, or set cache to a folder on another disk"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Set cache to a writable folder on a local disk"
        )
        found = error.strerror or error
        raise OSError(error.errno, f"{found}: cannot write to the cache {folder}. {remedy}") from error


def _split(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    stop = min(-(-stop // BLOCK) * BLOCK, size)
    for begin in range(start // BLOCK * BLOCK, stop, REMOTE_PIECE):
        yield begin, min(begin + REMOTE_PIECE, stop)


def choose_parts(missing: Sequence[tuple[int, int]], in_flight: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges to fetch: those missing and not being fetched, joined across small ranges that are present.

    Args:
        missing: The ranges that are missing, sorted. The ranges between them are present.
        in_flight: The ranges that are being fetched, in any order.
    """
    flights, parts = sorted(in_flight), list[tuple[int, int]]()
    for start, stop in missing:
        for flight_start, flight_stop in flights:
            if flight_start > start and start < stop:
                parts.append((start, min(flight_start, stop)))
            start = max(start, flight_stop)
        if start < stop:
            parts.append((start, stop))
    joined = parts[:1]
    for start, stop in parts[1:]:
        last = joined[-1][1]
        if start - last <= MAX_REFETCHED and not any(each[0] < start and last < each[1] for each in flights):
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


class StorageProcess:
    """The state of the storage process.

    Args:
        listener: The socket to which other processes connect.
        folder: The folder that holds the socket and unfinished uploads, removed when the process ends.
        world_size: The number of ranks. Each rank has its own storage process.
    """

    def __init__(self, listener: socket.socket, folder: Path, world_size: int = 1) -> None:
        self._listener, self._folder, self._world_size = listener, folder, world_size
        self._filler = Filler(folder / CACHE)
        self._operations: dict[str, Callable[..., Any]] = {
            **{each.__name__: each for each in SIMPLE},
            **{name: getattr(self._filler, name) for name in CACHING},
            "read_ranges": self._read_ranges,
        }
        self._stores = OrderedDict[tuple[str, RemoteOptions], Attempts]()
        self._pool = ThreadPoolExecutor(MAX_THREADS)
        self._connections = set[StorageConnection]()
        self._lock = threading.Lock()

    def run(self) -> NoReturn:
        """Accept connections until the process ends."""
        while True:
            end, _ = self._listener.accept()
            connection = StorageConnection(end)
            with suppress(ConnectionError):  # The client has been interrupted.
                connection.send(os.getpid())
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def end_with_family(self, lifeline: int) -> NoReturn:
        """End the process when no other process holds a connection or the other end of the pipe ``lifeline``."""
        os.read(lifeline, 1)
        while any(map(_is_in_use, list(self._connections))):
            time.sleep(CHECK_S)  # Waiting for several sockets is impossible while other threads read them.
        if read_process_id(self._folder) in (None, os.getpid()):  # No other process has taken over.
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)  # Nothing waits for the results of requests in progress.

    def _serve(self, connection: StorageConnection) -> None:
        # These errors mean that the other process has ended or was interrupted.
        with closing(connection), suppress(EOFError, ConnectionError):
            while True:
                self._answer(connection, connection.receive())
        self._connections.discard(connection)

    def _answer(self, connection: StorageConnection, request: Request) -> None:
        try:
            check_key(request.root, request.key)
            attempts = self._find_store(request.root, request.options)
            if request.operation in WRITING:
                self._filler.forget(attempts, request.key)
            value = self._operations[request.operation](attempts, request.key, **request.arguments)
            if isinstance(value, Iterator):
                for part in value:
                    is_content = isinstance(part, memoryview)
                    connection.send(Part(value=None if is_content else part))
                    if is_content:
                        connection.send_bytes(part)
                value = None
        except ConnectionError:
            raise
        except Exception as error:
            connection.send(error)
        else:
            connection.send(Done(value=value))

    def _read_ranges(
        self, attempts: Attempts, key: str, size: int, version: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[memoryview]:
        """Return the contents of ranges of an object, one by one, as long as the object has the given version."""
        expected = Expected(root=attempts.root, key=key, version=version, size=size)
        read = partial(operations.read_range, attempts, expected)
        if len(ranges) == 1:
            return iter([read(*ranges[0])])
        reading = [self._pool.submit(read, start, stop) for start, stop in ranges]
        return (each.result() for each in reading)

    def _find_store(self, root: str, options: RemoteOptions) -> Attempts:
        with self._lock:
            if (root, options) not in self._stores:
                self._stores[root, options] = Attempts(root, options, self._world_size)
                if len(self._stores) > MAX_STORES:
                    self._stores.popitem(last=False)  # Requests in progress keep a reference to the store.
            self._stores.move_to_end((root, options))
            return self._stores[root, options]


def _is_in_use(connection: StorageConnection) -> bool:
    """Return whether another process holds the other end of a connection."""
    if (descriptor := connection.fileno()) < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # An empty mask reports only hangups and errors.
    return not poll.poll(0)


def main() -> None:
    """Run the storage process.

    The arguments are two descriptors (listening socket and lifeline pipe), the folder, and the number of ranks.
    """
    listener, lifeline, folder, world_size = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    process = StorageProcess(socket.socket(fileno=listener), folder, world_size)
    threading.Thread(target=process.end_with_family, args=(lifeline,), daemon=True).start()
    process.run()
