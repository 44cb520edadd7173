"""What a loader's own remainder policy asks of an epoch, where the loader is shardio's or has its order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardio.world import World


@runtime_checkable
class HasRemainder(Protocol):
    """What makes a dataset or a sampler one of shardio's kind: it has an order, and a policy at its end."""

    remainder: str
    num_all_samples: int
    batch_size: int | None

    def world(self) -> World:
        """Return the rank and the world size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What an epoch delivers by its remainder policy.

    Attributes:
        num_samples: The samples of the dataset.
        num_repeats: How many deliveries too many there are, over all ranks. Repeats that are marked do not count.
        num_missing: How many samples are left out.
    """

    num_samples: int
    num_repeats: int = 0
    num_missing: int = 0


def find_remainder(loader: Iterable[Any]) -> tuple[HasRemainder, str] | None:
    """Return who holds a loader's order, and the policy at its end; None where the order is not shardio's."""
    for holder in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(holder, HasRemainder):
            # In torch's own loader drop_last drops a batch of each worker, whatever the policy is.
            drops = hasattr(loader, "runs_torchs_workers") and bool(getattr(loader, "drop_last", False))
            return holder, "drop" if drops else holder.remainder
    return None


def find_allowance(loader: Iterable[Any]) -> Allowance | None:
    """Return what a whole epoch of a loader delivers by its policy; None where the order is not shardio's."""
    found = find_remainder(loader)
    if found is None:
        return None
    holder, policy = found
    number, world_size = holder.num_all_samples, holder.world().world_size
    batch_size = holder.batch_size or getattr(loader, "batch_size", None) or 1
    return Allowance(
        num_samples=number,
        num_repeats=-number % world_size if policy == "pad" else 0,
        num_missing=number % (world_size * batch_size) if policy == "drop" else 0,
    )
