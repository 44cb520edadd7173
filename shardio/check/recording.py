"""Record what a loader claims, where each of its samples comes from, and whether the sample's content is stable.

Only stable content identifies samples. Contents count as unstable if a transform's class name suggests randomness, if a
sample differs when it is read again, or if the epochs contain more distinct contents than there are samples.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardio.check.coverage import ASK_FOR_KEY, Allowance, Coverage, Delivery, Key, RankEpoch, content_ids, keys_in
from shardio.errors import IdentityError
from shardio.order import DROP_LAST, POLICIES, Cursor, EpochOrder, OrderSettings, RemainderPolicy
from shardio.process import keep_generators
from shardio.values import count
from shardio.world import World, find_worker

NUM_PROBES, NUM_READS = 8, 4
"""The number of samples to probe, and the number of reads per sample.

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
    """Yield the batches of one epoch and add them to ``coverage``, which may already hold the epoch's start."""
    former = coverage.rank_epochs.get(rank)
    epoch = coverage.rank_epochs[rank] = find_claims(loader, world_size)
    epoch.is_whole = False
    source = source_of(loader)
    before = find_cursor(source) if former is None else None  # ``coverage`` already holds a resumed epoch's start.
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
    """Return the marks of a batch, bool [n], false for repeats; None if the batch has no marks.

    The marks are the field "valid" of a dict, or the last field of a tuple.
    """
    marks = batch.get("valid") if isinstance(batch, dict) else batch[-1] if isinstance(batch, list | tuple) else None
    return np.asarray(marks) if "bool" in str(getattr(marks, "dtype", "")) else None


def leave_out_marked(keys: list[Hashable], valid: NDArray[np.bool_] | None) -> list[Hashable]:
    """Return the keys of the samples that are not marked as repeats. A key function may already omit the repeats."""
    return keys if valid is None or len(keys) != len(valid) else list(compress(keys, valid))


def _add_allowance(loader: Iterable[Any], coverage: Coverage, rank: int, before: Any) -> None:
    if (allowance := find_allowance(loader, before)) is not None:
        coverage.allowances[rank] = allowance


def _refuse_tuple(loader: Iterable[Any]) -> None:
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
    untagged: Callable[[Any], Any]

    def __call__(self, samples: Any) -> _Tagged:
        return _Tagged(find_worker().worker_id, self.untagged(samples), isinstance(samples, tuple))


@contextmanager
def _tagged(loader: Iterable[Any]) -> Iterator[None]:
    """Within the block, have a DataLoader's workers tag their batches."""
    # Persistent workers would keep the tagging function after the block. A shardio loader without torch's workers would
    # start them for a different collate function. Accelerate's loader moves batches to a device, which a tagged batch
    # does not support.
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


MIN_WINDOW = 10
"""The smallest window whose order is unlikely to repeat by chance."""


@runtime_checkable
class HasRemainder(Protocol):
    """A dataset or a sampler with shardio's order and a remainder policy."""

    remainder_policy: RemainderPolicy
    num_all_samples: int
    batch_size: int | None
    digest: str
    shard_sizes: NDArray[np.int64]
    settings: OrderSettings

    def world(self) -> World:
        """Return the rank and the world size."""


def find_remainder(loader: Iterable[Any]) -> tuple[HasRemainder, RemainderPolicy] | None:
    """Return the dataset or sampler that determines a loader's order, and the order's remainder policy.

    Return None if the order is not shardio's.
    """
    for holder in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(holder, HasRemainder):
            # Only shardio's drop_last is a policy. torch's drop_last drops the incomplete batch of each worker.
            drops = hasattr(loader, "calls_dataset") and bool(getattr(loader, "drop_last", False))
            return holder, POLICIES[DROP_LAST] if drops else holder.remainder_policy
    return None


def find_cursor(loader: Iterable[Any]) -> Cursor | None:
    """Return a loader's cursor in shardio's order, read from its state; None if there is no cursor."""
    found = find_remainder(loader)
    # Do not call the state_dict of other loaders: torchdata's loader starts workers to determine its state.
    holder: Any = loader if hasattr(loader, "calls_dataset") else None if found is None else found[0]
    if found is None or not callable(getattr(holder, "state_dict", None)):
        return None
    if not getattr(holder, "has_order", True):  # Subclasses of EpochSampler may have their own __iter__.
        return None
    state = holder.state_dict()
    return Cursor(epoch=state["epoch"], position=state["position"])


def resumes(loader: Iterable[Any], num_batches: int) -> bool | None:
    """Return whether a loader resumes an epoch that stopped after ``num_batches`` batches.

    Return None if the epoch was complete.
    """
    found = find_remainder(loader)
    cursor = find_cursor(loader) if found is not None and hasattr(loader, "calls_dataset") else None
    if found is None or cursor is None:
        length = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]  # hasattr checks it
        return True if length is None or num_batches < length else None
    return None if cursor.position >= found[0].num_all_samples else cursor.position > 0


