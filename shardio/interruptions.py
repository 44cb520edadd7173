"""Interruptions: errors that a signal handler raised. The code that they interrupt is not their cause.

A sample whose decoding was interrupted is not damaged. A batch that was interrupted may be lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import CodeType
from typing import Any


def let_through(error: BaseException) -> None:
    """Re-raise an error if it is an interruption. Call this before blaming a sample for an error."""
    if is_interruption(error):
        raise error


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal handler raised an error or one of its causes."""
    handlers, seen = set(_codes_of_handlers()), set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # `raise error from error` makes a cycle.
        trace = cause.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers:
                return True
            trace = trace.tb_next
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def describe_error(error: BaseException) -> str:
    """Return an error's class and message as text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def cut_short(by: str) -> RuntimeError:
    """Return the error for an epoch that cannot continue, given a description of what ended it."""
    return RuntimeError(
        f"this epoch ended before its last batch ({by}). It cannot continue because a batch may be lost: iterate over "
        "the loader again. To get the rest of this epoch from a shardio.DataLoader, call "
        "loader.load_state_dict(loader.state_dict()) first"
    )


def no_end(error: Exception) -> Exception:
    """Return an error unchanged, but a RuntimeError for StopIteration, which would end the epoch silently (PEP 479)."""
    if not isinstance(error, StopIteration):
        return error
    failure = RuntimeError("a dataset, decoder, transform or collate_fn raised StopIteration: raise another exception")
    failure.__cause__ = error
    return failure


def _codes_of_handlers() -> Iterator[CodeType]:
    """Yield the code of each signal handler written in Python."""
    for each in signal.valid_signals():
        handler: Any = signal.getsignal(each)
        if not callable(handler):  # Default or ignored.
            continue
        handler = getattr(handler, "func", handler)  # For a partial.
        code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if code is not None:
            yield code
