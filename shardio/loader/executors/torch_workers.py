"""Executors that run the user's code in torch's workers, in shardio's order.

Each executor keeps one of torch's loaders as long as its workers live, and sets where its next epoch begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from shardio.bad_samples import BadSamples, Broken, Skipped, read_around
from shardio.datasets import (
    EpochSampler,
    MapDataset,
    ShardDataset,
    Unwrapped,
    known_epoch,
    mark_valid,
    unwrap,
)
from shardio.errors import SampleError
from shardio.interruptions import let_through
from shardio.loader.executors.torch_batches import TorchBatches
from shardio.order import Cursor, Split, Words
from shardio.world import World


class TorchWorkers:
    """The base class of these executors. It keeps one of torch's loaders, whose workers may persist.

    Args:
        options: The arguments of torch's loader: see :mod:`shardio.loader.executors.torch_options`.
        bad_samples: The policy for unreadable samples; None raises their errors.
    """

    def __init__(self, options: Mapping[str, Any], bad_samples: BadSamples | None) -> None:
        self._options, self._bad_samples = options, bad_samples
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    def start_workers(self) -> None:
        """Do nothing: torch starts its workers when the epoch begins."""

    def stats(self) -> None:
        """Return None, because torch's workers do not time their stages."""
        return

    def _start(self, cursor: Cursor, loader: torch.utils.data.DataLoader[Any], *, is_new: bool) -> TorchBatches:
        if self._bad_samples is not None:
            self._bad_samples.begin_count(self._options["num_workers"], are_new=is_new)
        self._loader = loader
        return TorchBatches(iter(loader), self._bad_samples, cursor.epoch)


class ShardTorchWorkers(TorchWorkers):
    """An executor for a ShardDataset, whose copies in the workers compute their own batches.

    Args:
        dataset: The dataset.
        options: As for :class:`TorchWorkers`.
        bad_samples: As for :class:`TorchWorkers`.
    """

    def __init__(self, dataset: ShardDataset, options: Mapping[str, Any], bad_samples: BadSamples | None) -> None:
        super().__init__(options, bad_samples)
        self._dataset = dataset
        self._world: World | None = None
        self._bound: ShardDataset | None = None

    def start(self, cursor: Cursor | None, split: Split | None) -> TorchBatches:
        """Begin an epoch and return its batches."""
        assert cursor is not None, "a ShardDataset has an order"
        assert split is not None, "a ShardDataset has an order"
        world = World(rank=split.rank, world_size=split.world_size)
        loader, bound = self._loader, self._bound
        is_new = loader is None or bound is None or not self._options["persistent_workers"] or world != self._world
        if loader is None or bound is None or is_new:
            bound = self._dataset.bound(split, self._bad_samples)
            loader = torch.utils.data.DataLoader(bound, **self._options)
            self._world, self._bound = world, bound
        bound.start_at(cursor)
        return self._start(cursor, loader, is_new=is_new)


