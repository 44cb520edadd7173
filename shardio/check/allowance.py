"""What a loader's own remainder policy asks of an epoch, where the loader is shardio's or has its order."""

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
    """What makes a dataset or a sampler one of shardio's kind: it has an order, and a policy at its end."""

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
    """What an epoch delivers by its remainder policy.

    Attributes:
        num_samples: The samples of the dataset.
        num_repeats: How many deliveries too many there are, over all ranks. Repeats that are marked do not count.
        num_missing: How many samples are left out, or came before the run was resumed.
        num_marked: How many repeats are marked, over all ranks.
        samples: The numbers of the samples that are repeated or left out, in order; None where they are not known.
        digest: Which dataset the numbers are of.
    """

    num_samples: int
    num_repeats: int = 0
    num_missing: int = 0
    num_marked: int = 0
    samples: tuple[int, ...] | None = None
    digest: str = ""


def find_remainder(loader: Iterable[Any]) -> tuple[HasRemainder, str] | None:
    """Return who holds a loader's order, and the policy at its end; None where the order is not shardio's."""
    for holder in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(holder, HasRemainder):
            # In torch's own loader drop_last drops a batch of each worker, whatever the policy is.
            drops = hasattr(loader, "runs_torchs_workers") and bool(getattr(loader, "drop_last", False))
            return holder, "drop" if drops else holder.remainder
    return None


def find_cursor(loader: Iterable[Any]) -> Cursor | None:
    """Return where a loader of shardio's kind is, by its state; None where it does not say."""
    found = find_remainder(loader)
    # Other loaders' states are not asked for: torchdata's starts its workers to tell.
    holder: Any = loader if hasattr(loader, "runs_torchs_workers") else None if found is None else found[0]
    if found is None or not callable(getattr(holder, "state_dict", None)):
        return None
    if not getattr(holder, "has_state", True):  # Its sampler holds shardio's order, and iterates in a way of its own.
        return None
    state = holder.state_dict()
    return Cursor(epoch=state["epoch"], position=state["position"])


def goes_on(loader: Iterable[Any], num_batches: int) -> bool | None:
    """Return whether a loader resumes an epoch of which a rank got ``num_batches``; None if that epoch was over."""
    found = find_remainder(loader)
    cursor = find_cursor(loader) if found is not None and hasattr(loader, "runs_torchs_workers") else None
    if found is None or cursor is None:
        length = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]  # it has one
        return True if length is None or num_batches < length else None
    return None if cursor.position >= found[0].num_all_samples else cursor.position > 0


def find_allowance(loader: Iterable[Any], before: Cursor | None = None) -> Allowance | None:
    """Return what an epoch of a loader delivers by its policy; None where the order is not shardio's.

    Args:
        loader: The loader, which has delivered the epoch's first batch, if there is one.
        before: Where it was before that.
    """
    found = find_remainder(loader)
    if found is None:
        return None
    holder, policy = found
    number, world_size = holder.num_all_samples, holder.world().world_size
    batch_size = holder.batch_size or getattr(loader, "batch_size", None) or 1
    now = find_cursor(loader)
    start = before.position if before is not None and now is not None and before.epoch == now.epoch else 0
    start = 0 if start == number and now != before else start
    num_padded = -(number - start) % world_size
    num_dropped = (number - start) % (world_size * batch_size) if policy == "drop" else 0
    positions = np.arange(number, number + num_padded) if policy == "pad" else np.arange(number - num_dropped, number)
    samples: tuple[int, ...] | None = None
    if now is not None and start == 0:
        order = EpochOrder(holder.shard_sizes, holder.settings, now.epoch)
        samples = tuple(sorted(order.samples_at(positions).tolist())) if len(positions) else ()
    return Allowance(
        num_samples=number,
        num_repeats=num_padded if policy == "pad" else 0,
        num_missing=num_dropped + start,
        num_marked=num_padded if policy == "mask" else 0,
        samples=samples,
        digest=holder.digest,
    )
