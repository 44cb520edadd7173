"""Which samples an epoch's batches hold, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.indices import check_indices
from shardio.datasets.ordered import Ordered
from shardio.datasets.subsets import Inner, sample_rng_keys
from shardio.order import Cursor, Split, Words, derive_rng_key, make_rng_key


@dataclass(slots=True, kw_only=True)
class BatchPlan:
    """The samples of a batch, or of a part of one.

    Attributes:
        numbers: int64 [n], the samples' numbers in the loader's dataset.
        rng_keys: uint64 [n], one for each sample's random transforms.
        replacement_rng_keys: uint64 [n], by which others are drawn for samples that cannot be read.
        valid: bool [n], which of them are no repeats, where the user wants to know.
    """

    numbers: NDArray[np.int64]
    rng_keys: Words
    replacement_rng_keys: Words
    valid: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: slice | NDArray[np.int64]) -> BatchPlan:
        """Return some of the samples."""
        valid = None if self.valid is None else self.valid[rows]
        return BatchPlan(
            numbers=self.numbers[rows],
            rng_keys=self.rng_keys[rows],
            replacement_rng_keys=self.replacement_rng_keys[rows],
            valid=valid,
        )


def ordered_batches(inner: Inner, source: Ordered, cursor: Cursor, split: Split) -> Iterator[BatchPlan]:
    """Yield the batches of an order of shardio's, over a dataset or Subsets of it."""
    for positions, numbers in source.steps(cursor, split):
        valid = np.concatenate(positions) < split.num_samples if split.remainder == "mask" else None
        rng_keys, replacement_rng_keys = sample_rng_keys(inner, source.settings.seed, cursor.epoch, numbers)
        several = BatchPlan(numbers=numbers, rng_keys=rng_keys, replacement_rng_keys=replacement_rng_keys, valid=valid)
        stop = 0
        for batch in positions:
            start, stop = stop, stop + len(batch)
            yield several.take(slice(start, stop))


def sampled_batches(inner: Inner, sampler: Iterable[list[int]], base_seed: int, epoch: int) -> Iterator[BatchPlan]:
    """Yield the batches that a batch sampler of torch's draws.

    Args:
        inner: The map-style dataset that it draws from, or of which it draws from Subsets.
        sampler: Yields lists of indices.
        base_seed: Of random transforms, where the dataset was not told the epoch: then each draw is another one.
        epoch: How many epochs of this seed there were before.

    Raises:
        IndexError: If a batch is empty, or an index outside of the dataset.
    """
    known: tuple[int, int] | None = inner.dataset.map_epoch.known
    num_drawn = 0
    times_drawn = np.zeros(len(inner) if known else 0, np.uint32)
    for indices in sampler:
        numbers = check_indices(indices, len(inner))
        if not len(numbers):
            raise IndexError("the batch sampler gave a batch without any index: leave such batches out")
        if known is None:
            draws = np.arange(num_drawn, num_drawn + len(numbers), dtype=np.uint64)
            rng_keys = replacement_rng_keys = derive_rng_key(make_rng_key(base_seed, epoch, "draws"), draws)
        else:
            rng_keys, replacement_rng_keys = sample_rng_keys(inner, *known, numbers, _count_draws(times_drawn, numbers))
        num_drawn += len(numbers)
        yield BatchPlan(numbers=numbers, rng_keys=rng_keys, replacement_rng_keys=replacement_rng_keys)


def _count_draws(times_drawn: NDArray[np.uint32], numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return how often each sample was drawn before, earlier in the batch too, and count these draws."""
    order = np.argsort(numbers, kind="stable")
    firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    within = np.arange(len(numbers)) - np.repeat(firsts, np.diff(firsts, append=len(numbers)))
    draws = times_drawn[numbers].astype(np.uint64)
    draws[order] += within.astype(np.uint64)
    np.add.at(times_drawn, numbers, 1)
    return draws