class IndexTorchWorkers(TorchWorkers):
    """An executor for a map-style dataset and an EpochSampler, which runs in the training process.

    Args:
        dataset: The dataset.
        sampler: The sampler.
        options: As for :class:`TorchWorkers`.
        bad_samples: As for :class:`TorchWorkers`.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: EpochSampler,
        options: Mapping[str, Any],
        bad_samples: BadSamples | None,
    ) -> None:
        super().__init__(options, bad_samples)
        self._dataset = _RequestDataset(dataset, bad_samples)
        self._requests = _RequestSampler(sampler, is_batched=options["batch_size"] is not None)

    def start(self, cursor: Cursor | None, split: Split | None) -> TorchBatches:
        """Begin an epoch and return its batches."""
        assert cursor is not None, "an EpochSampler has an order"
        assert split is not None, "an EpochSampler has an order"
        self._requests.begin(cursor, split)
        loader = self._loader
        is_new = loader is None or not self._options["persistent_workers"]
        if loader is None or is_new:
            is_batched = self._options["batch_size"] is not None
            requests = {"batch_size": 1, "batch_sampler": self._requests} if is_batched else {"sampler": self._requests}
            loader = torch.utils.data.DataLoader(self._dataset, **{**self._options, **requests})
        return self._start(cursor, loader, is_new=is_new)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """An index, and its context for the worker. ``is_valid`` is None if samples are not marked."""

    index: int
    seed: int
    epoch: int
    is_valid: bool | None


class _RequestSampler:
    """The sampler of torch's loader: one epoch of an EpochSampler, from a cursor to the end."""

    def __init__(self, sampler: EpochSampler, *, is_batched: bool) -> None:
        self._sampler, self._is_batched = sampler, is_batched
        self._batches: Iterator[list[_Request]] = iter(())

    def begin(self, cursor: Cursor, split: Split) -> None:
        """Set what the next iteration yields."""
        self._batches = self._request(cursor, split)

    def __iter__(self) -> Iterator[Any]:
        return self._batches if self._is_batched else itertools.chain.from_iterable(self._batches)

    def _request(self, cursor: Cursor, split: Split) -> Iterator[list[_Request]]:
        is_marked, seed = split.remainder == "mask", self._sampler.seed
        for positions, indices in self._sampler.batches(cursor, split):
            valid = (positions < split.num_samples).tolist()
            yield [
                _Request(index=index, seed=seed, epoch=cursor.epoch, is_valid=is_valid if is_marked else None)
                for index, is_valid in zip(indices.tolist(), valid, strict=True)
            ]


class _RequestDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset that is read by requests."""

    def __init__(self, dataset: Any, bad_samples: BadSamples | None) -> None:
        self.dataset = dataset
        self._bad_samples = bad_samples

    def __getitem__(self, request: _Request) -> Any:
        return self.__getitems__([request])[0]

    def __getitems__(self, requests: list[_Request]) -> list[Any]:
        try:
            return self._read(requests)
        except Exception as error:
            let_through(error)
            return [Broken(error)]  # torch's loader must get a batch: an error would end its iterator, or not count.

    def _read(self, requests: list[_Request]) -> list[Any]:
        indices = np.array([request.index for request in requests])
        seed, epoch = requests[0].seed, requests[0].epoch
        dataset = _unwrap_readable(self.dataset)
        rng_keys, replacement_rng_keys = dataset.rng_keys(seed, epoch, indices)
        with known_epoch(seed, epoch):
            samples = read_around(
                self._bad_samples,
                partial(_read, dataset),
                indices,
                rng_keys,
                replacement_rng_keys,
                epoch=epoch,
                describe=dataset.describe if isinstance(dataset.dataset, MapDataset) else None,
            )
        return [
            sample if request.is_valid is None or isinstance(sample, Skipped) else mark_valid(sample, request.is_valid)
            for sample, request in zip(samples, requests, strict=True)
        ]


def _unwrap_readable(dataset: Any) -> Unwrapped:
    """Unwrap a dataset, if the one inside takes rng keys. Any other dataset is read as it is, as torch does."""
    unwrapped = unwrap(dataset)
    return unwrapped if _takes_rng_keys(unwrapped.dataset) else Unwrapped(dataset=dataset, subsets=())


def _takes_rng_keys(dataset: Any) -> bool:
    methods = ("__getitem__", "__getitems__")
    return isinstance(dataset, MapDataset) and all(
        getattr(type(dataset), name) is getattr(MapDataset, name) for name in methods
    )


def _read(unwrapped: Unwrapped, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
    dataset: Any = unwrapped.dataset
    if _takes_rng_keys(dataset):
        return list(dataset.read(unwrapped.inner_indices(indices), rng_keys))  # A replacement keeps the row's rng key.
    read_several = getattr(dataset, "__getitems__", None)
    try:
        return list(read_several(indices.tolist())) if callable(read_several) else [dataset[int(i)] for i in indices]
    except SampleError as error:
        if len(indices) == 1:
            raise error.at_row(0) from error
    # The error does not say which of these samples failed: read them one by one to find it.
    samples, row = list[Any](), 0
    try:
        for row in range(len(indices)):
            samples += _read(unwrapped, indices[row : row + 1], rng_keys[row : row + 1])
    except SampleError as error:
        raise error.at_row(row) from error
    return samples
