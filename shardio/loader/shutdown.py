"""An orderly shutdown: Python waits for batches that are being made, and further requests raise an error.

Worker processes end with Python, so a batch that is requested later, in an exit handler or ``__del__``, would never
arrive. Also, a daemon thread that Python stops within compiled code crashes the process.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shardio.forks import call_at_fork

PATIENCE_S = 5.0
"""How long Python's shutdown waits for batches that other threads have requested."""


class _Gate:
    """A gate that remembers the threads inside it, and admits no more once it is closed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._condition, self._is_closed = threading.Condition(), False
        self._inside: list[int] = []  # A thread is inside as often as it has entered.

    def enter(self) -> None:
        with self._condition:
            if self._is_closed:
                raise RuntimeError(
                    "Python is shutting down, so no batch can be made: read all batches before the program ends"
                )
            self._inside.append(threading.get_ident())

    def leave(self) -> None:
        with self._condition:
            self._inside.remove(threading.get_ident())
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            here = threading.get_ident()  # If Ctrl-C interrupted leave(), this thread still counts as inside.
            self._condition.wait_for(lambda: all(thread == here for thread in self._inside), PATIENCE_S)


_gate = _Gate()


@contextmanager
def before_shutdown() -> Iterator[None]:
    """Make a batch in the block, and let Python's shutdown wait for it.

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
    # Called with the first batch: exit handlers run in reverse order, and this one must run before workers are ended.
    atexit.register(_gate.close)
    call_at_fork(_gate, after_in_child=_Gate.clear)  # The child lacks the threads that were inside.
