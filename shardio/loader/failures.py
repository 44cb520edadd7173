"""Errors that are returned instead of a batch, and the orderly shutdown of a loader.

Worker processes end with Python, so a batch that is requested later, in an exit handler or ``__del__``, would never
arrive. Also, a daemon thread that Python stops within compiled code crashes the process.
"""

from __future__ import annotations

import atexit
import copy
import pickle
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from shardio.errors import copy_mark
from shardio.process import call_at_fork

PATIENCE_S = 5.0
"""The time, in seconds, that Python's shutdown waits for batches that other threads have requested."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a batch or a chunk, returned instead of it.

    Attributes:
        error: The error.
        traceback: The error's traceback in another process; empty if the error has its own.
    """

    error: BaseException
    traceback: str = ""

    def restore(self) -> BaseException:
        """Return the error, with its traceback in another process as the cause."""
        if self.traceback:  # Pickling drops the original one.
            self.error.__cause__ = RuntimeError(f"in a worker:\n{self.traceback}")
        return self.error

    def renewed(self) -> Failure:
        """Return the same failure with a copy of the error, for one that is raised several times.

        An error's traceback holds every frame that it has passed, and so the loader that has raised it.
        """
        try:
            error = copy.copy(self.error)
        except Exception:  # Copying may fail in any way.
            error = _as_runtime_error(self.error)
        error.__cause__ = self.error.__cause__
        return Failure(error=error.with_traceback(self.error.__traceback__), traceback=self.traceback)


def describe_failure(error: BaseException) -> Failure:
    """Return a failure that can be sent to another process."""
    lines = traceback.format_exception(error)
    if sys.version_info < (3, 11):  # Python writes notes from then on.
        lines += [f"{note}\n" for note in getattr(error, "__notes__", [])]
    return Failure(error=_make_portable(error), traceback="".join(lines))


def _make_portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Pickling may fail in any way. Send at least the message.
        return _as_runtime_error(error)
    return error


def _as_runtime_error(error: BaseException) -> BaseException:
    portable = RuntimeError(f"{type(error).__name__}: {error}")
    copy_mark(error, portable)
    return portable


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
