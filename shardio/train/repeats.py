"""Validation that counts samples twice, because ranks get some of them again to have equally many."""

from __future__ import annotations

import warnings
from typing import Any

import torch.utils.data

from shardio.world import World


def warn_of_repeats(loader: Any, world: World, *, stacklevel: int) -> None:
    """Warn, on rank 0, if a loader to validate with repeats samples without a mark.

    Args:
        loader: The loader, perhaps within others such as DevicePrefetcher.
        world: Which rank this is.
        stacklevel: Whose line the warning names, as in ``warnings.warn``.
    """
    if world.rank != 0:
        return
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    num_samples, num_ranks, kind = _find_padding(loader)
    if num_samples % num_ranks:
        warnings.warn(
            f"the score on {num_samples} validation samples is not exact: {kind} repeats {-num_samples % num_ranks} of "
            f"them, so that each of {num_ranks} ranks has equally many, and they count twice. Use shardio.DataLoader, "
            "and give remainder='mask' to the ShardDataset, or to sampler=EpochSampler(dataset, shuffle=False)",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _find_padding(loader: Any) -> tuple[int, int, str]:
    """Return how many samples are padded to a multiple of how many ranks, and by what; 0 of 1 where none are."""
    dataset: Any = getattr(loader, "dataset", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch.utils.data.DistributedSampler):  # EpochSampler is one.
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for order in (dataset, sampler):
        policy = getattr(order, "remainder", None)
        if policy is not None:
            is_padded = policy == "pad" and not getattr(loader, "drop_last", False)
            return (order.num_all_samples, order.world().world_size, _name(order)) if is_padded else (0, 1, "")
    if isinstance(sampler, torch.utils.data.DistributedSampler) and not sampler.drop_last:
        return len(dataset), sampler.num_replicas, _name(sampler)
    return 0, 1, ""


def _name(order: Any) -> str:
    policy = getattr(order, "remainder", None)
    return type(order).__name__ if policy is None else f"{type(order).__name__} with remainder={policy!r}"
