"""Measure how fast a store answers: its latency, and its bandwidth for several requests at a time."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardio.storage.store import StoredFile

PIECE = 8 * 2**20
"""The bytes of a request when the bandwidth is measured: as many as reading ahead asks for."""

NUM_SMALL = 10
"""The number of small requests whose latency is measured."""

ENOUGH = 0.9
"""A number of requests saturates a store if it reaches this share of the highest bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """How fast a store answers.

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
    """Measure how fast a store answers requests for objects.

    Args:
        files: Open objects that are not read through a cache.
        nums_requests: How many requests to make at a time, in turn.
        seconds: How long to measure each of these numbers; running requests are finished.

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
    """Return the bytes per second of a number of requests at a time."""
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
