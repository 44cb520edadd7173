"""Batches on their way from a loader to the user, through others that may hold some back.

A loader counts what the user received, and that is what its state says. A prefetcher asks for batches earlier than it
hands them on. So a loader does not count a batch itself, but has it counted: by whoever hands it to the user. What lies
between the two, such as a generator, need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Count = Callable[[], None]

_HELD: ContextVar[list[Count] | None] = ContextVar("held", default=None)


def counts_when_received(loader: object) -> bool:
    """Return whether a loader counts batches by :func:`hand_over`, so that its state is never ahead of the user.

    Loaders say so by an attribute of this name. Others count what they were asked for.
    """
    return bool(getattr(loader, "counts_when_received", False))


def hand_over(counts: Iterable[Count]) -> None:
    """Count what is handed on now; later, if whoever asked for it holds it back."""
    held = _HELD.get()
    if held is not None:
        held.extend(counts)
        return
    for count in counts:
        count()


@contextmanager
def held_back() -> Iterator[list[Count]]:
    """Collect what the block's batches have to count, for :func:`hand_over` when they are handed on.

    >>> received = []
    >>> with held_back() as counts:
    ...     hand_over([lambda: received.append("a batch")])
    >>> received
    []
    >>> hand_over(counts)
    >>> received
    ['a batch']
    """
    counts: list[Count] = []
    token = _HELD.set(counts)
    try:
        yield counts
    finally:
        _HELD.reset(token)