def find_allowance(loader: Iterable[Any], before: Cursor | None = None) -> Allowance | None:
    """Return the repeats and omissions that a loader's remainder policy requires; None if the order is not shardio's.

    Args:
        loader: The loader, which has delivered the epoch's first batch, unless the epoch has no batches.
        before: The loader's cursor before the first batch.
    """
    found = find_remainder(loader)
    if found is None:
        return None
    holder, policy = found
    num_samples, world_size = holder.num_all_samples, holder.world().world_size
    batch_size = holder.batch_size or getattr(loader, "batch_size", None) or 1
    now = find_cursor(loader)
    start = before.position if before is not None and now is not None and before.epoch == now.epoch else 0
    start = 0 if start == num_samples and now != before else start
    num_dealt = policy.count_dealt(num_samples - start, world_size, batch_size)
    num_padded, num_dropped = max(start + num_dealt - num_samples, 0), max(num_samples - start - num_dealt, 0)
    num_repeats = 0 if policy.marks_repeats else num_padded
    positions = np.arange(num_samples - num_dropped, num_samples + num_repeats)
    samples: tuple[int, ...] | None = None
    if now is not None and start == 0:
        order = EpochOrder(holder.shard_sizes, holder.settings, now.epoch)
        samples = tuple(sorted(order.samples_at(positions).tolist())) if len(positions) else ()
    return Allowance(
        num_samples=num_samples,
        num_repeats=num_repeats,
        num_missing=num_dropped + start,
        num_marked=num_padded - num_repeats,
        samples=samples,
        digest=holder.digest,
    )


@runtime_checkable
class HasWorkers(Protocol):
    """A loader with the same attributes as torch's DataLoader."""

    collate_fn: Callable[[Any], Any]
    num_workers: int
    dataset: Any


def find_claims(loader: Iterable[Any], world_size: int) -> RankEpoch:
    """Return a loader's claims about its next epoch, on one of ``world_size`` ranks."""
    outer, loader = loader, source_of(loader)
    epoch = RankEpoch(shuffles=_find_shuffle(loader))
    sampler, dataset = sampler_of(loader), getattr(loader, "dataset", None)
    if _is_torchs(sampler, "DistributedSampler"):
        epoch.num_shares = sampler.num_replicas
        epoch.sampler_state = f"epoch {sampler.epoch} and seed {sampler.seed}" if sampler.shuffle else ""
    if getattr(sampler, "replacement", False):
        epoch.cause = f"the sampler ({type(sampler).__name__}) samples with replacement"
    if (found := find_remainder(loader)) is not None:
        epoch.num_dataset = found[0].num_all_samples
        return epoch
    if not isinstance(loader, HasWorkers) or not is_batching(loader):
        return epoch
    batching = _batching_of(loader)
    batch_size = getattr(batching, "batch_size", None)
    if not is_map_style(loader):
        # With several ranks, an iterable dataset's length may count one share or all samples.
        if world_size == 1 and batch_size is not None:
            epoch.num_claimed, epoch.may_be_fewer = _length(dataset), True
        return epoch
    num_own = _length(sampler)
    num_all = _length(dataset)
    if num_own is not None and num_all is not None and world_size == 1 and num_own < num_all:
        epoch.cause = epoch.cause or (
            f"the sampler ({type(sampler).__name__}) has {count(num_own, 'index', 'indices')}, but the dataset has "
            f"{count(num_all, 'sample')}: if this is intended, expect only the sampler's samples (expected=, "
            "--expected)"
        )
    if batch_size is None or num_own is None:  # The length is unknown, or the batch sampler is the user's own.
        return epoch
    epoch.num_claimed = num_own // batch_size * batch_size if getattr(batching, "drop_last", False) else num_own
    is_own_loop = not _module_of(type(loader).__iter__).startswith(("torch.", "torchdata.", "shardio."))
    skips = getattr(loader, "on_error", "raise") == "skip"
    epoch.may_be_fewer = is_own_loop or skips or outer is not loader
    if world_size == 1 or splits(loader):
        epoch.num_dataset = num_all
    return epoch


def source_of(loader: Any) -> Any:
    """Return a loader without wrappers such as DevicePrefetcher, which lack the loader's dataset."""
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def sampler_of(loader: Any) -> Any:
    """Return a loader's sampler, including one in torch's BatchSampler; None if unknown."""
    return getattr(_batching_of(loader), "sampler", None)


