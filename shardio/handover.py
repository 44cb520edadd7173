"""What a loader tells the wrappers of its batches: how to count them, and their rng keys.

A loader's state counts the batches that the user received, but a prefetcher requests batches before the user does. So
the loader provides a function that counts a batch, and the outermost wrapper calls it when the user receives the
batch. Objects in between, such as generators, are not involved.

In the same way, the loader provides the rng key of the batch that it returns, from which a wrapper may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Count = Callable[[], None]


class RngKeys:
    """What a loader tells of the rng keys of its batches.

    Attributes:
        make: Returns the rng key of the latest batch; None if it has none.
    """

    def __init__(self) -> None:
        self.make: Callable[[], int] | None = None

    def take(self) -> int | None:
        """Return the rng key of the latest batch, and forget it; None if it has none."""
        make, self.make = self.make, None
        return None if make is None else make()


_RNG_KEYS: ContextVar[RngKeys | None] = ContextVar("rng_keys", default=None)
_HELD: ContextVar[list[Count] | None] = ContextVar("held", default=None)


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


@contextmanager
def counted_at_once() -> Iterator[list[Count]]:
    """Count a block's batches at once, even inside :func:`held_back`. The list of functions to call later is empty."""
    token = _HELD.set(None)
    try:
        yield []
    finally:
        _HELD.reset(token)


def find_rng_keys() -> RngKeys | None:
    """Return where the caller wants the rng keys of batches; None if it wants none."""
    return _RNG_KEYS.get()


@contextmanager
def asking_for_rng_keys() -> Iterator[RngKeys]:
    """Ask for the rng keys of the batches of a block. Outside of such blocks, no loader provides any."""
    keys = RngKeys()
    token = _RNG_KEYS.set(keys)
    try:
        yield keys
    finally:
        _RNG_KEYS.reset(token)
