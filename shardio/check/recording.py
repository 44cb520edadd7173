"""Recording: iterate over a loader and record where each sample comes from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.check.allowance import find_allowance, find_cursor, find_remainder
from shardio.check.claims import HasWorkers, collates_columns, find_claims, is_batching, source_of
from shardio.check.coverage import Coverage, Delivery
from shardio.check.identity import ASK_FOR_KEY, Key, content_ids, keys_in
from shardio.check.stability import probe_contents
from shardio.errors import IdentityError
from shardio.world import find_worker


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A collated batch, and the worker that collated it."""

    worker: int
    batch: Any
    is_tuple: bool

    def pin_memory(self) -> _Tagged:
        """Do nothing: torch's pinning thread calls this on batches of unknown types."""
        return self


@dataclass(frozen=True, slots=True)
class _TaggingCollate:
    """A collate function that also returns the worker it runs in."""

    untagged: Callable[[Any], Any]

    def __call__(self, samples: Any) -> _Tagged:
        return _Tagged(find_worker().worker_id, self.untagged(samples), isinstance(samples, tuple))


def record(
    loader: Iterable[Any], coverage: Coverage, *, rank: int = 0, key: Key = None, world_size: int | None = None
) -> bool:
    """Iterate over one epoch of a loader and add what it delivers to ``coverage``.

    Args:
        loader: Any iterable of batches. Workers are recorded only for a DataLoader.
        coverage: The coverage to add to.
        rank: The rank of the loader.
        key: How to find a batch's keys; see :func:`shardio.check.assert_exactly_once`. Repeats
            that ``remainder="mask"`` marks are left out, whether or not a function given as
            ``key`` has already left them out.
        world_size: The number of ranks; by default, ``rank + 1``.

    Returns:
        Whether samples were identified by keys rather than by content.

    Raises:
        IdentityError: If a key does not identify a sample, or a batch cannot be split into
            samples.
    """
    with _tagged(loader):
        for _ in observe(loader, coverage, rank=rank, key=key, world_size=world_size or rank + 1):
            pass
    return coverage.rank_epochs[rank].by_keys


def observe(loader: Iterable[Any], coverage: Coverage, *, rank: int, key: Key, world_size: int) -> Iterator[Any]:
    """Yield the batches of one epoch and add them to ``coverage``, which may hold the start of the epoch."""
    former = coverage.rank_epochs.get(rank)
    epoch = coverage.rank_epochs[rank] = find_claims(loader, world_size)
    epoch.is_whole = False
    source = source_of(loader)
    before = find_cursor(source) if former is None else None  # Otherwise, the coverage holds the epoch's start.
    has_marks = marks_repeats(source)
    epoch.num_marked = 0 if has_marks and not callable(key) else None
    if former is not None:
        epoch.num_batches, epoch.num_marked = former.num_batches, former.num_marked
    first = epoch.num_batches
    for batch_number, tagged in enumerate(loader, start=first):
        worker, batch = (tagged.worker, tagged.batch) if isinstance(tagged, _Tagged) else (None, tagged)
        epoch.num_batches += 1
        if batch_number == first:
            _add_allowance(source, coverage, rank, before)
        delivery = Delivery(rank=rank, worker=worker, batch=batch_number)
        valid = find_marks(batch) if has_marks else None
        if valid is not None:
            epoch.num_marked = (epoch.num_marked or 0) + int((~valid).sum())
        if (keys := keys_in(batch, key)) is not None:
            if key is None and (isinstance(batch, tuple) or (isinstance(tagged, _Tagged) and tagged.is_tuple)):
                _refuse_tuple(source)
            coverage.add(leave_out_marked(keys, valid), delivery)
        else:
            if epoch.by_keys:
                epoch = coverage.rank_epochs[rank] = probe_contents(source, epoch)
                epoch.by_keys = False
            ids = content_ids(batch, is_collated=collates_columns(source))
            _check_rows(source, batch_number, len(ids))
            coverage.add_ids(ids if valid is None else ids[valid], delivery)
        yield batch
    epoch.is_whole = True
    if not epoch.num_batches:
        _add_allowance(source, coverage, rank, before)


def marks_repeats(loader: Iterable[Any]) -> bool:
    """Return whether a loader's batches mark repeats."""
    found = find_remainder(loader)
    return found is not None and found[1] == "mask"


def find_marks(batch: Any) -> NDArray[np.bool_] | None:
    """Return which samples of a batch count, bool [n]; None if the batch has no marks.

    The marks are the field "valid" of a dict, or the last field of a tuple.
    """
    marks = batch.get("valid") if isinstance(batch, dict) else batch[-1] if isinstance(batch, list | tuple) else None
    return np.asarray(marks) if "bool" in str(getattr(marks, "dtype", "")) else None


def leave_out_marked(keys: list[Hashable], valid: NDArray[np.bool_] | None) -> list[Hashable]:
    """Return the keys of the samples that count. A key function may already omit the others."""
    return keys if valid is None or len(keys) != len(valid) else list(compress(keys, valid))


def _add_allowance(loader: Iterable[Any], coverage: Coverage, rank: int, before: Any) -> None:
    if (allowance := find_allowance(loader, before)) is not None:
        coverage.allowances[rank] = allowance


def _refuse_tuple(loader: Iterable[Any]) -> None:
    """Raise an error for a tuple that was not collated: (index, label) is not two keys."""
    if not isinstance(loader, HasWorkers):
        raise IdentityError(f"a batch is a tuple, which may be one sample or hold one sample per value. {ASK_FOR_KEY}")
    if not is_batching(loader):
        raise IdentityError(
            "the loader does not collate (batch_size=None) and yields tuples, in which any value may be the key. "
            f"{ASK_FOR_KEY}"
        )


def _check_rows(loader: Iterable[Any], batch_number: int, num_rows: int) -> None:
    """Raise an error if a batch has more rows than the loader's ``batch_size``."""
    batch_size = getattr(loader, "batch_size", None)
    if isinstance(batch_size, int) and num_rows > batch_size and not collates_columns(loader):
        raise IdentityError(
            f"batch {batch_number} has {num_rows} rows, but the loader's batch_size is {batch_size}, so a sample may "
            f"have several rows. {ASK_FOR_KEY}"
        )


@contextmanager
def _tagged(loader: Iterable[Any]) -> Iterator[None]:
    """Make a DataLoader's workers tag their batches within the block."""
    # Persistent workers would keep the tagging function after the block. A loader of shardio without torch's workers
    # would start them to call another collate function. Accelerate's loader moves batches to a device, which a tagged
    # batch does not support.
    if (
        not isinstance(loader, HasWorkers)
        or getattr(loader, "persistent_workers", False)
        or not getattr(loader, "calls_dataset", True)
        or type(loader).__module__.startswith("accelerate.")
    ):
        yield
        return
    collate = loader.collate_fn
    try:
        loader.collate_fn = _TaggingCollate(collate)
    except AttributeError:  # A property of a wrapper.
        yield
        return
    try:
        yield
    finally:
        loader.collate_fn = collate
