"""Ask remote stores about many locations at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardio.storage.store import Location

Result = TypeVar("Result")

NUM_THREADS = 16
"""How many calls are made at a time."""


def map_locations(function: Callable[[Location], Result], locations: Sequence[Location]) -> list[Result]:
    """Call a function with each location. Return the results in the same order, or raise the first error.

    If locations are remote, several calls are made at a time, because each waits for answers.
    """
    if len(locations) < 2 or all(each.store.is_local for each in locations):
        return list(map(function, locations))
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        try:
            return list(threads.map(function, locations))
        except BaseException:  # Ctrl-C, too: what has not begun is left out.
            threads.shutdown(wait=False, cancel_futures=True)
            raise
