"""What map-style datasets know of the epoch: enough for random transforms that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.shared_cell import SharedCell
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.transforms import rng_keys_from_torch

_LOADERS_EPOCH: ContextVar[tuple[int, int] | None] = ContextVar("loaders_epoch", default=None)


@contextmanager
def known_epoch(seed: int, epoch: int) -> Iterator[None]:
    """Transform samples that are read in the block for this seed and epoch, through any wrappers.

    shardio.DataLoader sends both along with the indices, so two loaders over one dataset do not disturb each other.
    """
    token = _LOADERS_EPOCH.set((seed, epoch))
    try:
        yield
    finally:
        _LOADERS_EPOCH.reset(token)


def augment_rng_keys(seed: int, epoch: int, samples: NDArray[np.int64], draws: Words | None = None) -> Words:
    """Return one key for each sample's random transforms, uint64 [n].

    Args:
        seed: Of the order, or the dataset's own.
        epoch: The epoch's number.
        samples: int64 [n], the samples' numbers.
        draws: uint64 [n], how often each was drawn before in the epoch, where a sampler repeats samples.
    """
    rng_keys = derive_rng_key(make_rng_key(seed, epoch, "augment"), samples.astype(np.uint64))
    if draws is not None and draws.any():
        rng_keys = np.where(draws > 0, derive_rng_key(rng_keys, draws), rng_keys)
    return rng_keys


class MapEpoch:
    """The seed and epoch of one map-style dataset, if its user set them; shared with worker processes."""

    def __init__(self) -> None:
        self._cell = SharedCell(False, 0, 0)

    def set(self, epoch: int, seed: int) -> None:
        """Make keys a function of (seed, epoch, sample)."""
        self._cell.set(True, seed, epoch)

    @property
    def known(self) -> tuple[int, int] | None:
        """The seed and epoch, if the user set them."""
        is_set, seed, epoch = self._cell.values
        return (seed, epoch) if is_set else None

    def rng_keys(self, samples: NDArray[np.int64]) -> Words:
        """Return a key for each sample's transforms, uint64 [n], drawn by torch's generator if no epoch is known."""
        known = _LOADERS_EPOCH.get() or self.known
        return rng_keys_from_torch(len(samples)) if known is None else augment_rng_keys(*known, samples)
