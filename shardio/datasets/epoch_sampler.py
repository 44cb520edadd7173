"""EpochSampler: shardio's order, split and state for map-style datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from shardio.datasets.image_folder import ImageFolder
from shardio.datasets.shard_map_dataset import ShardMapDataset
from shardio.order import (
    Cursor,
    EpochCounter,
    EpochOrder,
    Remainder,
    Split,
    check_remainder,
    choose_settings,
    dump_state,
    read_state,
)
from shardio.world import World, find_world

SAMPLES_AT_ONCE = 1024
"""How many indices are computed at a time."""


class EpochSampler(DistributedSampler[Any]):
    """Give each rank its share of a map-style dataset, in shardio's order.

    A subclass of torch's DistributedSampler, by which frameworks see that the data are split already. Its
    state counts the samples that it gave out; ``shardio.DataLoader.state_dict`` counts those that arrived.

    Args:
        dataset: A map-style dataset. One that has shards is ordered by them; others as one lane and one window.
        batch_size: The loader's batch size, where the order is not shuffled or the remainder is ``drop``;
            shardio.DataLoader says it by itself.
        shuffle: Whether to shuffle, anew each epoch.
        seed: Of the order and of shardio's transforms.
        remainder: What happens to the samples that do not fill a step of all ranks, see
            :class:`shardio.ShardDataset`; ``mask`` needs shardio.DataLoader.
        rank: This process among the training processes; by default torch.distributed's or torchrun's.
        world_size: How many there are, likewise.
        lanes: Stretches of the epoch between which positions alternate, with ``shuffle``.
        window: Neighbouring samples that are shuffled together, with ``shuffle``.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "pad",
        rank: int | None = None,
        world_size: int | None = None,
        lanes: int | None = None,
        window: int | None = None,
    ) -> None:
        # DistributedSampler's own __init__ asks torch.distributed for the world at once; here it is asked for
        # when it is first needed, so its attributes are properties below.
        self.dataset = dataset  # type: ignore[assignment]  # torch's type wants a Dataset; a length is enough
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.remainder = check_remainder(remainder)
        self._world = None if rank is None and world_size is None else find_world(rank, world_size)
        self.num_all_samples = len(dataset)
        if self.num_all_samples == 0:
            raise ValueError("the dataset is empty")
        sizes = getattr(dataset, "shard_sizes", None)
        self._shard_sizes: NDArray[np.int64] = np.array([len(dataset)]) if sizes is None else sizes
        if sizes is None and shuffle:
            lanes, window = lanes or 1, window or len(dataset)
        self.settings = choose_settings(self._shard_sizes, shuffle=shuffle, seed=seed, lanes=lanes, window=window)
        self.counter = EpochCounter()
        self._cursor = Cursor(epoch=0)

    @property
    def rank(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self._find_world().rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self._find_world().world_size

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.counter.next.epoch

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # an attribute in torch
        return self.remainder == "drop"

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self) * self.num_replicas

    @property
    def digest(self) -> str:
        """The dataset's identity, where it has one."""
        return str(getattr(self.dataset, "digest", ""))

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next iteration is. The loaded epoch keeps its position, another one drops it."""
        self.counter.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler is, by the samples that it gave out."""
        return dump_state(self._cursor, self.settings, self.digest, self.num_all_samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            StateError: If it belongs to another dataset or order.
        """
        self._cursor = read_state(state, self.settings, self.digest, self.num_all_samples)
        self.counter.load(self._cursor)

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in a full epoch."""
        return self._own_split(Cursor(epoch=0)).num_own_samples

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of this rank's samples. Without ``set_epoch`` an epoch is repeated, as in torch."""
        if self.remainder == "mask":
            raise ValueError("remainder='mask' needs shardio.DataLoader, which adds the field 'valid' to the batches")
        cursor = self.counter.start(self.num_all_samples)
        self.counter.set_epoch(cursor.epoch)
        return self._counted(cursor)

    def split(self, cursor: Cursor, *, batch_size: int, remainder: Remainder) -> Split:
        """Return this rank's share of an epoch from ``cursor`` on."""
        world = self._find_world()
        return Split(
            num_samples=self.num_all_samples,
            start=cursor.position,
            rank=world.rank,
            world_size=world.world_size,
            batch_size=batch_size,
            shuffled=self.settings.shuffle,
            remainder=remainder,
        )

    def batches(self, cursor: Cursor, split: Split) -> Iterator[list[int]]:
        """Yield the sample numbers of each of this rank's batches, and tell the dataset which epoch it is."""
        _tell_epoch(self.dataset, cursor.epoch, self.seed)
        order = EpochOrder(self._shard_sizes, self.settings, cursor.epoch)
        steps_at_once = -(-SAMPLES_AT_ONCE // split.batch_size)
        for first in range(0, split.num_batches, steps_at_once):
            positions = [split.batch(step) for step in range(first, min(first + steps_at_once, split.num_batches))]
            samples = order.samples_at(np.concatenate(positions))
            yield from (batch.tolist() for batch in np.split(samples, np.cumsum(list(map(len, positions)))[:-1]))

    def _counted(self, cursor: Cursor) -> Iterator[int]:
        split = self._own_split(cursor)
        self._cursor = cursor
        for number, batch in enumerate(self.batches(cursor, split), start=1):
            # The state moves on before the last sample is handed out, so that it is right right after it.
            yield from batch[:-1]
            self._cursor = Cursor(epoch=cursor.epoch, position=split.position_after(number))
            yield batch[-1]
        self._cursor = Cursor(epoch=cursor.epoch, position=self.num_all_samples)

    def _own_split(self, cursor: Cursor) -> Split:
        if self.batch_size is None and self.remainder == "drop":
            raise ValueError("remainder='drop' needs EpochSampler(batch_size=...), or shardio.DataLoader")
        return self.split(cursor, batch_size=self.batch_size or 1, remainder=self.remainder)

    def _find_world(self) -> World:
        return self._world or find_world()


def _tell_epoch(dataset: Any, epoch: int, seed: int) -> None:
    """Tell a map-style dataset of shardio its epoch, also where it is wrapped, as by torch's Subset."""
    while not isinstance(dataset, ImageFolder | ShardMapDataset):
        if not hasattr(dataset, "dataset"):
            return
        dataset = dataset.dataset
    dataset.set_epoch(epoch, seed)
