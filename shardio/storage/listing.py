"""List remote folders, and measure how fast their store answers."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.files import WorkLock, write_whole
from shardio.shared import SharedList
from shardio.storage.store import Location, StoredFile, absolute_path, make_path
from shardio.values import parse_json

Result = TypeVar("Result")

NUM_THREADS = 16
"""The number of calls to make at a time."""

FORMAT = "shardio listing 1"
"""The first value of a kept listing."""

PATIENCE_S = 300.0
"""The time in seconds to wait for another process that lists the same folder. After it, the folder is listed twice."""

PIECE = 8 * 2**20
"""The bytes of a request when the bandwidth is measured: as many as reading ahead asks for."""

NUM_SMALL = 10
"""The number of small requests whose latency is measured."""

ENOUGH = 0.9
"""The share of the highest bandwidth at which a number of requests saturates a store."""


def map_locations(function: Callable[[Location], Result], locations: Sequence[Location]) -> list[Result]:
    """Call a function with each location. Return the results in the same order, or raise the first error.

    If locations are remote, several calls are made at a time, because each waits for answers. After an error or Ctrl-C,
    the function does not wait for running calls: a store that does not answer may take minutes.
    """
    if len(locations) < 2 or all(each.store.is_local for each in locations):
        return list(map(function, locations))
    answers = SimpleQueue[tuple[int, Result | None, BaseException | None]]()
    remaining, is_over = iter(list(enumerate(locations))), threading.Event()  # Threads share both.

    def work() -> None:
        for place, location in remaining:
            if is_over.is_set():
                return
            try:
                answers.put((place, function(location), None))
            except BaseException as error:  # Raised below, in the thread that called.
                answers.put((place, None, error))

    for _ in range(min(NUM_THREADS, len(locations))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Result] = {}
    try:
        while len(results) < len(locations):
            place, result, error = answers.get()
            if error is not None:
                raise error
            results[place] = result  # type: ignore[assignment]  # There is a result, because there is no error.
    finally:
        is_over.set()
    return [results[place] for place in range(len(locations))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """The files in the subfolders of a folder, sorted by key.

    Attributes:
        folder: The folder.
        keys: The keys of the n files, such as ``images/cat/1.jpg``.
        sizes: int64 [n], their sizes in bytes.
        versions: Their versions, as in :class:`~shardio.storage.store.FileStat`.
        hashes: uint64 [n], the hashes of the keys.
        order: int64 [n], the files' numbers in the order of their hashes.
        folders: The names of the subfolders. Some may have no files.
        path: The local file that keeps the listing; None if there is none.
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
        """Return the number of the file with a key; None if there is none."""
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
        kept: A local file that keeps the listing: it is read if it exists, and written otherwise. Processes that do so
            at the same time list the folder once. None to list the folder now, and keep nothing.

    Raises:
        FormatError: If the file is damaged, or keeps the listing of another folder.
        OSError: If the folder cannot be listed, or the file cannot be read or written.
    """
    if kept is None:
        return list_files(folder)
    path = absolute_path(make_path(kept))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with WorkLock(lock, PATIENCE_S, 0o644).held():
            if not path.exists():  # Otherwise, another process has listed the folder in the meantime.
                listing = list_files(folder)
                if not path.exists():  # Otherwise, one did so without the lock: all processes use the same listing.
                    if len(listing):  # A folder that is still empty is listed again the next time.
                        _save(listing, path)
                    lock.unlink(missing_ok=True)  # A process that waits for the lock finds the listing.
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
    """Return the listing of files, given their keys, sizes in bytes and versions, sorted by key."""
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
    """Raise ValueError if the values of a kept listing cannot be those of files in subfolders."""
    if not all(tuple(map(type, values)) == (str, int, str) for values in files) or set(map(type, folders)) - {str}:
        raise ValueError("a key, a size, a version or a name has the wrong type")
    if not all(0 <= size < 2**63 for _, size, _ in files):
        raise ValueError("a size is out of range")
    if not all(key.startswith(prefix) and "/" in key[len(prefix) :] for key, _, _ in files):
        raise ValueError("a key is not in a subfolder")
    if not all(one < other for (one, _, _), (other, _, _) in pairwise(files)):
        raise ValueError("the keys are not sorted, or one occurs twice")


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
        raise FormatError(f"{path} is not a listing: {error}. Delete it, and it is made again") from error
    if where != str(folder):
        raise FormatError(f"{path} is the listing of {where}, not of {folder}: name another file, or delete this one")
    return make_listing(folder, files, names, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """The latency and the bandwidth of a store.

    Attributes:
        latency_s: The median time in seconds until one byte has arrived.
        bytes_per_s: The bandwidth in bytes per second, by the number of requests at a time.
    """

    latency_s: float
    bytes_per_s: dict[int, float]

    @property
    def best(self) -> float:
        """The highest bandwidth in bytes per second."""
        return max(self.bytes_per_s.values())

    @property
    def num_saturating(self) -> int:
        """The smallest number of requests at a time that reaches nearly the highest bandwidth."""
        return min(number for number, rate in self.bytes_per_s.items() if rate >= ENOUGH * self.best)


def measure_store(files: Sequence[StoredFile], nums_requests: Sequence[int], seconds: float) -> StoreSpeed:
    """Measure the latency and the bandwidth of a store.

    Args:
        files: Open objects that are not read through a cache.
        nums_requests: The numbers of requests to make at a time, one after the other.
        seconds: The time in seconds to measure each of these numbers. Running requests are finished.

    Raises:
        ValueError: If all objects are empty.
    """
    pieces = [(file, start, min(start + PIECE, file.size)) for file in files for start in range(0, file.size, PIECE)]
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
