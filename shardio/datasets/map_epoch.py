"""What map-style datasets know of the epoch: enough for random transforms that can be repeated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.shared_cell import SharedCell
from shardio.order import Words, derive_key, make_key
from shardio.transforms import keys_from_torch


class MapEpoch:
    """The seed and epoch of a map-style dataset once a sampler has said them; shared with worker processes."""

    def __init__(self) -> None:
        self._cell = SharedCell(False, 0, 0)

    def set(self, epoch: int, seed: int) -> None:
        """Make keys a function of (seed, epoch, sample)."""
        self._cell.set(True, seed, epoch)

    def keys(self, samples: NDArray[np.int64]) -> Words:
        """Return a key for each sample's transforms, uint64 [n], drawn by torch's generator if no epoch is known."""
        is_known, seed, epoch = self._cell.values
        if not is_known:
            return keys_from_torch(len(samples))
        return derive_key(make_key(seed, epoch, "augment"), samples.astype(np.uint64))