def _batching_of(loader: Any) -> Any:
    """Return the object that holds the batch size: the loader or its batch sampler; None if unknown."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if getattr(loader, "batch_size", None) is not None or batch_sampler is None:
        return loader
    return batch_sampler if _is_torchs(batch_sampler, "BatchSampler") else None


def is_map_style(loader: HasWorkers) -> bool:
    """Return whether a loader reads its dataset by index."""
    import torch.utils.data

    return not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def splits(loader: HasWorkers) -> bool:
    """Return whether a loader's sampler gives each rank a share of a map-style dataset that all ranks have."""
    return is_map_style(loader) and _is_torchs(sampler_of(loader), "DistributedSampler")


def is_batching(loader: Any) -> bool:
    """Return whether a loader collates samples. A loader that does not collate yields the dataset's items."""
    if getattr(loader, "batch_size", None) is not None or getattr(loader, "batch_sampler", None) is not None:
        return True
    if hasattr(loader, "batch_size") and hasattr(loader, "batch_sampler"):
        return False
    # A wrapper lacks these attributes. torch's collate function for single samples is named default_convert.
    return getattr(collate_of(loader), "__name__", "") != "default_convert"


def collates_columns(loader: Any) -> bool:
    """Return whether a loader collates into columns, with a collate function from torch or shardio."""
    return is_batching(loader) and _module_of(collate_of(loader)).startswith(("torch.", "shardio."))


def collate_of(loader: Any) -> Any:
    """Return a loader's own collate function, even while its workers tag their batches."""
    collate = getattr(loader, "collate_fn", None)
    return getattr(collate, "untagged", collate)


def indices_of(loader: HasWorkers) -> Any:
    """Return the indices that a loader's sampler chooses from, in the dataset's order; None if unknown."""
    sampler: Any = sampler_of(loader)
    length = _length(loader.dataset)
    if _is_torchs(sampler, "SubsetRandomSampler"):
        return sorted(map(int, sampler.indices))
    names = ("SequentialSampler", "RandomSampler", "DistributedSampler", "WeightedRandomSampler")
    return None if length is None or not _is_torchs(sampler, *names) else range(length)


def _find_shuffle(loader: Any) -> bool | None:
    found = find_remainder(loader)
    if found is not None:
        settings = found[0].settings
        return settings.shuffle and (settings.window >= MIN_WINDOW or None)
    if not getattr(loader, "in_order", True):
        return False  # Batches may arrive in any order.
    sampler: Any = sampler_of(loader)
    if _is_torchs(sampler, "DistributedSampler"):
        return bool(sampler.shuffle)
    if _is_torchs(sampler, "SequentialSampler"):
        return False
    return True if _is_torchs(sampler, "RandomSampler", "SubsetRandomSampler") else None


def _is_torchs(sampler: Any, *names: str) -> bool:
    """Return whether a sampler is an instance of a torch class and keeps torch's ``__iter__``."""
    import torch.utils.data

    classes = tuple(getattr(torch.utils.data, name) for name in names)
    return isinstance(sampler, classes) and _module_of(type(sampler).__iter__).startswith("torch.")


def _module_of(function: Any) -> str:
    return f"{getattr(function, '__module__', None) or type(function).__module__}."


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


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
    with keep_generators():
        for index in chosen:
            reads = [content_ids(collate([dataset[index]]), is_collated=is_collated) for _ in range(NUM_READS)]
            if any(len(ids) != 1 for ids in reads):
                raise IdentityError(
                    f"collate_fn makes {len(reads[0])} rows from one sample, so samples cannot be identified by their "
                    f"content. {ASK_FOR_KEY}"
                )
            if len({int(ids[0]) for ids in reads}) > 1:
                return replace(epoch, instability=f"sample {index} differs when it is read again")
    # User code may behave differently in workers; only another epoch can show this.
    has_workers = loader.num_workers > 0 and getattr(loader, "calls_dataset", True)
    return replace(epoch, is_stable=None if has_workers else True)


def _find_random(holder: Any, depth: int) -> str | None:
    if depth and _RANDOM.search(type(holder).__name__) and callable(holder):
        return type(holder).__name__
    if depth > 6:
        return None
    held = holder if isinstance(holder, list | tuple) else [getattr(holder, name, None) for name in _NESTED]
    found = (_find_random(one, depth + 1) for one in held[:100] if one is not None)
    return next(filter(None, found), None)


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of a dataset and of the datasets in it.

    Reading the copy opens no files in the original; workers that are forked later would share such files.
    """
    copied = copy.copy(dataset)
    for name in ("dataset", "datasets"):
        inner = getattr(copied, "__dict__", {}).get(name)
        if inner is not None:
            setattr(copied, name, [_copied(one) for one in inner] if isinstance(inner, list) else _copied(inner))
    return copied
