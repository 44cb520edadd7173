"""Recording: iterate over a loader and note which samples came from where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardio.check.allowance import find_allowance, find_remainder
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
        key: Where a batch has its keys, see :func:`shardio.check.assert_exactly_once`. Repeats that
            ``remainder="mask"`` marks are left out, unless ``key`` is a function, which sees the marks itself.

    Returns:
        Whether samples were known by keys; otherwise by their content.
    """
    by_keys = True
    coverage.allowance = find_allowance(loader)
    found = find_remainder(loader)
    has_marks = found is not None and found[1] == "mask" and not callable(key)
    with _tagged(loader):
        for number, batch in enumerate(loader):
            worker, content = (batch.worker, batch.batch) if isinstance(batch, _Tagged) else (None, batch)
            delivery = Delivery(rank=rank, worker=worker, batch=number)
            keys = keys_in(content, key)
            valid = _find_marks(content) if has_marks else None
            if keys is None:
                by_keys = False
                ids = content_ids(content)
                coverage.add_ids(ids if valid is None else ids[valid], delivery)
            else:
                coverage.add(keys if valid is None else compress(keys, valid), delivery)
    return by_keys


def _find_marks(batch: Any) -> NDArray[np.bool_] | None:
    """Return which samples of a batch count, bool [n], where it says so: by the key "valid", or last in a tuple."""
    marks = batch.get("valid") if isinstance(batch, dict) else batch[-1] if isinstance(batch, list | tuple) else None
    return np.asarray(marks) if "bool" in str(getattr(marks, "dtype", "")) else None


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
