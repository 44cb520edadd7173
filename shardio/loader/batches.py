"""Which samples an epoch's batches hold, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.indices import check_indices
from shardio.datasets.map_dataset import MapDataset
from shardio.datasets.map_epoch import augment_keys
from shardio.datasets.ordered import Ordered
from shardio.order import Cursor, Split, Words, derive_key, make_key


@dataclass(slots=True, kw_only=True)
class BatchPlan:
    """The samples of a batch, or of a part of one.

    Attributes:
        numbers: int64 [n], the samples' numbers in the dataset.
        keys: uint64 [n], one for each sample's random transforms.
        valid: bool [n], which of them are no repeats, where the user wants to know.
    """

    numbers: NDArray[np.int64]
    keys: Words
    valid: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: slice | NDArray[np.int64]) -> BatchPlan:
        """Return some of the samples."""
        valid = None if self.valid is None else self.valid[rows]
        return BatchPlan(numbers=self.numbers[rows], keys=self.keys[rows], valid=valid)


def ordered_batches(source: Ordered, cursor: Cursor, split: Split) -> Iterator[BatchPlan]:
    """Yield the batches of an order of shardio's."""
    for positions, numbers in source.steps(cursor, split):
        valid = np.concatenate(positions) < split.num_samples if split.remainder == "mask" else None
        keys = augment_keys(source.settings.seed, cursor.epoch, numbers)
        several = BatchPlan(numbers=numbers, keys=keys, valid=valid)
        stop = 0
        for batch in positions:
            start, stop = stop, stop + len(batch)
            yield several.take(slice(start, stop))


def sampled_batches(
    dataset: MapDataset, sampler: Iterable[list[int]], base_seed: int, epoch: int
) -> Iterator[BatchPlan]:
    """Yield the batches that a batch sampler of torch's draws.

    Args:
        dataset: The dataset that it draws from.
        sampler: Yields lists of indices.
        base_seed: Of random transforms, where the dataset was not told the epoch: then each draw is another one.
        epoch: How many epochs of this seed there were before.

    Raises:
        IndexError: If a batch is empty, or an index outside of the dataset.
    """
    known = dataset.map_epoch.known
    num_drawn = 0
    times_drawn = np.zeros(len(dataset) if known else 0, np.uint32)
    for indices in sampler:
        numbers = check_indices(indices, len(dataset))
        if not len(numbers):
            raise IndexError("the batch sampler gave a batch without any index: leave such batches out")
        if known is None:
            draws = np.arange(num_drawn, num_drawn + len(numbers), dtype=np.uint64)
            keys = derive_key(make_key(base_seed, epoch, "draws"), draws)
        else:
            keys = augment_keys(*known, numbers, _count_draws(times_drawn, numbers))
        num_drawn += len(numbers)
        yield BatchPlan(numbers=numbers, keys=keys)


def _count_draws(times_drawn: NDArray[np.uint32], numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return how often each sample was drawn before, earlier in the batch too, and count these draws."""
    order = np.argsort(numbers, kind="stable")
    firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    within = np.arange(len(numbers)) - np.repeat(firsts, np.diff(firsts, append=len(numbers)))
    draws = times_drawn[numbers].astype(np.uint64)
    draws[order] += within.astype(np.uint64)
    np.add.at(times_drawn, numbers, 1)
    return draws
