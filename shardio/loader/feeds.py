"""Feeds: how an epoch's batches come out of torch's worker processes, for each of the two that hold an order.

A feed keeps a plain loader of torch's, which lives as long as its workers do, and tells it where to begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data

from shardio.datasets import EpochSampler, ShardDataset
from shardio.order import Cursor, EpochCounter, OrderSettings, Remainder, Split
from shardio.world import World


class ShardFeed:
    """Feeds a ShardDataset: its copies in the workers compute their batches themselves."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._counter = EpochCounter()
        self._num_epoch_sets = dataset.num_epoch_sets
        self._world: World | None = None
        self._bound: ShardDataset | None = None
        self._workers: torch.utils.data.DataLoader[Any] | None = None

    @property
    def settings(self) -> OrderSettings:
        return self._dataset.settings

    @property
    def digest(self) -> str:
        return self._dataset.digest

    @property
    def num_samples(self) -> int:
        return self._dataset.num_samples

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user told the order, if any."""
        return self._dataset.batch_size

    @property
    def remainder(self) -> Remainder:
        return self._dataset.remainder

    @property
    def counter(self) -> EpochCounter:
        """What decides on the next epoch. It heeds ``set_epoch`` of the dataset, which may serve several loaders."""
        if self._dataset.num_epoch_sets != self._num_epoch_sets:
            self._num_epoch_sets = self._dataset.num_epoch_sets
            self._counter.set_epoch(self._dataset.epoch)
        return self._counter

    def split(self, cursor: Cursor, *, batch_size: int, remainder: Remainder) -> Split:
        return self._dataset.split(cursor, batch_size=batch_size, remainder=remainder)

    def start(self, cursor: Cursor, split: Split, options: Mapping[str, Any]) -> Iterator[Any]:
        """Start an epoch; return its batches. ``options`` are the arguments for torch's loader."""
        world = World(rank=split.rank, world_size=split.world_size)
        if self._bound is None or not options["persistent_workers"] or world != self._world:
            self._world, self._bound = world, self._dataset.bound(split)
            self._workers = torch.utils.data.DataLoader(self._bound, **options)
        self._bound.start_at(cursor)
        assert self._workers is not None, "made with the bound dataset"
        return iter(self._workers)


class SamplerFeed:
    """Feeds a map-style dataset in the order of an EpochSampler, which runs in this process."""

    def __init__(self, dataset: Any, sampler: EpochSampler) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._indices = _Indices(sampler)
        self._workers: torch.utils.data.DataLoader[Any] | None = None

    @property
    def settings(self) -> OrderSettings:
        return self._sampler.settings

    @property
    def digest(self) -> str:
        return self._sampler.digest

    @property
    def num_samples(self) -> int:
        return self._sampler.num_all_samples

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user told the order, if any."""
        return self._sampler.batch_size

    @property
    def remainder(self) -> Remainder:
        return self._sampler.remainder

    @property
    def counter(self) -> EpochCounter:
        """What decides on the next epoch: the sampler's own counter, so that its ``set_epoch`` counts too."""
        return self._sampler.counter

    def split(self, cursor: Cursor, *, batch_size: int, remainder: Remainder) -> Split:
        return self._sampler.split(cursor, batch_size=batch_size, remainder=remainder)

    def start(self, cursor: Cursor, split: Split, options: Mapping[str, Any]) -> Iterator[Any]:
        """Start an epoch; return its batches. ``options`` are the arguments for torch's loader."""
        self._indices.begin(cursor, split, is_batched=options["batch_size"] is not None)
        if self._workers is None or not options["persistent_workers"]:
            unbatched = options["batch_size"] is None
            indices = {"sampler": self._indices} if unbatched else {"batch_size": 1, "batch_sampler": self._indices}
            self._workers = torch.utils.data.DataLoader(self._dataset, **{**options, **indices})
        batches = iter(self._workers)
        return self._with_valid(batches, split) if split.remainder == "mask" else batches

    def _with_valid(self, batches: Iterator[Any], split: Split) -> Iterator[Any]:
        for step, batch in enumerate(batches):
            valid = torch.from_numpy(split.batch(step) < split.num_samples)
            if isinstance(batch, dict):
                yield {**batch, "valid": valid}
            elif isinstance(batch, list | tuple):
                yield [*batch, valid]
            else:
                yield [batch, valid]


class _Indices:
    """The sampler that torch's loader gets: one epoch of an EpochSampler, from where it begins."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._batches: Iterator[list[int]] = iter(())
        self._is_batched = True

    def begin(self, cursor: Cursor, split: Split, *, is_batched: bool) -> None:
        """Say what the next iteration is."""
        self._batches = self._sampler.batches(cursor, split)
        self._is_batched = is_batched

    def __iter__(self) -> Iterator[Any]:
        return self._batches if self._is_batched else itertools.chain.from_iterable(self._batches)
