"""Executors that call the user's dataset in shardio's order.

Each executor keeps an inner loader without that order as long as its workers live, and sets where its next epoch
begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from shardio.bad_samples import BadSamples, Broken, Skipped, read_around, read_samples
from shardio.datasets import (
    EpochSampler,
    MapDataset,
    ShardDataset,
    Unwrapped,
    known_epoch,
    mark_valid,
    unwrap,
)
from shardio.interruptions import let_through
from shardio.loader.executors.fetching import FetchedBatches, Fetching, can_fetch, starts_threads
from shardio.loader.executors.torch_batches import TorchBatches
from shardio.loader.executors.torch_loader import TorchLoader
from shardio.loader.executors.worker_options import WorkerOptions
from shardio.loader.fetching.epochs import Epochs
from shardio.loader.stats import LoaderStats, Tally
from shardio.order import Cursor, Split, Words
from shardio.world import World


class OrderedWorkers:
    """The base class of these executors. It keeps the executor of an inner loader, whose workers may persist.

    Args:
        options: What the inner loader is made from.
        bad_samples: The policy for unreadable samples; None raises their errors.
    """

    def __init__(self, options: WorkerOptions, bad_samples: BadSamples | None) -> None:
        self._options, self._bad_samples = options, bad_samples
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        self._inner: Fetching | TorchLoader | None = None

    def start_workers(self) -> None:
        """Do nothing: the workers start when the epoch begins."""

    def stats(self) -> LoaderStats | None:
        """Return the statistics of the latest epoch; None if torch's workers made it."""
        if self._inner is None:
            return Tally(num_workers=self._options.settings.num_workers).sum_up()
        return self._inner.stats()

    def _start(self, cursor: Cursor, loader: torch.utils.data.DataLoader[Any]) -> OrderedBatches:
        is_new = loader is not self._loader
        if self._bad_samples is not None:
            self._bad_samples.begin_count(loader.num_workers, are_new=is_new)
        if self._inner is None or is_new:
            settings = self._options.settings
            method = "thread" if starts_threads(settings.multiprocessing_context) else settings.worker_method
            # The order has the state, so none of the dataset is needed.
            self._inner = Fetching(loader, Epochs(), method, 0) if can_fetch(loader, method) else TorchLoader(loader)
        self._loader = loader
        return OrderedBatches(self._inner.start(None, None), self._bad_samples, cursor.epoch)


class OrderedBatches:
    """The batches of an epoch, with a warning of unreadable samples at the end.

    Args:
        batches: Those of the inner loader.
        bad_samples: The policy for unreadable samples.
        epoch: The epoch.
    """

    def __init__(self, batches: FetchedBatches | TorchBatches, bad_samples: BadSamples | None, epoch: int) -> None:
        self._batches, self._bad_samples, self._epoch = batches, bad_samples, epoch

    @property
    def members(self) -> Sequence[Any]:
        """The workers."""
        return self._batches.members

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead."""
        try:
            return next(self._batches)
        except StopIteration:
            if self._bad_samples is not None:
                self._bad_samples.warn_of_counted(self._epoch)
            raise

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is there."""
        return self._batches.is_ready(timeout_s)

    def close(self) -> None:
        """End the epoch; drop batches that were fetched ahead."""
        self._batches.close()

    def end_workers(self) -> None:
        """End the workers, also those that persist."""
        self._batches.end_workers()


class ShardWorkers(OrderedWorkers):
    """An executor for a ShardDataset, whose copies in the workers compute their own batches.

    Args:
        dataset: The dataset.
        options: As for :class:`OrderedWorkers`.
        bad_samples: As for :class:`OrderedWorkers`.
    """

    def __init__(self, dataset: ShardDataset, options: WorkerOptions, bad_samples: BadSamples | None) -> None:
        super().__init__(options, bad_samples)
        self._dataset = dataset
        self._world: World | None = None
        self._bound: ShardDataset | None = None

    def start(self, cursor: Cursor | None, split: Split | None) -> OrderedBatches:
        """Begin an epoch and return its batches."""
        assert cursor is not None, "a ShardDataset has an order"
        assert split is not None, "a ShardDataset has an order"
        world = World(rank=split.rank, world_size=split.world_size)
        loader, bound = self._loader, self._bound
        if loader is None or bound is None or not loader.persistent_workers or world != self._world:
            bound = self._dataset.bound(split, self._bad_samples)
            loader = self._options.make_loader(bound)
            self._world, self._bound = world, bound
        bound.start_at(cursor)
        return self._start(cursor, loader)


class IndexWorkers(OrderedWorkers):
    """An executor for a map-style dataset and an EpochSampler, which runs in the training process.

    Args:
        dataset: The dataset.
        sampler: The sampler.
        options: As for :class:`OrderedWorkers`.
        bad_samples: As for :class:`OrderedWorkers`.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: EpochSampler,
        options: WorkerOptions,
        bad_samples: BadSamples | None,
    ) -> None:
        super().__init__(options, bad_samples)
        self._dataset = _RequestDataset(dataset, bad_samples)
        self._requests = _RequestSampler(sampler, is_batched=options.is_batched)

    def start(self, cursor: Cursor | None, split: Split | None) -> OrderedBatches:
        """Begin an epoch and return its batches."""
        assert cursor is not None, "an EpochSampler has an order"
        assert split is not None, "an EpochSampler has an order"
        self._requests.begin(cursor, split)
        loader = self._loader
        if loader is None or not loader.persistent_workers:
            batched = {"batch_size": 1, "batch_sampler": self._requests}
            requests = batched if self._options.is_batched else {"sampler": self._requests}
            loader = self._options.make_loader(self._dataset, **requests)
        return self._start(cursor, loader)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """An index, and its context for the worker. ``is_valid`` is None if samples are not marked."""

    index: int
    seed: int
    epoch: int
    is_valid: bool | None


class _RequestSampler:
    """The sampler of the inner loader: one epoch of an EpochSampler, from a cursor to the end."""

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
    return read_samples(dataset, indices)
