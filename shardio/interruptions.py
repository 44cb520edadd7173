"""Interruptions: errors that a signal handler raised, and so say nothing of what was being done at that moment.

A sample whose decoding was interrupted is not damaged, and a batch that was interrupted may be lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import CodeType
from typing import Any


def let_through(error: BaseException) -> None:
    """Raise an error again if it is an interruption; for whoever is about to blame a sample for it."""
    if is_interruption(error):
        raise error


def is_interruption(error: BaseException) -> bool:
    """Say whether a signal handler raised an error, or the error that is its cause."""
    handlers, seen = set(_codes_of_handlers()), set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # Causes are a circle after `raise error from error`.
        place = cause.__traceback__
        while place is not None:
            if place.tb_frame.f_code in handlers:
                return True
            place = place.tb_next
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def describe_error(error: BaseException) -> str:
    """Return an error's class and words, for messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def cut_short(by: str) -> RuntimeError:
    """Return the error for an epoch that cannot go on, by the description of what ended it."""
    return RuntimeError(
        f"this epoch ended before its last batch, by {by}: it cannot go on, because a batch may be lost. Iterate over "
        "the loader again; to get the rest of this epoch, where shardio has the order, call "
        "loader.load_state_dict(loader.state_dict()) first"
    )


def no_end(error: Exception) -> Exception:
    """Return an error that ends no epoch in silence: RuntimeError for StopIteration, as generators raise (PEP 479)."""
    if not isinstance(error, StopIteration):
        return error
    failure = RuntimeError("a dataset, transform or collate_fn raised StopIteration, which is no error: raise another")
    failure.__cause__ = error
    return failure


def _codes_of_handlers() -> Iterator[CodeType]:
    """Yield the code of all signal handlers that are written in Python."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if not callable(handler):  # The default, or ignored.
            continue
        handler = getattr(handler, "func", handler)  # A partial.
        code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if code is not None:
            yield code
