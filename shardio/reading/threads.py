"""Threads that wait for requests to remote stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardio.errors import ShardioError, StoreError

Item = TypeVar("Item")

NUM_THREADS = 16
"""How many calls are made at a time."""


def map_in_threads(function: Callable[[Item], object], items: Sequence[Item]) -> list[StoreError]:
    """Call a function with each item, in several threads. They do not keep the process from exiting.

    Returns:
        The errors of stores that kept failing: repeating such a request takes as long again. Other errors are ignored,
        because what could not be fetched is fetched again when it is read, which reports the error with the sample.
    """
    remaining = iter(items)  # Threads share it: next() is atomic for iterators of sequences.
    errors = list[StoreError]()

    def work() -> None:
        for item in remaining:
            try:
                function(item)
            except StoreError as error:  # noqa: PERF203  # A request takes much longer.
                errors.append(error)
            except (ShardioError, OSError, EOFError):
                continue

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(NUM_THREADS, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
