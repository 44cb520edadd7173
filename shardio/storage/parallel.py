"""Ask remote stores about many locations at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from shardio.storage.store import Location

Result = TypeVar("Result")

NUM_THREADS = 16
"""How many calls are made at a time."""


def map_locations(function: Callable[[Location], Result], locations: Sequence[Location]) -> list[Result]:
    """Call a function with each location. Return the results in the same order, or raise the first error.

    If locations are remote, several calls are made at a time, because each waits for answers. After an error or Ctrl-C,
    calls that have begun are not awaited: a store that does not answer may take minutes.
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
