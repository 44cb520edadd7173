"""Iterate over a loader, and record where each sample comes from and whether its content is stable.

Only stable content identifies samples. Three kinds of evidence show that contents change: transforms whose class names
suggest randomness, samples of the dataset that differ when they are read again, and epochs that together hold more
contents than samples.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.check.coverage import (
    Coverage,
    Delivery,
    HasWorkers,
    RankEpoch,
    collate_of,
    collates_columns,
    find_allowance,
    find_claims,
    find_cursor,
    find_remainder,
    indices_of,
    is_batching,
    is_map_style,
    name_ranks,
    source_of,
)
from shardio.check.identity import ASK_FOR_KEY, Ids, Key, content_ids, keys_in
from shardio.errors import IdentityError
from shardio.world import find_worker

MIN_SAMPLES = 10
"""The fewest samples that do not repeat an order by chance. For 10 samples, the chance is 1 in 3.6 million."""

MAX_COMPARED = 1_000_000
"""The largest number of an epoch's samples to compare when checking whether a loader shuffles."""


NUM_PROBES, NUM_READS = 8, 4
"""The number of samples to probe, and of reads per sample.

A flip with probability 1/2 is missed once in 2**24 runs.
"""

_RANDOM = re.compile("Random|Jitter|Augment|AugMix|MixUp|Mixup|CutMix|Erasing")

_NESTED = (
    "transform",
    "transforms",
    "joint_transform",
    "target_transform",
    "decoder",
    "dataset",
    "datasets",
    "collate_fn",
    "untagged",
)


