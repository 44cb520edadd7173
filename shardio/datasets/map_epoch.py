"""The epoch of a map-style dataset, which makes its random transforms reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

from shardio.order import Words, augment_rng_keys
from shardio.shared_numbers import SharedCell
from shardio.transforms import rng_keys_from_torch

_LOADERS_EPOCH: ContextVar[tuple[int, int] | None] = ContextVar("loaders_epoch", default=None)


@contextmanager
def known_epoch(seed: int, epoch: int) -> Iterator[None]:
    """Use this seed and epoch for samples that are read in the block, even through wrapper datasets.

    shardio.DataLoader sends both with the indices, so two loaders over one dataset do not interfere.
    """
    token = _LOADERS_EPOCH.set((seed, epoch))
    try:
        yield
    finally:
        _LOADERS_EPOCH.reset(token)


class MapEpoch:
    """The seed and epoch of a map-style dataset, if the user set them. Worker processes share them."""

    def __init__(self) -> None:
        self._cell = SharedCell(False, 0, 0)

    def set(self, epoch: int, seed: int) -> None:
        """Make rng keys a function of (seed, epoch, sample)."""
        self._cell.set(True, seed, epoch)

    @property
    def known(self) -> tuple[int, int] | None:
        """The seed and epoch, if the user set them."""
        is_set, seed, epoch = self._cell.values
        return (seed, epoch) if is_set else None

    def rng_keys(self, indices: NDArray[np.int64]) -> Words:
        """Return one rng key per sample, uint64 [n]; they come from torch's generator if the epoch is not known."""
        known = _LOADERS_EPOCH.get() or self.known
        return rng_keys_from_torch(len(indices)) if known is None else augment_rng_keys(*known, indices)
