"""What a loader tells the wrappers of its batches: how to count them, and their rng keys.

A loader's state counts the batches that the user received, but a prefetcher requests batches before the user does. So
the loader provides a function that counts a batch, and the outermost wrapper calls it when the user receives the
batch. Objects in between, such as generators, are not involved.

In the same way, the loader provides the rng key of the batch that it has just returned, from which a wrapper may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Count = Callable[[], None]

_HELD: ContextVar[list[Count] | None] = ContextVar("held", default=None)
_RNG_KEY: ContextVar[Callable[[], int] | None] = ContextVar("rng_key", default=None)


def counts_when_received(loader: object) -> bool:
    """Return whether a loader counts batches with :func:`hand_over`, so that its state is never ahead of the user.

    Such a loader has a true attribute of this name. Other loaders count batches when they are requested.
    """
    return bool(getattr(loader, "counts_when_received", False))


def find_held() -> list[Count] | None:
    """Return the list of the innermost :func:`held_back` that the caller is in; None if it is in none."""
    return _HELD.get()


def restore_held(held: list[Count] | None) -> None:
    """Leave each :func:`held_back` that was entered since :func:`find_held` returned ``held``.

    An interruption such as Ctrl-C may skip the end of the block. Without this, no loader would count a batch any more.
    """
    _HELD.set(held)


def hand_over(counts: Iterable[Count]) -> None:
    """Call functions that count a batch. Inside :func:`held_back`, collect them to be called later."""
    held = _HELD.get()
    if held is not None:
        held.extend(counts)
        return
    for count in counts:
        count()


@contextmanager
def held_back() -> Iterator[list[Count]]:
    """Collect the functions that count a block's batches. Call :func:`hand_over` when the user receives the batches.

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


def provide_rng_key(make: Callable[[], int] | None) -> None:
    """Set the function that returns the rng key of the batch that is returned next; None if it has none."""
    _RNG_KEY.set(make)


def take_rng_key() -> int | None:
    """Return the rng key of the batch that was returned, and forget it; None if the loader has provided none."""
    make = _RNG_KEY.get()
    _RNG_KEY.set(None)
    return None if make is None else make()
