"""What the remainder policy of a loader with shardio's order requires of an epoch."""

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
    """What an epoch delivers under its remainder policy.

    Attributes:
        num_samples: How many samples the dataset has.
        num_repeats: How many extra deliveries there are over all ranks, not counting marked repeats.
        num_missing: How many samples are left out or were delivered before the run was resumed.
        num_marked: How many repeats are marked over all ranks.
        samples: The indices of the samples that are repeated or left out, sorted; None if unknown.
        digest: The digest of the dataset that the indices belong to.
    """

    num_samples: int
    num_repeats: int = 0
    num_missing: int = 0
    num_marked: int = 0
    samples: tuple[int, ...] | None = None
    digest: str = ""


def find_remainder(loader: Iterable[Any]) -> tuple[HasRemainder, str] | None:
    """Return the dataset or sampler with a loader's order, and the remainder policy; None if shardio has no order."""
    for holder in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(holder, HasRemainder):
            # In torch's own loader, drop_last drops a batch of each worker under any policy.
            drops = hasattr(loader, "runs_torchs_workers") and bool(getattr(loader, "drop_last", False))
            return holder, "drop" if drops else holder.remainder
    return None


def find_cursor(loader: Iterable[Any]) -> Cursor | None:
    """Return the position of a loader with shardio's order, from its state; None if it has none."""
    found = find_remainder(loader)
    # Do not ask other loaders for a state: torchdata's starts its workers to find it.
    holder: Any = loader if hasattr(loader, "runs_torchs_workers") else None if found is None else found[0]
    if found is None or not callable(getattr(holder, "state_dict", None)):
        return None
    if not getattr(holder, "has_state", True):  # A sampler with shardio's order that iterates in its own way.
        return None
    state = holder.state_dict()
    return Cursor(epoch=state["epoch"], position=state["position"])


def resumes(loader: Iterable[Any], num_batches: int) -> bool | None:
    """Return whether a loader resumes an epoch after ``num_batches``; None if that epoch was complete."""
    found = find_remainder(loader)
    cursor = find_cursor(loader) if found is not None and hasattr(loader, "runs_torchs_workers") else None
    if found is None or cursor is None:
        length = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]  # it has one
        return True if length is None or num_batches < length else None
    return None if cursor.position >= found[0].num_all_samples else cursor.position > 0


def find_allowance(loader: Iterable[Any], before: Cursor | None = None) -> Allowance | None:
    """Return what an epoch of a loader delivers under its policy; None if the order is not shardio's.

    Args:
        loader: The loader after it delivered the epoch's first batch, if there is one.
        before: The loader's position before that.
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
