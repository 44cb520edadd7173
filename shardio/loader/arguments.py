"""What DataLoader's arguments must be, beside what torch asks of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sized
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shardio.classes import warn_of_other_classes
from shardio.datasets import EpochSampler, ShardDataset
from shardio.datasets.bad_samples import BadSamples, OnError, check_quarantine
from shardio.datasets.epoch_sampler import find_digest
from shardio.datasets.map_dataset import MapDataset
from shardio.datasets.ordered import Ordered
from shardio.datasets.subsets import look_inside
from shardio.loader.collate import yields_images
from shardio.loader.layouts import Unsaid
from shardio.order import Split
from shardio.values import check_flag, check_integer
from shardio.world import find_world


class Fixed:
    """An argument that is an attribute, and cannot be set again: it would have no effect.

    It lies in the instance's dictionary under its name, where frameworks look for it to make a loader again.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, loader: Any, value: Any) -> None:
        if self._name in vars(loader):
            raise AttributeError(
                f"{self._name} cannot be set on a {type(loader).__name__}: make another one with {self._name}=..."
            )
        vars(loader)[self._name] = value


def check_dataset(dataset: Any, *, shuffle: bool | None, drop_last: bool) -> None:
    """Check what decides on a loader's samples; warn of parts that disagree on classes.

    Raises:
        TypeError: If ``shuffle`` or ``drop_last`` is no truth value.
        ValueError: If the loader is to shuffle what shuffles by itself.
    """
    check_flag("shuffle", False if shuffle is None else shuffle)
    check_flag("drop_last", drop_last)
    if isinstance(dataset, ShardDataset) and shuffle:
        raise ValueError("a ShardDataset shuffles by itself: give shuffle=True to ShardDataset, not to the loader")
    warn_of_other_classes(dataset, stacklevel=4)


def check_samplers_dataset(dataset: Any, sampler: Any, *, compares_digests: bool = False) -> None:
    """Raise ValueError if an EpochSampler was made over another dataset than the loader's, or that has changed since.

    Args:
        dataset: The loader's.
        sampler: Any sampler.
        compares_digests: Whether to compare what is in the datasets, where both say, beside their sizes.
    """
    if not isinstance(sampler, EpochSampler) or not isinstance(dataset, Sized):
        return
    remedy = "make the EpochSampler over the dataset that the loader gets, as it is now"
    if len(dataset) != sampler.num_all_samples:
        raise ValueError(
            f"the EpochSampler was made over {sampler.num_all_samples} samples, and the loader's "
            f"{type(dataset).__name__} has {len(dataset)}: {remedy}"
        )
    if not compares_digests or dataset is sampler.dataset:
        return
    # A StackDataset may well be drawn from by a sampler that was made over one of its parts.
    said = sampler.digest if sampler.old_digest is None else sampler.old_digest
    if "" not in (digests := {find_digest(dataset, looks_at_parts=False), said}) and len(digests) > 1:
        raise ValueError(
            f"the EpochSampler was made over other samples than those of the loader's {type(dataset).__name__}, though "
            f"there are {len(dataset)} of both: {remedy}"
        )


def check_prefetch_factor(prefetch_factor: int | None) -> int | None:
    """Return how many batches are made ahead, if the user says.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is less than 1.
    """
    if prefetch_factor is None or isinstance(prefetch_factor, Unsaid):
        return prefetch_factor
    return check_integer("prefetch_factor", prefetch_factor, at_least=1)


