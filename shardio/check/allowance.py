"""Allowances: the repeats and omissions that a remainder policy requires of an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardio.order import Cursor, EpochOrder, OrderSettings
from shardio.world import World


@runtime_checkable
class HasRemainder(Protocol):
    """A dataset or a sampler with shardio's order and a remainder policy."""

    remainder: str
    num_all_samples: int
    batch_size: int | None
    digest: str
    shard_sizes: NDArray[np.int64]
    settings: OrderSettings

    def world(self) -> World:
        """Return the rank and the world size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The repeats and omissions that the remainder policy requires of an epoch.

    Attributes:
        num_samples: The number of samples in the dataset.
        num_repeats: The number of extra deliveries over all ranks, without marked repeats.
        num_missing: The number of samples that are left out, or were delivered before the run
            resumed.
        num_marked: The number of marked repeats over all ranks.
        samples: The sorted indices of the samples that are repeated or left out; None if unknown.
        digest: The digest of the dataset that the indices refer to.
    """

    num_samples: int
    num_repeats: int = 0
    num_missing: int = 0
    num_marked: int = 0
    samples: tuple[int, ...] | None = None
    digest: str = ""


def find_remainder(loader: Iterable[Any]) -> tuple[HasRemainder, str] | None:
    """Return the dataset or sampler that orders a loader, and its remainder policy.

    Return None if the order is not shardio's.
    """
    for holder in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(holder, HasRemainder):
            # Only shardio's drop_last is a policy. torch's drops the incomplete batch of each worker.
            drops = hasattr(loader, "calls_dataset") and bool(getattr(loader, "drop_last", False))
            return holder, "drop" if drops else holder.remainder
    return None


def find_cursor(loader: Iterable[Any]) -> Cursor | None:
    """Return a loader's cursor in shardio's order, read from its state; None if it has none."""
    found = find_remainder(loader)
    # Do not ask other loaders for their state: torchdata's starts its workers to determine it.
    holder: Any = loader if hasattr(loader, "calls_dataset") else None if found is None else found[0]
    if found is None or not callable(getattr(holder, "state_dict", None)):
        return None
    if not getattr(holder, "has_order", True):  # A subclass of shardio's sampler has its own __iter__.
        return None
    state = holder.state_dict()
    return Cursor(epoch=state["epoch"], position=state["position"])


def resumes(loader: Iterable[Any], num_batches: int) -> bool | None:
    """Return whether a loader resumes the epoch that stopped after ``num_batches`` batches.

    Return None if that epoch was complete.
    """
    found = find_remainder(loader)
    cursor = find_cursor(loader) if found is not None and hasattr(loader, "calls_dataset") else None
    if found is None or cursor is None:
        length = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]  # hasattr checks it
        return True if length is None or num_batches < length else None
    return None if cursor.position >= found[0].num_all_samples else cursor.position > 0


def find_allowance(loader: Iterable[Any], before: Cursor | None = None) -> Allowance | None:
    """Return the allowance of a loader's epoch; None if the order is not shardio's.

    Args:
        loader: The loader, after it delivered the epoch's first batch, if the epoch has one.
        before: The loader's cursor before that batch.
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
    num_padded = -(num_samples - start) % world_size
    num_dropped = (num_samples - start) % (world_size * batch_size) if policy == "drop" else 0
    positions = (
        np.arange(num_samples, num_samples + num_padded)
        if policy == "pad"
        else np.arange(num_samples - num_dropped, num_samples)
    )
    samples: tuple[int, ...] | None = None
    if now is not None and start == 0:
        order = EpochOrder(holder.shard_sizes, holder.settings, now.epoch)
        samples = tuple(sorted(order.samples_at(positions).tolist())) if len(positions) else ()
    return Allowance(
        num_samples=num_samples,
        num_repeats=num_padded if policy == "pad" else 0,
        num_missing=num_dropped + start,
        num_marked=num_padded if policy == "mask" else 0,
        samples=samples,
        digest=holder.digest,
    )
