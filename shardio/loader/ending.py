"""The end of Python: batches that are being made are waited for, and none can be asked for any more.

Worker processes end with Python, so a batch that was asked for later, in an exit handler or a ``__del__``, would never
come. And a daemon thread that Python stops within compiled code takes the whole process down.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

PATIENCE_S = 5.0
"""How long the end of Python waits for batches that other threads have asked for."""


class _Gate:
    """Counts the threads that are inside; closed, it admits no more."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._condition, self._num_inside, self._is_closed = threading.Condition(), 0, False

    def enter(self) -> None:
        with self._condition:
            if self._is_closed:
                raise RuntimeError(
                    "Python is shutting down, so no batch can be made: read all batches before the program ends"
                )
            self._num_inside += 1

    def leave(self) -> None:
        with self._condition:
            self._num_inside -= 1
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.wait_for(lambda: not self._num_inside, PATIENCE_S)


_gate = _Gate()


@contextmanager
def before_the_end() -> Iterator[None]:
    """Make a batch in the block, which the end of Python waits for.

    Raises:
        RuntimeError: If Python is shutting down.
    """
    _watch()
    _gate.enter()
    try:
        yield
    finally:
        _gate.leave()


@cache
def _watch() -> None:
    # With the first batch: exit handlers run in reverse order, and this one must precede those that end the workers.
    atexit.register(_gate.close)
    os.register_at_fork(after_in_child=_gate.clear)  # The threads that were inside are not there.
