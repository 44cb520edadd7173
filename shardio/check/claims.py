"""Claims: what a loader says of itself, against which a report holds what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardio.check.allowance import find_remainder

MIN_WINDOW = 10
"""Windows of fewer samples leave few orders, which come again by chance."""


@runtime_checkable
class HasWorkers(Protocol):
    """What makes a loader one of torch's kind."""

    collate_fn: Callable[[Any], Any]
    num_workers: int
    dataset: Any


@dataclass(slots=True, kw_only=True)
class RankEpoch:
    """What is known of one rank's epoch beside its deliveries.

    Attributes:
        num_batches: How many batches arrived.
        by_keys: Whether its samples are known by keys; otherwise by their content.
        is_stable: Whether a sample's content was seen to be the same each time; None where that could not be tried.
        instability: What shows that contents change, in words.
        is_whole: Whether the loader was read to the end of the epoch.
        num_claimed: How many samples the loader says that this rank gets; None where it does not say.
        may_be_fewer: Whether that number is but the most.
        num_dataset: How many samples the dataset has, over all ranks; None where that is not known.
        num_marked: How many repeats were marked as such; None where marks were not looked at.
        shuffles: Whether the loader shuffles; None where that is not known.
        cause: What the loader does that makes it wrong, where that shows.
        sampler_state: The epoch and the seed of a sampler that splits the dataset over ranks, in words.
        num_shares: For how many ranks that sampler splits it.
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
    """Return what a loader says of the epoch that it is about to deliver to one of ``world_size`` ranks."""
    outer, loader = loader, source_of(loader)
    epoch = RankEpoch(shuffles=_find_shuffle(loader))
    sampler, dataset = sampler_of(loader), getattr(loader, "dataset", None)
    epoch.sampler_state = _find_state(sampler)
    epoch.num_shares = sampler.num_replicas if _is_torchs(sampler, "DistributedSampler") else None
    if getattr(sampler, "replacement", False):
        epoch.cause = f"the sampler ({type(sampler).__name__}) draws with replacement"
    if (found := find_remainder(loader)) is not None:
        epoch.num_dataset = found[0].num_all_samples
        return epoch
    if not isinstance(loader, HasWorkers) or not is_batching(loader):
        return epoch
    batching = _batching_of(loader)
    batch_size = getattr(batching, "batch_size", None)
    if not is_map_style(loader):
        # Of several ranks an iterable dataset may count its own share or all samples. torch warns of more than that.
        if world_size == 1 and batch_size is not None:
            epoch.num_claimed, epoch.may_be_fewer = _length(dataset), True
        return epoch
    num_own = _length(sampler)
    num_all = _length(dataset)
    if num_own is not None and num_all is not None and world_size == 1 and num_own < num_all:
        epoch.cause = epoch.cause or (
            f"the sampler ({type(sampler).__name__}) has {num_own:,} numbers, and the dataset {num_all:,} samples: "
            "give expected= if that is meant"
        )
    if batch_size is None or num_own is None:  # Or by a batch sampler of the user's own.
        return epoch
    epoch.num_claimed = num_own // batch_size * batch_size if getattr(batching, "drop_last", False) else num_own
    is_own_loop = not _module_of(type(loader).__iter__).startswith(("torch.", "torchdata.", "shardio."))
    epoch.may_be_fewer = is_own_loop or _skips(loader) or outer is not loader
    if world_size == 1 or splits(loader):
        epoch.num_dataset = num_all
    return epoch


def source_of(loader: Any) -> Any:
    """Return the loader inside of a wrapper such as DevicePrefetcher: it alone knows its dataset and its order."""
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def sampler_of(loader: Any) -> Any:
    """Return what draws the numbers of a loader's samples, also inside of torch's BatchSampler; None where unknown."""
    return getattr(_batching_of(loader), "sampler", None)


def _batching_of(loader: Any) -> Any:
    """Return what holds the sampler and the batch size: the loader, or its batch sampler; None where unknown."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if getattr(loader, "batch_size", None) is not None or batch_sampler is None:
        return loader
    return batch_sampler if _is_torchs(batch_sampler, "BatchSampler") else None


def is_map_style(loader: HasWorkers) -> bool:
    """Return whether a loader's dataset is read by numbers, which a sampler draws."""
    import torch.utils.data

    return not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def splits(loader: HasWorkers) -> bool:
    """Return whether a loader's sampler splits a map-style dataset, which is then the same on all ranks."""
    return is_map_style(loader) and _is_torchs(sampler_of(loader), "DistributedSampler")


def is_batching(loader: Any) -> bool:
    """Return whether a loader of torch's kind collates samples; otherwise it yields what the dataset does."""
    return getattr(loader, "batch_size", None) is not None or getattr(loader, "batch_sampler", None) is not None


def collates_columns(loader: Any) -> bool:
    """Return whether a loader collates by torch's or shardio's own functions, whose batches hold columns."""
    return is_batching(loader) and _module_of(collate_of(loader)).startswith(("torch.", "shardio."))


def collate_of(loader: Any) -> Any:
    """Return a loader's own collate function, also while its workers tag their batches."""
    collate = getattr(loader, "collate_fn", None)
    return getattr(collate, "untagged", collate)


def numbers_of(loader: HasWorkers) -> Any:
    """Return the numbers that a loader's sampler draws from, in the dataset's order; None where they are not known."""
    sampler: Any = sampler_of(loader)
    length = _length(loader.dataset)
    if _is_torchs(sampler, "SubsetRandomSampler"):
        return sorted(int(number) for number in sampler.indices)
    names = ("SequentialSampler", "RandomSampler", "DistributedSampler", "WeightedRandomSampler")
    return None if length is None or not _is_torchs(sampler, *names) else range(length)


def _find_shuffle(loader: Any) -> bool | None:
    """Return whether a loader shuffles, where it shows."""
    found = find_remainder(loader)
    if found is not None:
        settings = found[0].settings
        return settings.shuffle and (settings.window >= MIN_WINDOW or None)
    if not getattr(loader, "in_order", True):
        return False  # Its order says nothing.
    sampler: Any = sampler_of(loader)
    if _is_torchs(sampler, "DistributedSampler"):
        return bool(sampler.shuffle)
    if _is_torchs(sampler, "SequentialSampler"):
        return False
    return True if _is_torchs(sampler, "RandomSampler", "SubsetRandomSampler") else None


def _find_state(sampler: Any) -> str:
    """Return the epoch and the seed of torch's DistributedSampler, in words; "" of other samplers."""
    if not _is_torchs(sampler, "DistributedSampler") or not sampler.shuffle:
        return ""
    return f"epoch {sampler.epoch} and seed {sampler.seed}"


def _is_torchs(sampler: Any, *names: str) -> bool:
    """Return whether a sampler is one of torch's, or of a kind that is derived from it and draws as it does."""
    import torch.utils.data

    kinds = tuple(getattr(torch.utils.data, name) for name in names)
    return isinstance(sampler, kinds) and _module_of(type(sampler).__iter__).startswith("torch.")


def _skips(loader: Any) -> bool:
    """Return whether a loader of shardio's leaves out samples that cannot be read."""
    return getattr(loader, "on_error", "raise") == "skip"


def _module_of(function: Any) -> str:
    return f"{getattr(function, '__module__', None) or type(function).__module__}."


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None  # It has none.
