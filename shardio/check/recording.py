"""Recording: iterate over a loader and note which samples came from where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardio.check.coverage import Coverage, Delivery
from shardio.check.identity import Key, content_ids, keys_in
from shardio.world import find_worker


@runtime_checkable
class HasWorkers(Protocol):
    """What makes a loader one of torch's kind."""

    collate_fn: Callable[[Any], Any]
    num_workers: int
    dataset: Any


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


def record(loader: Iterable[Any], coverage: Coverage, *, rank: int = 0, key: Key = None) -> bool:
    """Iterate over one epoch of a loader and add what it delivers to ``coverage``.

    Args:
        loader: Any iterable of batches. Workers are known where it is a DataLoader of torch's kind.
        coverage: What to add to.
        rank: The rank that the loader is.
        key: Where a batch has its keys, see :func:`shardio.check.assert_exactly_once`.

    Returns:
        Whether samples were known by keys; otherwise by their content.
    """
    by_keys = True
    with _tagged(loader):
        for number, batch in enumerate(loader):
            worker, content = (batch.worker, batch.batch) if isinstance(batch, _Tagged) else (None, batch)
            delivery = Delivery(rank=rank, worker=worker, batch=number)
            keys = keys_in(content, key)
            if keys is None:
                by_keys = False
                coverage.add_ids(content_ids(content), delivery)
            else:
                coverage.add(keys, delivery)
    return by_keys


@contextmanager
def _tagged(loader: Iterable[Any]) -> Iterator[None]:
    """Let a DataLoader's workers tag their batches, as long as the block lasts."""
    # Persistent workers keep the collate function that they were started with, also when it is put back here. And
    # a loader of shardio's that goes without torch's workers would run them to call another collate function.
    if (
        not isinstance(loader, HasWorkers)
        or getattr(loader, "persistent_workers", False)
        or not getattr(loader, "runs_torchs_workers", True)
    ):
        yield
        return
    collate = loader.collate_fn
    loader.collate_fn = _TaggingCollate(collate)
    try:
        yield
    finally:
        loader.collate_fn = collate
