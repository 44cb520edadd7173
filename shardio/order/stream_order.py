"""The order of shards whose sizes are unknown, because each is read as a stream from its beginning to its end.

To change the order, also increment ``STATE_VERSION``, so that no run resumes in an order that it did not begin with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.order.bijection import permute
from shardio.order.epoch_order import permute_shards
from shardio.order.words import Words, derive_rng_key, make_rng_key


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """The order of one worker's samples.

    Attributes:
        num_shards: The number of shards of all ranks.
        seed: The seed of the order.
        shuffle: Whether shards and samples are shuffled.
        rank: The rank.
        world_size: The number of ranks.
        worker_id: The worker's number in its rank.
        num_workers: The number of workers of each rank.
    """

    num_shards: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    worker_id: int
    num_workers: int

    def own_shards(self, epoch: int) -> NDArray[np.int64]:
        """Return the shards that the worker reads, in their order, int64 [n].

        The shards of an epoch are dealt to the ranks in turn, and those of a rank to its workers.
        """
        shards = np.arange(self.num_shards, dtype=np.int64)
        if self.shuffle:
            shards = permute_shards(self.num_shards, self.seed, epoch)
        return shards[self.rank :: self.world_size][self.worker_id :: self.num_workers]

    def order_window(self, epoch: int, window: int, num_samples: int) -> NDArray[np.int64]:
        """Return the order of the samples that are shuffled together, int64 [n].

        Args:
            epoch: The epoch.
            window: The window's number among those of the worker.
            num_samples: How many samples it has.
        """
        rows = np.arange(num_samples, dtype=np.int64)
        if not self.shuffle:
            return rows
        rng_key = make_rng_key(self.seed, epoch, "stream", self.rank, self.worker_id, window)
        return permute(rows, np.array([num_samples]), rng_key)

    def rng_keys(self, epoch: int, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> Words:
        """Return one rng key for each sample's transforms, uint64 [n]. They do not depend on ranks and workers.

        Args:
            epoch: The epoch.
            shards: int64 [n], the samples' shards.
            numbers: int64 [n], their numbers in their shards.
        """
        of_shards = derive_rng_key(make_rng_key(self.seed, epoch, "streamed"), shards.astype(np.uint64))
        return derive_rng_key(of_shards, numbers.astype(np.uint64))