def record(
    loader: Iterable[Any], coverage: Coverage, *, rank: int = 0, key: Key = None, world_size: int | None = None
) -> bool:
    """Iterate over one epoch of a loader and add its deliveries to ``coverage``.

    Args:
        loader: Any iterable of batches. Workers are recorded only for a DataLoader.
        coverage: The coverage to add to.
        rank: The rank of the loader.
        key: The way to find a batch's keys; see :func:`shardio.check.assert_exactly_once`. Repeats that
            ``remainder="mask"`` marks are left out, unless a function given as ``key`` has already left them out.
        world_size: The number of ranks; by default, ``rank + 1``.

    Returns:
        Whether samples were identified by keys rather than by content.

    Raises:
        IdentityError: If a key does not identify a sample, or a batch cannot be split into samples.
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
    return found is not None and found[1].marks_repeats


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
    """Raise IdentityError for a tuple that was not collated: (index, label) is not two keys."""
    if not isinstance(loader, HasWorkers):
        raise IdentityError(f"a batch is a tuple, which may be one sample or hold one sample per value. {ASK_FOR_KEY}")
    if not is_batching(loader):
        raise IdentityError(
            "the loader does not collate (batch_size=None) and yields tuples, in which any value may be the key. "
            f"{ASK_FOR_KEY}"
        )


def _check_rows(loader: Iterable[Any], batch_number: int, num_rows: int) -> None:
    batch_size = getattr(loader, "batch_size", None)
    if isinstance(batch_size, int) and num_rows > batch_size and not collates_columns(loader):
        raise IdentityError(
            f"batch {batch_number} has {num_rows} rows, but the loader's batch_size is {batch_size}, so a sample may "
            f"have several rows. {ASK_FOR_KEY}"
        )


@dataclass(frozen=True, slots=True)
class _Tagged:
    worker: int
    batch: Any
    is_tuple: bool

    def pin_memory(self) -> _Tagged:  # torch's pinning thread calls this on batches of unknown types.
        return self


@dataclass(frozen=True, slots=True)
class _TaggingCollate:
    """A collate function that also returns the worker it runs in."""

    untagged: Callable[[Any], Any]

    def __call__(self, samples: Any) -> _Tagged:
        return _Tagged(find_worker().worker_id, self.untagged(samples), isinstance(samples, tuple))


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


def find_frozen_orders(epochs: Sequence[Coverage]) -> list[str]:
    """Return a message for each epoch that wrongly repeats the order of an earlier one.

    A loader that does not report whether it shuffles may repeat its order on purpose, for example with a sorted
    sampler. It is judged only if another epoch or rank shows that it shuffles.
    """
    digests = [
        {rank: epoch.order_digest(rank) for rank in epoch.ranks if epoch.num_delivered_by(rank) >= MIN_SAMPLES}
        for epoch in epochs
    ]
    frozen: list[tuple[int, int, list[int]]] = []
    for later in range(1, len(epochs)):
        for earlier in reversed(range(later)):
            equal = [rank for rank, digest in digests[later].items() if digest == digests[earlier].get(rank)]
            if equal:
                frozen.append((earlier, later, equal))
                break
    shuffling = {rank for epoch in epochs for rank, known in epoch.rank_epochs.items() if known.shuffles}
    if frozen and any(rank not in shuffling for _, _, equal in frozen for rank in equal) and _is_shuffled(epochs):
        shuffling |= {rank for _, _, equal in frozen for rank in equal}
    return [
        f"epochs {earlier} and {later} have the same order{_where(judged, epochs[later])}: set_epoch is not called, or "
        "every epoch starts from the same seed"
        for earlier, later, equal in frozen
        if (judged := [rank for rank in equal if rank in shuffling])
    ]


def _where(ranks: list[int], epoch: Coverage) -> str:
    return "" if ranks == epoch.ranks else f" on {name_ranks(ranks)}"


def _is_shuffled(epochs: Sequence[Coverage]) -> bool:
    for rank in sorted({rank for epoch in epochs for rank in epoch.ranks}):
        known = [epoch.rank_epochs[rank].shuffles for epoch in epochs if rank in epoch.rank_epochs]
        if False in known:  # Batches may still arrive in another order.
            continue
        orders = {epoch.order_digest(rank): epoch for epoch in epochs}
        found = [epoch.arrays(rank)[0][:MAX_COMPARED] for epoch in orders.values()]
        if any(_differ(first, second) for first, second in combinations(found, 2)):
            return True
    return False


def _differ(first: Ids, second: Ids) -> bool:
    """Return whether many neighbours in ``first`` are not neighbours in ``second``.

    Many means at least ten, and a quarter of all. Most neighbours stay together if batches arrive as workers finish
    them, or if only shards are shuffled. Such orders may repeat by chance.
    """
    before, after = (ids[:-1] * np.uint64(3) + ids[1:] for ids in (first, second))  # uint64 [n - 1], wraps around
    num_parted = int((~np.isin(before, after)).sum())
    return num_parted >= max(MIN_SAMPLES, len(before) // 4)


def probe_contents(loader: Iterable[Any], epoch: RankEpoch) -> RankEpoch:
    """Read some samples several times, and return ``epoch`` with the findings.

    Raises:
        IdentityError: If the loader's batches cannot be split into samples.
    """
    if (name := _find_random(loader, depth=0)) is not None:
        return replace(epoch, instability=f"the loader has a random transform ({name})")
    if not isinstance(loader, HasWorkers):
        return epoch
    if not is_batching(loader):
        raise IdentityError(
            f"the loader does not collate (batch_size=None), so a batch may hold any number of samples. {ASK_FOR_KEY}"
        )
    indices = indices_of(loader) if is_map_style(loader) else None
    if not indices:
        return epoch
    chosen = sorted({indices[int(i)] for i in np.linspace(0, len(indices) - 1, NUM_PROBES)})
    dataset, collate, is_collated = _copied(loader.dataset), collate_of(loader), collates_columns(loader)
    with _generators_kept():
        for index in chosen:
            reads = [content_ids(collate([dataset[index]]), is_collated=is_collated) for _ in range(NUM_READS)]
            if any(len(ids) != 1 for ids in reads):
                raise IdentityError(
                    f"collate_fn makes {len(reads[0])} rows from one sample, so samples cannot be identified by their "
                    f"content. {ASK_FOR_KEY}"
                )
            if len({int(ids[0]) for ids in reads}) > 1:
                return replace(epoch, instability=f"sample {index} differs when it is read again")
    # User code may behave differently in workers, which only another epoch can show.
    has_workers = loader.num_workers > 0 and getattr(loader, "calls_dataset", True)
    return replace(epoch, is_stable=None if has_workers else True)


def contents_change(epochs: Sequence[Coverage], num_samples: int | None) -> bool | None:
    """Return whether epochs hold more contents than samples; None for fewer than two epochs.

    Args:
        epochs: The epochs of one loader, over all ranks.
        num_samples: The number of samples. If None, later epochs must not hold contents that the first one lacks.
    """
    contents = [np.unique(epoch.arrays()[0]) for epoch in epochs if epoch.num_deliveries]
    if len(contents) < 2:
        return None
    return len(np.unique(np.concatenate(contents))) > (len(contents[0]) if num_samples is None else num_samples)


def _find_random(holder: Any, depth: int) -> str | None:
    """Return the name of a random transform that a loader, a dataset or a transform holds."""
    if depth and _RANDOM.search(type(holder).__name__) and callable(holder):
        return type(holder).__name__
    if depth > 6:
        return None
    held = holder if isinstance(holder, list | tuple) else [getattr(holder, name, None) for name in _NESTED]
    found = (_find_random(one, depth + 1) for one in held[:100] if one is not None)
    return next(filter(None, found), None)


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of a dataset and of the datasets in it.

    Reading the copy opens no files in the original, which workers forked later would share.
    """
    copied = copy.copy(dataset)
    for name in ("dataset", "datasets"):
        inner = getattr(copied, "__dict__", {}).get(name)
        if inner is not None:
            setattr(copied, name, [_copied(one) for one in inner] if isinstance(inner, list) else _copied(inner))
    return copied


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the global random generators after the block, to undo the effect of probing."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
