"""Plans of an epoch's batches: which samples each batch holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.datasets import Ordered, Unwrapped, check_indices
from shardio.decoding import FieldDecoder
from shardio.order import Cursor, Split, Words, derive_rng_key, make_rng_key


@dataclass(slots=True, kw_only=True)
class BatchPlan:
    """The samples of a batch, or of a part of one.

    Attributes:
        indices: int64 [n], the samples' indices in the loader's dataset.
        rng_keys: uint64 [n], one for each sample's transforms.
        replacement_rng_keys: uint64 [n], the rng keys that draw replacements for unreadable samples.
        valid: bool [n], false for repeats; None unless ``remainder`` is ``mask``.
    """

    indices: NDArray[np.int64]
    rng_keys: Words
    replacement_rng_keys: Words
    valid: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, rows: slice | NDArray[np.int64]) -> BatchPlan:
        """Return the plan for some of the rows."""
        return BatchPlan(
            indices=self.indices[rows],
            rng_keys=self.rng_keys[rows],
            replacement_rng_keys=self.replacement_rng_keys[rows],
            valid=None if self.valid is None else self.valid[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The source of an epoch's samples.

    Attributes:
        dataset: The loader's dataset: one of shardio's, perhaps within torch's Subsets.
        decoder: The dataset's decoder at the beginning of the epoch.
        epoch: The epoch, if known.
    """

    dataset: Unwrapped
    decoder: FieldDecoder
    epoch: int | None


class Planner(Protocol):
    """The interface of planners, which plan the batches of epochs.

    Attributes:
        dataset: The loader's dataset: one of shardio's, perhaps within torch's Subsets.
    """

    dataset: Unwrapped

    def plan(self, cursor: Cursor | None, split: Split | None) -> tuple[Iterator[BatchPlan], SampleSource]:
        """Return the plans of an epoch's batches, and the source of their samples.

        Args:
            cursor: Where the epoch begins; None if the order is not shardio's.
            split: This rank's share, from the cursor to the end; None in the same case.
        """


class OrderPlanner:
    """A planner of batches in shardio's order.

    Args:
        dataset: The loader's dataset.
        order: The order.
    """

    def __init__(self, dataset: Unwrapped, order: Ordered) -> None:
        self.dataset, self._order = dataset, order

    def plan(self, cursor: Cursor | None, split: Split | None) -> tuple[Iterator[BatchPlan], SampleSource]:
        """Return the plans of an epoch's batches, and the source of their samples."""
        assert cursor is not None, "the order is shardio's"
        assert split is not None, "the order is shardio's"
        source = SampleSource(dataset=self.dataset, decoder=self.dataset.dataset.decoder, epoch=cursor.epoch)
        return self._plan(cursor, split), source

    def _plan(self, cursor: Cursor, split: Split) -> Iterator[BatchPlan]:
        for positions, indices in self._order.steps(cursor, split):
            valid = np.concatenate(positions) < split.num_samples if split.remainder == "mask" else None
            rng_keys, replacement_rng_keys = self.dataset.rng_keys(self._order.seed, cursor.epoch, indices)
            plans = BatchPlan(
                indices=indices, rng_keys=rng_keys, replacement_rng_keys=replacement_rng_keys, valid=valid
            )
            stop = 0
            for batch in positions:
                start, stop = stop, stop + len(batch)
                yield plans.take(slice(start, stop))


class SamplerPlanner:
    """A planner of the batches that a batch sampler yields.

    Args:
        dataset: The loader's dataset, which is map-style.
        batch_sampler: Yields lists of indices.
        generator: Seeds the rng keys if the dataset's epoch is not known; None for torch's global generator.
        keeps_seed: Whether all epochs share one seed, as with torch's persistent workers.
    """

    def __init__(
        self,
        dataset: Unwrapped,
        batch_sampler: Iterable[list[int]],
        generator: torch.Generator | None,
        *,
        keeps_seed: bool,
    ) -> None:
        self.dataset, self._batch_sampler = dataset, batch_sampler
        self._generator, self._keeps_seed = generator, keeps_seed
        self._seed: int | None = None
        self._num_epochs = 0

    def plan(self, cursor: Cursor | None, split: Split | None) -> tuple[Iterator[BatchPlan], SampleSource]:
        """Return the plans of an epoch's batches, and the source of their samples.

        Raises:
            IndexError: By the iterator, if a batch is empty or an index is out of range.
        """
        if self._seed is None or not self._keeps_seed:
            # torch's iterators also begin with this draw, but only once for persistent workers.
            word = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._generator)
            self._seed, self._num_epochs = int(word.item()), 0
        base_rng_key = make_rng_key(self._seed, self._num_epochs, "draws")
        self._num_epochs += 1
        inner = self.dataset.dataset
        known: tuple[int, int] | None = inner.map_epoch.known
        source = SampleSource(dataset=self.dataset, decoder=inner.decoder, epoch=None if known is None else known[1])
        return self._plan(base_rng_key, known), source

    def _plan(self, base_rng_key: Words, known: tuple[int, int] | None) -> Iterator[BatchPlan]:
        num_samples = len(self.dataset)
        num_planned = 0
        num_returned = np.zeros(num_samples if known else 0, np.uint32)
        for batch in self._batch_sampler:
            indices = check_indices(batch, num_samples)
            if not len(indices):
                raise IndexError("the batch sampler yielded an empty batch: it must not yield batches without indices")
            if known is None:
                counters = np.arange(num_planned, num_planned + len(indices), dtype=np.uint64)
                rng_keys = replacement_rng_keys = derive_rng_key(base_rng_key, counters)
            else:
                repetitions = _count_repetitions(num_returned, indices)
                rng_keys, replacement_rng_keys = self.dataset.rng_keys(*known, indices, repetitions)
            num_planned += len(indices)
            yield BatchPlan(indices=indices, rng_keys=rng_keys, replacement_rng_keys=replacement_rng_keys)


def repeat_error(error: Exception) -> Iterator[BatchPlan]:
    """Return an iterator that raises the error of a failed sampler at every step."""
    return iter(partial(_raise, error), None)


def _raise(error: Exception) -> None:
    raise error


def _count_repetitions(num_returned: NDArray[np.uint32], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return how often each sample was returned before, including earlier in the batch; update the counts.

    Args:
        num_returned: uint32 [N], how often each sample of the dataset was returned; updated in place.
        indices: int64 [n], the batch.
    """
    order = np.argsort(indices, kind="stable")
    firsts = np.flatnonzero(np.diff(indices[order], prepend=-1))
    within = np.arange(len(indices)) - np.repeat(firsts, np.diff(firsts, append=len(indices)))
    repetitions = num_returned[indices].astype(np.uint64)
    repetitions[order] += within.astype(np.uint64)
    np.add.at(num_returned, indices, 1)
    return repetitions
