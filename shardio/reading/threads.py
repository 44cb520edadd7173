"""Threads that wait for requests to remote stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from shardio.errors import ShardioError

Item = TypeVar("Item")

NUM_THREADS = 16
"""How many calls are made at a time."""


def map_in_threads(function: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call a function with each item, in several threads. They do not keep the process from exiting.

    Errors are ignored: who reads what could not be fetched fetches it again, and reports the error with the sample.
    """
    remaining = iter(items)  # Threads share it: next() is atomic for iterators of sequences.

    def work() -> None:
        for item in remaining:
            with suppress(ShardioError, OSError, EOFError):
                function(item)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(NUM_THREADS, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
