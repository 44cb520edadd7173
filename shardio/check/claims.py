"""Claims: what a loader reports about its epoch, for comparison with what it delivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardio.check.allowance import find_remainder

MIN_WINDOW = 10
"""Smaller windows have so few orders that one may repeat by chance."""


@runtime_checkable
class HasWorkers(Protocol):
    """A loader with the attributes of torch's DataLoader."""

    collate_fn: Callable[[Any], Any]
    num_workers: int
    dataset: Any


@dataclass(slots=True, kw_only=True)
class RankEpoch:
    """Facts about one rank's epoch other than its deliveries.

    Attributes:
        num_batches: The number of batches that arrived.
        by_keys: Whether samples are identified by keys rather than by content.
        is_stable: Whether a sample's content was the same on every read; None if not tested.
        instability: Evidence that contents change, as text; empty if there is none.
        is_whole: Whether the loader was read to the end of the epoch.
        num_claimed: The number of samples that the loader reports for this rank; None if unknown.
        may_be_fewer: Whether ``num_claimed`` is only an upper limit.
        num_dataset: The number of samples in the dataset, over all ranks; None if unknown.
        num_marked: The number of marked repeats; None if marks were not read.
        shuffles: Whether the loader shuffles; None if unknown.
        cause: A property of the loader that explains wrong epochs, as text; empty if there is
            none.
        sampler_state: The epoch and seed of a sampler that splits the dataset over ranks, as text.
        num_shares: The number of ranks that this sampler splits the dataset over; None if unknown.
    """

    num_batches: int = 0
    by_keys: bool = True
    is_stable: bool | None = None
    instability: str = ""
    is_whole: bool = True
    num_claimed: int | None = None
    may_be_fewer: bool = False
    num_dataset: int | None = None
    num_marked: int | None = None
    shuffles: bool | None = None
    cause: str = ""
    sampler_state: str = ""
    num_shares: int | None = None


def find_claims(loader: Iterable[Any], world_size: int) -> RankEpoch:
    """Return what a loader reports about its next epoch, on one of ``world_size`` ranks."""
    outer, loader = loader, source_of(loader)
    epoch = RankEpoch(shuffles=_find_shuffle(loader))
    sampler, dataset = sampler_of(loader), getattr(loader, "dataset", None)
    epoch.sampler_state = _find_state(sampler)
    epoch.num_shares = sampler.num_replicas if _is_torchs(sampler, "DistributedSampler") else None
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
        # With several ranks, the length of an iterable dataset may be that of one share or of all.
        if world_size == 1 and batch_size is not None:
            epoch.num_claimed, epoch.may_be_fewer = _length(dataset), True
        return epoch
    num_own = _length(sampler)
    num_all = _length(dataset)
    if num_own is not None and num_all is not None and world_size == 1 and num_own < num_all:
        epoch.cause = epoch.cause or (
            f"the sampler ({type(sampler).__name__}) has {num_own:,} indices, but the dataset has {num_all:,} samples: "
            "if this is intended, expect only the sampler's samples (expected=, --expected)"
        )
    if batch_size is None or num_own is None:  # Or batched by a user-defined batch sampler.
        return epoch
    epoch.num_claimed = num_own // batch_size * batch_size if getattr(batching, "drop_last", False) else num_own
    is_own_loop = not _module_of(type(loader).__iter__).startswith(("torch.", "torchdata.", "shardio."))
    epoch.may_be_fewer = is_own_loop or _skips(loader) or outer is not loader
    if world_size == 1 or splits(loader):
        epoch.num_dataset = num_all
    return epoch


def source_of(loader: Any) -> Any:
    """Return a loader without wrappers such as DevicePrefetcher, which lack its dataset."""
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def sampler_of(loader: Any) -> Any:
    """Return a loader's sampler, including one in torch's BatchSampler; None if unknown."""
    return getattr(_batching_of(loader), "sampler", None)


def _batching_of(loader: Any) -> Any:
    """Return the loader or its batch sampler, whichever holds the batch size; None if unknown."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if getattr(loader, "batch_size", None) is not None or batch_sampler is None:
        return loader
    return batch_sampler if _is_torchs(batch_sampler, "BatchSampler") else None


def is_map_style(loader: HasWorkers) -> bool:
    """Return whether a loader reads its dataset by index."""
    import torch.utils.data

    return not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def splits(loader: HasWorkers) -> bool:
    """Return whether a loader's sampler splits a map-style dataset over ranks.

    All ranks then have the same dataset.
    """
    return is_map_style(loader) and _is_torchs(sampler_of(loader), "DistributedSampler")


def is_batching(loader: Any) -> bool:
    """Return whether a loader collates samples; otherwise it yields what the dataset yields."""
    if getattr(loader, "batch_size", None) is not None or getattr(loader, "batch_sampler", None) is not None:
        return True
    if hasattr(loader, "batch_size") and hasattr(loader, "batch_sampler"):
        return False
    # A wrapper that lacks them. torch's function for single samples has this name.
    return getattr(collate_of(loader), "__name__", "") != "default_convert"


def collates_columns(loader: Any) -> bool:
    """Return whether a loader collates into columns: with a function of torch or shardio."""
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
    """Return whether a loader shuffles; None if unknown."""
    found = find_remainder(loader)
    if found is not None:
        settings = found[0].settings
        return settings.shuffle and (settings.window >= MIN_WINDOW or None)
    if not getattr(loader, "in_order", True):
        return False  # Batches arrive in any order.
    sampler: Any = sampler_of(loader)
    if _is_torchs(sampler, "DistributedSampler"):
        return bool(sampler.shuffle)
    if _is_torchs(sampler, "SequentialSampler"):
        return False
    return True if _is_torchs(sampler, "RandomSampler", "SubsetRandomSampler") else None


def _find_state(sampler: Any) -> str:
    """Return the epoch and seed of a DistributedSampler as text; "" for other samplers."""
    if not _is_torchs(sampler, "DistributedSampler") or not sampler.shuffle:
        return ""
    return f"epoch {sampler.epoch} and seed {sampler.seed}"


def _is_torchs(sampler: Any, *names: str) -> bool:
    """Return whether a sampler is an instance of a torch class and keeps torch's ``__iter__``."""
    import torch.utils.data

    classes = tuple(getattr(torch.utils.data, name) for name in names)
    return isinstance(sampler, classes) and _module_of(type(sampler).__iter__).startswith("torch.")


def _skips(loader: Any) -> bool:
    """Return whether a loader of shardio skips samples that it cannot read."""
    return getattr(loader, "on_error", "raise") == "skip"


def _module_of(function: Any) -> str:
    return f"{getattr(function, '__module__', None) or type(function).__module__}."


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
