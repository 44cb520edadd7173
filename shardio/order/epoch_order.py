"""The epoch's order: from positions to samples, by arithmetic.

The shards are permuted and laid end to end: this is the tape. The tape is cut into lanes, each lane is shuffled
in consecutive windows, and positions alternate between the lanes. Only the table of shard sizes is in memory.
Each position is computed independently, so an epoch can begin anywhere at no cost.

To change the order, also increment ``STATE_VERSION`` in ``state.py``, so that no run resumes in an order that it did
not begin with, and run ``tools/freeze_orders.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.order.bijection import permute
from shardio.order.settings import OrderSettings
from shardio.order.words import derive_rng_key, make_rng_key, random_words


def permute_shards(num_shards: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return an epoch's order of the shards, int64 [shards]."""
    rng_key = make_rng_key(seed, epoch, "shards")
    return np.argsort(random_words(rng_key, np.arange(num_shards, dtype=np.uint64)), kind="stable")


class EpochOrder:
    """One epoch's order of the samples of a dataset.

    Args:
        shard_sizes: int64 [shards], the number of samples of each shard in manifest order.
        settings: The order's settings.
        epoch: The epoch's number, at least 0.
    """

    def __init__(self, shard_sizes: NDArray[np.int64], settings: OrderSettings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.num_samples = int(shard_sizes.sum())
        tape = self._permuted_shards(len(shard_sizes))
        shard_starts = np.cumsum(shard_sizes) - shard_sizes
        self._tape_stops = np.cumsum(shard_sizes[tape])
        # An offset on the tape plus its shift is the sample's index in manifest order.
        self._tape_shifts = shard_starts[tape] - (self._tape_stops - shard_sizes[tape])

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at the given positions of the epoch.

        Args:
            positions: int64 [n], at least 0. Beyond the last position, the order repeats (position p mod N), as the
                remainder policies ``pad`` and ``mask`` require.

        Returns:
            int64 [n], the samples' indices in manifest order.
        """
        positions = positions % self.num_samples
        if not self.settings.shuffle:
            return positions
        offsets = self._offsets_on_tape(positions)
        return offsets + self._tape_shifts[np.searchsorted(self._tape_stops, offsets, side="right")]

    def _permuted_shards(self, num_shards: int) -> NDArray[np.int64]:
        if not self.settings.shuffle:
            return np.arange(num_shards, dtype=np.int64)
        return permute_shards(num_shards, self.settings.seed, self.epoch)

    def _offsets_on_tape(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        lanes, length = self.settings.lanes, self.settings.window
        offset, lane = np.divmod(positions, lanes)
        # The first N mod L lanes are one sample longer.
        quotient, num_longer = divmod(self.num_samples, lanes)
        lane_start = lane * quotient + np.minimum(lane, num_longer)
        lane_size = quotient + (lane < num_longer)

        window, index = np.divmod(offset, length)
        window_start = window * length
        window_size = np.minimum(length, lane_size - window_start)
        rng_key = make_rng_key(self.settings.seed, self.epoch, "windows")
        rng_key = derive_rng_key(derive_rng_key(rng_key, lane.astype(np.uint64)), window.astype(np.uint64))
        return np.asarray(lane_start + window_start + permute(index, window_size, rng_key), dtype=np.int64)
