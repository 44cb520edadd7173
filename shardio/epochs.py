"""The protocol by which loaders, samplers and wrappers set the epoch, count batches and pass on rng keys.

A loader's state counts the batches that the user received, but a prefetcher requests batches before the user does. So
the loader provides a function that counts a batch, and the outermost wrapper calls it when the user receives the batch.
Intermediate objects, such as generators, need not cooperate.

The loader also provides the rng key of each batch that it returns, so a wrapper can derive random numbers from the key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

MAX_EPOCH = 2**62
"""The exclusive upper bound of the epochs that can be set. The bound leaves room for later epochs within 64 bits."""

NAMES = ("loader", "batch_sampler", "sampler", "dataset", "datasets")
"""Attributes that hold parts of a loader, sampler or dataset.

Instances of torch's classes are found in attributes of any name.
"""

Count = Callable[[], None]

Value = TypeVar("Value")

_RNG_KEYS: ContextVar[RngKeys | None] = ContextVar("rng_keys", default=None)

_HELD: ContextVar[list[Count] | None] = ContextVar("held", default=None)


@contextmanager
def set_in_block(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Set a context variable while the block runs; yield its value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def set_epoch(holder: Any, epoch: int, *, skip: tuple[type, ...] = ()) -> None:
    """Set the epoch of a loader, a sampler or a dataset, or of its parts if it has no ``set_epoch``.

    Args:
        holder: The loader, sampler or dataset.
        epoch: The epoch.
        skip: Classes whose instances keep their epoch.
    """
    if not _takes_epoch(holder):
        set_epoch_of_parts(holder, epoch, skip=skip)
    elif not isinstance(holder, skip):
        holder.set_epoch(epoch)


def set_epoch_of_parts(holder: Any, epoch: int, *, skip: tuple[type, ...] = ()) -> None:
    """Set the epoch on each part of a loader, a sampler or a dataset.

    If a part has ``set_epoch``, only this method is called: it sets the epoch of the part's own parts. All other parts
    are searched: wrapped loaders, samplers in batch samplers, datasets in torch's Subset, ConcatDataset and
    ChainDataset, and datasets in user-defined datasets.
    """
    for part in list(_find_takers(holder, skip, set())):
        part.set_epoch(epoch)


def _takes_epoch(holder: Any) -> bool:
    return callable(getattr(holder, "set_epoch", None))


def _find_takers(holder: Any, skip: tuple[type, ...], seen: set[int]) -> Iterator[Any]:
    seen.add(id(holder))
    for part in _parts(holder):
        if id(part) in seen:
            continue
        if not _takes_epoch(part):
            yield from _find_takers(part, skip, seen)
            continue
        seen.add(id(part))
        if not isinstance(part, skip):
            yield part


def _parts(holder: Any) -> Iterator[Any]:
    classes = _torch_classes()
    attributes = getattr(holder, "__dict__", {})
    for name, value in {**attributes, **{name: getattr(holder, name, None) for name in NAMES}}.items():
        several = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(several, list | tuple):
            # Only the first item is checked, because a dataset's list of paths may be long.
            yield from several if several and isinstance(several[0], classes) else ()
        elif isinstance(value, classes) or (name in NAMES and value is not None):
            yield value


def _torch_classes() -> tuple[type, ...]:
    torch_data = sys.modules.get("torch.utils.data")  # If torch is not loaded, nothing is an instance of its classes.
    if torch_data is None:
        return ()
    # Some programs replace torch's DataLoader with shardio's subclass.
    loaders = [each for each in torch_data.DataLoader.__mro__ if each.__name__ == "DataLoader"]
    return loaders[-1], torch_data.Dataset, torch_data.Sampler


class RngKeys:
    """The rng keys of a loader's batches.

    Attributes:
        make: A function that returns the rng key of the latest batch; None if the batch has no rng key.
    """

    def __init__(self) -> None:
        self.make: Callable[[], int] | None = None

    def take(self) -> int | None:
        """Return the rng key of the latest batch, and forget it; None if the batch has no rng key."""
        make, self.make = self.make, None
        return None if make is None else make()


def counts_when_received(loader: object) -> bool:
    """Return whether a loader counts batches with :func:`hand_over`. If so, its state covers no unreceived batches.

    Such a loader has an attribute ``counts_when_received`` that is true. Other loaders count batches when they are
    requested.
    """
    return bool(getattr(loader, "counts_when_received", False))


def find_held() -> list[Count] | None:
    """Return the list of the innermost enclosing :func:`held_back` block; None outside of such blocks."""
    return _HELD.get()


def restore_held(held: list[Count] | None) -> None:
    """Leave each :func:`held_back` block that was entered after :func:`find_held` returned ``held``.

    An interruption such as Ctrl-C may skip the end of a block. Without this call, loaders would stop counting
    batches after the interruption.
    """
    _HELD.set(held)


def hand_over(counts: Iterable[Count]) -> None:
    """Call functions that count a batch. Inside :func:`held_back`, collect these functions for a later call."""
    held = _HELD.get()
    if held is not None:
        held.extend(counts)
        return
    for count in counts:
        count()


def held_back() -> AbstractContextManager[list[Count]]:
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
    return set_in_block(_HELD, [])


@contextmanager
def counted_at_once() -> Iterator[list[Count]]:
    """Count a block's batches immediately, even inside :func:`held_back`. The yielded list stays empty."""
    with set_in_block(_HELD, None):
        yield []


def find_rng_keys() -> RngKeys | None:
    """Return the object through which the enclosing block requests rng keys; None outside of such blocks."""
    return _RNG_KEYS.get()


def asking_for_rng_keys() -> AbstractContextManager[RngKeys]:
    """Request the rng keys of a block's batches. Outside of such blocks, loaders provide no rng keys."""
    return set_in_block(_RNG_KEYS, RngKeys())