def check_policy(on_error: OnError, dataset: Any, *, has_order: bool, has_batches: bool, obstacle: str | None) -> None:
    """Raise ValueError if bad samples cannot be replaced or skipped.

    Args:
        on_error: What is to become of them.
        dataset: Whose samples they are.
        has_order: Whether shardio's order is theirs.
        has_batches: Whether they are delivered in batches.
        obstacle: Why the fast path is not taken, if it is not.
    """
    if on_error == "raise":
        return
    if on_error == "skip" and not has_batches:
        raise ValueError(
            "on_error='skip' makes batches smaller, and with batch_size=None there are none: use on_error='replace'"
        )
    if on_error == "skip" and isinstance(dataset, ShardDataset) and dataset.overrides_iteration:
        raise ValueError(
            f"on_error='skip' leaves samples out, and the __iter__ of {type(dataset).__name__} would see their gaps: "
            "use on_error='replace', or change samples in the transform or in collate_fn"
        )
    if has_order or obstacle is None:
        return
    if not yields_images(dataset):
        raise ValueError(
            f"on_error={on_error!r} needs a dataset of shardio's, which says which sample cannot be read; "
            f"got {type(dataset).__name__}: catch the errors in its __getitem__"
        )
    raise ValueError(
        f"on_error={on_error!r} needs shardio to ask for the samples, and torch's loader asks for them, because "
        f"{obstacle}: give sampler=EpochSampler(dataset), with which shardio asks in any case"
    )


def make_bad_samples(on_error: OnError, quarantine: str | os.PathLike[str], dataset: Any) -> BadSamples | None:
    """Return what decides on samples that cannot be read; None for an error.

    Raises:
        TypeError: If ``quarantine`` is no path.
        ValueError: If no such file can be written.
    """
    if on_error == "raise":
        return None
    # What replaces a sample of a Subset is a sample of the Subset: what it holds out stays held out.
    num_samples = dataset.num_all_samples if isinstance(dataset, ShardDataset) else len(dataset)
    return BadSamples(on_error, check_quarantine(quarantine), num_samples)


def check_order(order: Ordered, *, batch_size: int | None, drop_last: bool, in_order: bool) -> None:
    """Raise ValueError if a loader's arguments contradict its order of shardio's."""
    if not in_order:
        raise ValueError("in_order=False would deliver other batches than the state counts: leave it at True")
    if drop_last and order.remainder in ("mask", "keep"):
        raise ValueError(f"drop_last=True and remainder={order.remainder!r} contradict each other")
    said = order.batch_size
    if said is not None and said != (batch_size or 1):
        raise ValueError(
            f"the order was told batch_size={said} and the loader batch_size={batch_size}: "
            "leave it to shardio.DataLoader, which says it by itself"
        )


def warn_of_whole_epochs(dataset: Any, sampler: Any, *, stacklevel: int) -> None:
    """Warn if each of several ranks is to get all samples of a map-style dataset of shardio's.

    Args:
        dataset: The loader's.
        sampler: Its batch sampler, or else its sampler.
        stacklevel: Whose line the warning names, as in ``warnings.warn``.
    """
    drawing = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(drawing) not in (RandomSampler, SequentialSampler):
        return  # A sampler of others may share out.
    if isinstance(look_inside(dataset).dataset, MapDataset) and (num_ranks := find_world().world_size) > 1:
        warnings.warn(
            f"{type(drawing).__name__} does not split the samples over ranks: each of {num_ranks} ranks gets all "
            f"{len(dataset)} of them. Give DataLoader sampler=EpochSampler(dataset), or torch's DistributedSampler",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def warn_of_no_batches(split: Split, told_of: set[Split]) -> None:
    """Warn of epochs in which this rank gets no batch at all, unless ``told_of`` has them; put them there."""
    if split in told_of:
        return
    told_of.add(split)
    if split.remainder == "drop":
        why = (
            f"the {split.num_samples} samples are fewer than the {split.world_size * split.batch_size} of a step of "
            "all ranks, and drop_last=True or remainder='drop' leaves them out: use a smaller batch_size, or another "
            "remainder"
        )
    else:
        why = (
            f"rank {split.rank} of {split.world_size} gets none of the {split.num_samples} samples: use fewer ranks, "
            "or remainder='pad'"
        )
    warnings.warn(f"this loader's epochs have no batches: {why}", RuntimeWarning, stacklevel=5)


def sole_split(num_samples: int, batch_size: int | None) -> Split:
    """Return the share of a rank that has all samples, and drops those that fill no batch."""
    alone: dict[str, int] = {"num_samples": num_samples, "start": 0, "rank": 0, "world_size": 1}
    return Split(**alone, batch_size=batch_size or 1, shuffled=False, remainder="drop")
