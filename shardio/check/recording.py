"""Recording: iterate over a loader and note which samples came from where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardio.check.coverage import Coverage, Delivery
from shardio.world import find_worker

Key = Callable[[Any], Iterable[Hashable]] | str | int | None
"""How keys are found in a batch: a function of the batch, a field's name or place, or None for a batch of keys."""


@runtime_checkable
class _HasWorkers(Protocol):
    """What makes a loader one of torch's kind."""

    collate_fn: Callable[[Any], Any]
    num_workers: int


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A collated batch, and the worker that collated it."""

    worker: int
    batch: Any

    def pin_memory(self) -> _Tagged:
        """Do nothing: torch's pinning thread asks it of batches whose type it does not know."""
        return self


@dataclass(frozen=True, slots=True)
class _TaggingCollate:
    """A collate function that also notes in which worker it runs."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> _Tagged:
        return _Tagged(find_worker().worker_id, self.collate(samples))


def assert_exactly_once(
    loaders: Iterable[Any] | tuple[Iterable[Any], ...], expected: Collection[Hashable], *, key: Key = None
) -> None:
    """Fail unless one epoch delivers every expected sample exactly once.

    >>> assert_exactly_once([["a", "b"], ["c"]], expected=["a", "b", "c"])
    >>> assert_exactly_once([["a", "b"], ["b"]], expected=["a", "b"])
    Traceback (most recent call last):
    shardio.errors.CoverageError: 2 samples: 1 came once, 1 more than once, 0 never, 0 unexpected
      repeated: b came 2 times: rank 0 batch 0, rank 0 batch 1

    Args:
        loaders: A loader of any kind: an iterable of batches. Or a tuple of loaders, one a rank.
        expected: The keys that the epoch should hold.
        key: Where a batch has its keys: a function of the batch, a field's name, a place in the tuple. By
            default a batch is a sequence of keys.

    Raises:
        CoverageError: An AssertionError that names the samples that were repeated, lost or unexpected, and
            the ranks and workers that delivered them.
    """
    coverage = Coverage()
    for rank, loader in enumerate(loaders if isinstance(loaders, tuple) else (loaders,)):
        record(loader, coverage, rank=rank, key=key)
    coverage.report(expected).raise_if_wrong()


def record(loader: Iterable[Any], coverage: Coverage, *, rank: int = 0, key: Key = None) -> None:
    """Iterate over one epoch of a loader and add what it delivers to ``coverage``.

    Args:
        loader: Any iterable of batches. Workers are known where it is a DataLoader of torch's kind.
        coverage: What to add to.
        rank: The rank that the loader is.
        key: As for :func:`assert_exactly_once`.
    """
    with _tagged(loader):
        for number, batch in enumerate(loader):
            worker, content = (batch.worker, batch.batch) if isinstance(batch, _Tagged) else (None, batch)
            coverage.add(_keys_of(content, key), Delivery(rank=rank, worker=worker, batch=number))


@contextmanager
def _tagged(loader: Iterable[Any]) -> Iterator[None]:
    """Let a DataLoader's workers tag their batches, as long as the block lasts."""
    # Persistent workers keep the collate function that they were started with, also when it is put back here.
    if not isinstance(loader, _HasWorkers) or getattr(loader, "persistent_workers", False):
        yield
        return
    collate = loader.collate_fn
    loader.collate_fn = _TaggingCollate(collate)
    try:
        yield
    finally:
        loader.collate_fn = collate


def _keys_of(batch: Any, key: Key) -> Iterable[Hashable]:
    try:
        keys = batch if key is None else key(batch) if callable(key) else batch[key]
    except (KeyError, IndexError, TypeError) as error:
        raise TypeError(
            f"there is nothing at key={key!r} in a batch that is a {type(batch).__name__}: give the place of its keys, "
            "their name, or a function of the batch"
        ) from error
    # Tensors and arrays come as numbers: their elements are not equal by hash.
    return keys.tolist() if hasattr(keys, "tolist") else keys
