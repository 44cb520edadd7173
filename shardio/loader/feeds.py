"""Feeds: how an epoch's batches come out of torch's worker processes, for each of the two that hold an order.

A feed keeps a plain loader of torch's, which lives as long as its workers do, and tells it where to begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data

from shardio.datasets import EpochSampler, ShardDataset
from shardio.datasets.valid import mark_valid
from shardio.order import Cursor, EpochCounter, Split
from shardio.world import World


class ShardFeed:
    """Feeds a ShardDataset: its copies in the workers compute their batches themselves."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.source = dataset
        self._counter = EpochCounter()
        self._num_epoch_sets = 0
        self._world: World | None = None
        self._bound: ShardDataset | None = None
        self._workers: torch.utils.data.DataLoader[Any] | None = None

    @property
    def counter(self) -> EpochCounter:
        """What decides on the next epoch. It heeds ``set_epoch`` of the dataset, which may serve several loaders."""
        if self.source.num_epoch_sets != self._num_epoch_sets:
            self._num_epoch_sets = self.source.num_epoch_sets
            self._counter.set_epoch(self.source.epoch)
        return self._counter

    def start(self, cursor: Cursor, split: Split, options: Mapping[str, Any]) -> Iterator[Any]:
        """Start an epoch; return its batches. ``options`` are the arguments for torch's loader."""
        world = World(rank=split.rank, world_size=split.world_size)
        if self._bound is None or not options["persistent_workers"] or world != self._world:
            self._world, self._bound = world, self.source.bound(split)
            self._workers = torch.utils.data.DataLoader(self._bound, **options)
        self._bound.start_at(cursor)
        assert self._workers is not None, "made with the bound dataset"
        return iter(self._workers)


class SamplerFeed:
    """Feeds a map-style dataset in the order of an EpochSampler, which runs in this process."""

    def __init__(self, dataset: Any, sampler: EpochSampler) -> None:
        self._dataset = dataset
        self.source = sampler
        self._indices = _Indices(sampler)
        self._workers: torch.utils.data.DataLoader[Any] | None = None

    @property
    def counter(self) -> EpochCounter:
        """What decides on the next epoch: the sampler's own counter, so that its ``set_epoch`` counts too."""
        return self.source.counter

    def start(self, cursor: Cursor, split: Split, options: Mapping[str, Any]) -> Iterator[Any]:
        """Start an epoch; return its batches. ``options`` are the arguments for torch's loader."""
        is_batched = options["batch_size"] is not None
        self._indices.begin(cursor, split, is_batched=is_batched)
        if self._workers is None or not options["persistent_workers"]:
            dataset = _MarkedDataset(self._dataset) if split.remainder == "mask" else self._dataset
            indices = {"batch_size": 1, "batch_sampler": self._indices} if is_batched else {"sampler": self._indices}
            self._workers = torch.utils.data.DataLoader(dataset, **{**options, **indices})
        return iter(self._workers)


class _Indices:
    """The sampler that torch's loader gets: one epoch of an EpochSampler, from where it begins.

    With ``mask`` an index is a pair, (number, whether it counts).
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._batches: Iterator[list[Any]] = iter(())
        self._is_batched = True

    def begin(self, cursor: Cursor, split: Split, *, is_batched: bool) -> None:
        """Say what the next iteration is."""
        batches = self._sampler.batches(cursor, split)
        self._batches = self._mark(batches, split) if split.remainder == "mask" else batches
        self._is_batched = is_batched

    def __iter__(self) -> Iterator[Any]:
        return self._batches if self._is_batched else itertools.chain.from_iterable(self._batches)

    def _mark(self, batches: Iterator[list[int]], split: Split) -> Iterator[list[tuple[int, bool]]]:
        for step, batch in enumerate(batches):
            yield list(zip(batch, (split.batch(step) < split.num_samples).tolist(), strict=True))


class _MarkedDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose samples say whether they count: last in a tuple, or by the key ``valid``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: tuple[int, bool]) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[tuple[int, bool]]) -> list[Any]:
        numbers = [number for number, _ in indices]
        has_batches = callable(getattr(self.dataset, "__getitems__", None))
        samples = self.dataset.__getitems__(numbers) if has_batches else [self.dataset[number] for number in numbers]
        return [mark_valid(sample, is_valid) for sample, (_, is_valid) in zip(samples, indices, strict=True)]
