"""Recording: iterate over a loader and note which samples came from where."""

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
from shardio.check.identity import Key, content_ids, keys_in
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
        """Do nothing: torch's pinning thread asks it of batches whose type it does not know."""
        return self


@dataclass(frozen=True, slots=True)
class _TaggingCollate:
    """A collate function that also notes in which worker it runs."""

    untagged: Callable[[Any], Any]

    def __call__(self, samples: Any) -> _Tagged:
        return _Tagged(find_worker().worker_id, self.untagged(samples), isinstance(samples, tuple))


def record(
    loader: Iterable[Any], coverage: Coverage, *, rank: int = 0, key: Key = None, world_size: int | None = None
) -> bool:
    """Iterate over one epoch of a loader and add what it delivers to ``coverage``.

    Args:
        loader: Any iterable of batches. Workers are known where it is a DataLoader of torch's kind.
        coverage: What to add to.
        rank: The rank that the loader is.
        key: Where a batch has its keys, see :func:`shardio.check.assert_exactly_once`. Repeats that
            ``remainder="mask"`` marks are left out, where a ``key`` that is a function has not left them out itself.
        world_size: How many ranks there are; by default one more than ``rank``.

    Returns:
        Whether samples were known by keys; otherwise by their content.

    Raises:
        IdentityError: If a key is none, or it cannot be seen where samples lie in a batch.
    """
    with _tagged(loader):
        for _ in observe(loader, coverage, rank=rank, key=key, world_size=world_size or rank + 1):
            pass
    return coverage.rank_epochs[rank].by_keys


def observe(loader: Iterable[Any], coverage: Coverage, *, rank: int, key: Key, world_size: int) -> Iterator[Any]:
    """Pass on the batches of one epoch, and add what they deliver to ``coverage``, which may have its beginning."""
    former = coverage.rank_epochs.get(rank)
    epoch = coverage.rank_epochs[rank] = find_claims(loader, world_size)
    epoch.is_whole = False
    source = source_of(loader)
    before = find_cursor(source) if former is None else None  # What came before the interruption is in the coverage.
    has_marks = marks_repeats(source)
    epoch.num_marked = 0 if has_marks and not callable(key) else None
    if former is not None:
        epoch.num_batches, epoch.num_marked = former.num_batches, former.num_marked
    first = epoch.num_batches
    for number, tagged in enumerate(loader, start=first):
        worker, batch = (tagged.worker, tagged.batch) if isinstance(tagged, _Tagged) else (None, tagged)
        epoch.num_batches += 1
        if number == first:
            _note_allowance(source, coverage, rank, before)
        delivery = Delivery(rank=rank, worker=worker, batch=number)
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
            _check_rows(source, number, len(ids))
            coverage.add_ids(ids if valid is None else ids[valid], delivery)
        yield batch
    epoch.is_whole = True
    if not epoch.num_batches:
        _note_allowance(source, coverage, rank, before)


def marks_repeats(loader: Iterable[Any]) -> bool:
    """Return whether a loader's batches mark repeats."""
    found = find_remainder(loader)
    return found is not None and found[1] == "mask"


def find_marks(batch: Any) -> NDArray[np.bool_] | None:
    """Return which samples of a batch count, bool [n], where it says so: by the key "valid", or last in a tuple."""
    marks = batch.get("valid") if isinstance(batch, dict) else batch[-1] if isinstance(batch, list | tuple) else None
    return np.asarray(marks) if "bool" in str(getattr(marks, "dtype", "")) else None


def leave_out_marked(keys: list[Hashable], valid: NDArray[np.bool_] | None) -> list[Hashable]:
    """Return the keys of a batch's samples that count; a function of the user's may have left out the others itself."""
    return keys if valid is None or len(keys) != len(valid) else list(compress(keys, valid))


def _note_allowance(loader: Iterable[Any], coverage: Coverage, rank: int, before: Any) -> None:
    if (allowance := find_allowance(loader, before)) is not None:
        coverage.allowances[rank] = allowance


def _refuse_tuple(loader: Iterable[Any]) -> None:
    """Refuse a tuple that was not collated: (index, label) is one sample, and no two keys."""
    if not isinstance(loader, HasWorkers):
        raise IdentityError("a batch that is a tuple may be one sample, or as many as it has values: give key=")
    if not is_batching(loader):
        raise IdentityError(
            "the loader does not collate (batch_size=None) and yields tuples, of which it cannot be seen what is the "
            "key: give key="
        )


def _check_rows(loader: Iterable[Any], number: int, num_rows: int) -> None:
    """Refuse contents where a batch has not as many rows as samples."""
    batch_size = getattr(loader, "batch_size", None)
    if isinstance(batch_size, int) and num_rows > batch_size and not collates_columns(loader):
        raise IdentityError(
            f"batch {number} has {num_rows} rows where the loader's batch_size is {batch_size}, so it cannot be seen "
            "where one sample ends: give key="
        )


@contextmanager
def _tagged(loader: Iterable[Any]) -> Iterator[None]:
    """Make a DataLoader's workers tag their batches inside the block."""
    # Persistent workers keep the collate function that they were started with, also when it is put back here. A
    # loader of shardio's that goes without torch's workers would run them to call another collate function. And a
    # framework's loader does more with its batches than pass them on.
    if (
        not isinstance(loader, HasWorkers)
        or getattr(loader, "persistent_workers", False)
        or not getattr(loader, "runs_torchs_workers", True)
        or type(loader).__module__.startswith("accelerate.")
    ):
        yield
        return
    collate = loader.collate_fn
    loader.collate_fn = _TaggingCollate(collate)
    try:
        yield
    finally:
        loader.collate_fn = collate
