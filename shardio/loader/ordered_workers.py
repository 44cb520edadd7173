"""Executors that call the user's dataset, in shardio's order or in the one that torch's iterators give.

For shardio's order, an executor keeps an inner loader without that order as long as its workers live, and sets the
start of each epoch.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from shardio.bad_samples import BadSamples, Broken, Skipped, read_around, read_samples
from shardio.datasets import EpochSampler, MapDataset, ShardDataset, Unwrapped, known_epoch, mark_valid, unwrap
from shardio.images import use_one_thread
from shardio.loader.any_dataset import FetchedBatches, Fetching, can_fetch, starts_threads
from shardio.loader.batch_plans import SamplerPlanner, SamplerProgress
from shardio.loader.collate import CollateKept
from shardio.loader.epochs import Epochs
from shardio.loader.executor import BatchIterator, Executor, ExecutorSettings, TorchDataLoader
from shardio.loader.stats import LoaderStats, Tally
from shardio.loader.wire import Failure
from shardio.order import Cursor, Split, Words
from shardio.process import is_interruption, let_through, no_end
from shardio.world import World


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """A ``worker_init_fn`` that makes each worker resize images in one thread, because workers run in parallel.

    Attributes:
        init_fn: The user's ``worker_init_fn``.
    """

    init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        use_one_thread()
        if self.init_fn is not None:
            self.init_fn(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The settings of inner loaders, except for their datasets and samplers.

    Attributes:
        settings: The settings of the user's loader.
    """

    settings: ExecutorSettings

    @property
    def is_batched(self) -> bool:
        """Whether the loader makes batches, instead of single samples."""
        return self.settings.batch_size is not None

    def make_loader(self, dataset: Any, **options: Any) -> torch.utils.data.DataLoader[Any]:
        """Return an inner loader.

        Args:
            dataset: Its dataset.
            options: Further arguments of torch's DataLoader.
        """
        settings = self.settings
        given: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "num_workers": settings.num_workers,
            "collate_fn": CollateKept(settings.collate_fn, is_batched=self.is_batched),
            "pin_memory": settings.pin_memory,
            "timeout": settings.timeout_s,
            "worker_init_fn": WorkerInit(settings.worker_init_fn),
            "multiprocessing_context": settings.multiprocessing_context,
            "generator": settings.generator,
            "prefetch_factor": settings.prefetch_factor,
            "persistent_workers": settings.persistent_workers,
            "pin_memory_device": settings.pin_memory_device,
        }
        return TorchDataLoader(dataset, **{**given, **options})


class TorchBatches:
    """The batches of one of torch's iterators.

    Args:
        batches: torch's iterator.
        forget: Releases torch's iterator if its workers persist.
    """

    def __init__(self, batches: _BaseDataLoaderIter, forget: Callable[[], None]) -> None:
        self._batches: _BaseDataLoaderIter | None = batches
        self._forget = forget
        self._latest = weakref.ref(batches)

    @property
    def members(self) -> Sequence[Any]:
        """The worker processes."""
        return getattr(self._latest(), "_workers", ())

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead."""
        assert self._batches is not None, "it was not closed"
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            raise
        except Exception as error:
            if not _is_of_a_batch(error) or is_interruption(error):  # Only an error in one batch is not the end.
                raise
            return Failure(error=error)
        return batch

    def is_ready(self, timeout_s: float) -> bool:
        """Return True, because torch's iterator does not say."""
        return True

    def close(self) -> None:
        """Release the workers, unless they persist for the next epoch."""
        self._batches = None

    def end_workers(self) -> None:
        """End the workers, also those that persist."""
        self.close()
        self._forget()  # torch's iterator ends them when its last reference goes.


def _is_of_a_batch(error: Exception) -> bool:
    """Return whether an error of torch's iterator comes from one batch, not from the sampler or a dead worker."""
    functions = (ExceptionWrapper.reraise, _MapDatasetFetcher.fetch, _IterableDatasetFetcher.fetch)
    of_batches = {function.__code__ for function in functions}
    return any(frame.f_code in of_batches for frame, _ in traceback.walk_tb(error.__traceback__))


class TorchLoader:
    """An executor that iterates a loader as torch's DataLoader does, in its sampler's or its dataset's own order.

    Args:
        loader: The loader, which owns this executor.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)  # Weak: workers end as soon as the loader is released.
        self._persistent: _BaseDataLoaderIter | None = None

    def start(self, cursor: Cursor | None, split: Split | None) -> TorchBatches:
        """Begin an epoch and return its batches."""
        loader: Any = self._loader()
        assert loader is not None, "the loader owns this executor"
        # torch's loader does the same, but a subclass may override its methods.
        with _endless_collate(loader):
            if (iterator := self._persistent) is not None:
                iterator._reset(loader)
            else:
                kind = _MultiProcessingDataLoaderIter if loader.num_workers else _SingleProcessDataLoaderIter
                iterator = kind(loader)
        self._persistent = iterator if loader.persistent_workers else None
        return TorchBatches(iterator, self._forget)

    def start_workers(self) -> None:
        """Do nothing: torch starts its workers when the epoch begins."""

    def stats(self) -> None:
        """Return None, because torch does not time the stages."""
        return

    def _forget(self) -> None:
        self._persistent = None


@dataclass(frozen=True, slots=True)
class CollateEndless:
    """A collate function that raises RuntimeError if the user's function raises StopIteration.

    Attributes:
        collate: The user's function.
    """

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except StopIteration as error:
            raise no_end(error) from error


@contextmanager
def _endless_collate(loader: Any) -> Iterator[None]:
    collate_fn = loader.collate_fn
    loader.collate_fn = CollateEndless(collate_fn)
    try:
        yield
    finally:
        loader.collate_fn = collate_fn


class OrderedWorkers:
    """The base class of executors in shardio's order. It keeps the executor of an inner loader.

    Args:
        options: The settings of the inner loader.
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
            # The order has the state, so the state of the dataset is not needed.
            self._inner = Fetching(loader, Epochs(), method, 0) if can_fetch(loader, method) else TorchLoader(loader)
        self._loader = loader
        return OrderedBatches(self._inner.start(None, None), self._bad_samples, cursor.epoch)


class OrderedBatches:
    """The batches of an epoch, with a warning of unreadable samples at the end.

    Args:
        batches: The batches of the inner loader.
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
    """The sampler of the inner loader, which yields an epoch of an EpochSampler from a cursor to the end."""

    def __init__(self, sampler: EpochSampler, *, is_batched: bool) -> None:
        self._sampler, self._is_batched = sampler, is_batched
        self._batches: Iterator[list[_Request]] = iter(())

    def begin(self, cursor: Cursor, split: Split) -> None:
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
    """Unwrap a dataset if the one inside takes rng keys. Any other dataset is read as in torch."""
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


class SampledExecutor:
    """An executor whose batches count when the user receives them.

    Args:
        executor: Makes the batches.
        planner: Its planner.
    """

    def __init__(self, executor: Executor, planner: SamplerPlanner) -> None:
        self._executor, self._planner = executor, planner

    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        """Begin an epoch and return its batches."""
        batches = self._executor.start(cursor, split)
        assert self._planner.counted is not None, "the executor has planned an epoch"
        return SampledBatches(batches, self._planner.counted)

    def start_workers(self) -> None:
        """Start the workers of the next epoch now."""
        self._executor.start_workers()

    def stats(self) -> LoaderStats | None:
        """Return the statistics of the latest epoch."""
        return self._executor.stats()


class SampledBatches:
    """The batches of one epoch.

    Args:
        batches: The batches, in their order.
        progress: Counts them.
    """

    def __init__(self, batches: BatchIterator, progress: SamplerProgress) -> None:
        self._batches, self._progress = batches, progress
        self._has_failed = False

    @property
    def indices(self) -> Iterator[Any]:
        """The indices that the sampler still yields."""
        return self._progress.indices

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead."""
        if self._has_failed:  # A failed batch counts when the next one is requested.
            self._progress.count_one()
        try:
            made = next(self._batches)
        except StopIteration:
            self._progress.finish()
            raise
        self._has_failed = isinstance(made, Failure)
        if not self._has_failed:
            self._progress.count_one()
        return made

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is there."""
        return self._batches.is_ready(timeout_s)

    @property
    def members(self) -> Sequence[Any]:
        """The workers."""
        return self._batches.members

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead."""
        self._batches.close()

    def end_workers(self) -> None:
        """End the workers, also those that persist."""
        self._batches.end_workers()
