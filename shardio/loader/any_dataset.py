"""Executors that call any dataset and collate its samples as torch's DataLoader does.

:class:`Fetching` makes batches in shardio's workers or the calling process, in the order of a sampler or in shardio's
order. For other loaders, torch's own iterators make the batches.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from shardio.bad_samples import BadSamples
from shardio.datasets import Iterated, Ordered, ShardDataset
from shardio.errors import find_user_level
from shardio.loader.executor import BatchIterator, Executor, ExecutorSettings, TorchDataLoader
from shardio.loader.fetch_job import DatasetEndError, FetchJob, OrderedIndices, WorkerInit, is_iterable, make_fetcher
from shardio.loader.fetch_pool import FetchProcesses, FetchThreads, FetchWorkers
from shardio.loader.fetched_batches import CallerBatches, WorkerBatches
from shardio.loader.sampler_epochs import Epochs, Indices, draw_seed
from shardio.loader.saved_state import EpochPosition
from shardio.loader.statistics import Tally
from shardio.loader.wire import Failure, describe_failure
from shardio.order import Cursor, Split
from shardio.process import is_interruption, let_through, no_end
from shardio.values import count
from shardio.world import World, is_torch_worker


def starts_threads(context: Any) -> bool:
    """Return whether a multiprocessing context starts threads instead of processes, as some libraries' contexts do."""
    kind = getattr(context, "Process", BaseProcess)
    return not (isinstance(kind, type) and issubclass(kind, BaseProcess))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedEpoch:
    """A new epoch of any dataset.

    Attributes:
        job: The settings that the workers need.
        position: The position at which the epoch begins, updated with each batch that the user receives.
        indices: The indices of each batch.
        length: The number of batches that the loader announced; None if there is no number to check.
    """

    job: FetchJob
    position: EpochPosition
    indices: Indices
    length: int | None = None


class FetchSource(ABC):
    """The source of the batches that a loader's workers fetch: the dataset to call, and the indices of each batch."""

    def needs_new_workers(self, split: Split | None) -> bool:
        """Return whether the next epoch cannot use the persistent workers."""
        return False

    @abstractmethod
    def begin(self, cursor: Cursor | None, split: Split | None, *, has_new_workers: bool) -> FetchedEpoch:
        """Begin the next epoch, as Executor.start does. ``has_new_workers`` is true if there are no workers."""

    @abstractmethod
    def find_loader(self, cursor: Cursor | None, split: Split | None) -> Any:
        """Return the loader whose torch iterator runs the next epoch: the same loader as long as workers persist."""

    def watch(self, batches: CallerBatches | WorkerBatches) -> None:  # noqa: B027  # Not all sources have a state.
        """Register the running epoch's batches, by weak reference, so that they can be queried for a state."""


class SamplerSource(FetchSource):
    """A source of batches in the order of a sampler, or of an iterable dataset.

    Args:
        loader: The loader, which owns this object.
        epochs: The positions at which the loader's epochs begin.
        bad_samples: The policy for samples that raise errors; None raises the errors.
    """

    def __init__(self, loader: Any, epochs: Epochs, bad_samples: BadSamples | None) -> None:
        self._loader = weakref.ref(loader)  # A weak reference, so that workers end when the loader is released.
        self._epochs, self._bad_samples = epochs, bad_samples

    def needs_new_workers(self, split: Split | None) -> bool:
        return self._epochs.resumes

    def begin(self, cursor: Cursor | None, split: Split | None, *, has_new_workers: bool) -> FetchedEpoch:
        loader = self.find_loader(cursor, split)
        job = FetchJob(
            dataset=loader.dataset,
            is_iterable=is_iterable(loader),
            is_batched=loader._auto_collation,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            num_workers=loader.num_workers,
            bad_samples=self._bad_samples,
        )
        position, indices = self._epochs.begin(loader, has_new_workers=has_new_workers)
        _warn_of_skipping(loader, position)
        length = loader._IterableDataset_len_called if job.is_iterable else None
        return FetchedEpoch(job=job, position=position, indices=indices, length=length)

    def find_loader(self, cursor: Cursor | None, split: Split | None) -> Any:
        loader = self._loader()
        assert loader is not None, "the loader owns this object"
        return loader

    def watch(self, batches: CallerBatches | WorkerBatches) -> None:
        self._epochs.watch(batches)


class OrderSource(FetchSource):
    """A source of batches in shardio's order. Copies of a ShardDataset compute their own batches.

    Args:
        settings: The settings of the loader.
        ordered: The dataset or sampler that holds the order.
        bad_samples: The policy for unreadable samples; None raises their errors.
    """

    def __init__(self, settings: ExecutorSettings, ordered: Ordered, bad_samples: BadSamples | None) -> None:
        self._settings, self._ordered, self._bad_samples = settings, ordered, bad_samples
        self._job: FetchJob | None = None
        self._world: World | None = None
        self._base_seed: int | None = None
        self._loader: Any = None
        self._sampler = _LatestIndices()

    def needs_new_workers(self, split: Split | None) -> bool:
        return isinstance(self._ordered, ShardDataset) and self._world != _find_world(split)

    def begin(self, cursor: Cursor | None, split: Split | None, *, has_new_workers: bool) -> FetchedEpoch:
        num_workers = self._settings.num_workers
        job, indices = self._begin(cursor, split, is_new=has_new_workers)
        position = EpochPosition.begin(num_workers, is_iterable=job.is_iterable, random_states=None)
        if has_new_workers:
            self._base_seed = draw_seed(self._settings.generator)
        position.base_seed = self._base_seed
        return FetchedEpoch(job=job, position=position, indices=Indices(indices, None))

    def find_loader(self, cursor: Cursor | None, split: Split | None) -> Any:
        settings, is_new = self._settings, not self._settings.persistent_workers or self.needs_new_workers(split)
        is_new = is_new or self._loader is None
        job, self._sampler.indices = self._begin(cursor, split, is_new=is_new)
        if is_new:
            self._loader = TorchDataLoader(
                _CollatedStream(job) if job.is_iterable else _CollatedItems(job),
                batch_size=None,
                sampler=None if job.is_iterable else self._sampler,
                num_workers=settings.num_workers,
                collate_fn=_keep,
                pin_memory=settings.pin_memory,
                timeout=settings.timeout_s,
                worker_init_fn=job.worker_init_fn,
                multiprocessing_context=settings.multiprocessing_context,
                generator=settings.generator,
                prefetch_factor=settings.prefetch_factor,
                persistent_workers=settings.persistent_workers,
                pin_memory_device=settings.pin_memory_device,
            )
        return self._loader

    def _begin(self, cursor: Cursor | None, split: Split | None, *, is_new: bool) -> tuple[FetchJob, Iterator[Any]]:
        assert cursor is not None, "there is an order"
        assert split is not None, "there is an order"
        settings, ordered = self._settings, self._ordered
        if is_new or self._job is None:
            self._world = _find_world(split)
            is_iterable = isinstance(ordered, ShardDataset)
            self._job = FetchJob(
                dataset=(
                    ordered.bound(split, self._bad_samples)
                    if isinstance(ordered, ShardDataset)
                    else settings.dataset.joined
                    if isinstance(settings.dataset, Iterated)
                    else settings.dataset
                ),
                is_iterable=is_iterable,
                is_batched=settings.batch_size is not None,
                batch_size=settings.batch_size,
                drop_last=False,
                collate_fn=settings.collate_fn,
                worker_init_fn=WorkerInit(settings.worker_init_fn),
                num_workers=settings.num_workers,
                bad_samples=None if is_iterable else self._bad_samples,
                keeps_state=False,
            )
        job = self._job
        if job.is_iterable:
            job.dataset.start_at(cursor)
            return job, itertools.repeat([None] * (job.batch_size or 1))
        return job, self._list_batches(cursor, split)

    def _list_batches(self, cursor: Cursor, split: Split) -> Iterator[OrderedIndices]:
        for positions, indices in self._ordered.batches(cursor, split):
            yield OrderedIndices(
                indices=indices, seed=self._ordered.seed, epoch=cursor.epoch, valid=split.find_valid(positions)
            )


def _find_world(split: Split | None) -> World | None:
    return None if split is None else World(rank=split.rank, world_size=split.world_size)


class Fetching(Executor):
    """An executor that gets samples from the user's dataset and collates them with the loader's ``collate_fn``.

    Args:
        settings: The settings of the loader.
        source: The source of the batches.
        bad_samples: The policy for samples that raise errors; None raises the errors.
    """

    def __init__(self, settings: ExecutorSettings, source: FetchSource, bad_samples: BadSamples | None) -> None:
        self._settings, self._source, self._bad_samples = settings, source, bad_samples
        self.tally = Tally(num_workers=settings.num_workers)
        self._task_ids = itertools.count()
        self._persistent: _PersistentBatches | None = None

    def start(self, cursor: Cursor | None, split: Split | None) -> FetchedBatches:
        settings = self._settings
        _warn_of_pinning(settings)
        workers = self._find_workers(split) if settings.num_workers else None
        if self._bad_samples is not None:
            self._bad_samples.begin_count(settings.num_workers, are_new=workers is None)
        epoch = self._source.begin(cursor, split, has_new_workers=workers is None)
        job, position = epoch.job, epoch.position
        names = [getattr(each, "__qualname__", type(each).__name__) for each in (job.dataset, job.collate_fn)]
        self.tally = Tally(num_workers=job.num_workers, bad_samples=self._bad_samples, in_python=tuple(names))
        number = None if cursor is None else cursor.epoch
        if not settings.num_workers:
            in_caller = CallerBatches(job, epoch.indices, position, self.tally)
            self._source.watch(in_caller)
            return FetchedBatches(in_caller, settings, epoch, self._bad_samples, number)
        if workers is None:
            assert position.base_seed is not None, "a seed is drawn whenever workers start"
            workers = self._start_workers(job, position.base_seed)
        batches = WorkerBatches(
            workers,
            epoch.indices,
            position,
            self._task_ids,
            self.tally,
            in_order=settings.in_order,
            timeout_s=settings.timeout_s,
            # A map-style dataset reports its state after each batch, because it cannot skip batches to resume.
            state_every=-(-settings.snapshot_every_n_steps // settings.num_workers) if position.is_iterable else 1,
            closes_workers=not settings.persistent_workers,
        )
        if job.is_stateful:
            batches.await_workers(raises=True)
        for _ in range(position.num_to_replay):
            next(batches)
        self._source.watch(batches)
        if not settings.persistent_workers:
            return FetchedBatches(batches, settings, epoch, self._bad_samples, number)
        if self._persistent is None or self._persistent.workers is not workers:
            self._persistent = _PersistentBatches(batches)
        else:
            self._persistent.batches = batches
        return FetchedBatches(self._persistent, settings, epoch, self._bad_samples, number)

    def _find_workers(self, split: Split | None) -> FetchWorkers | None:
        persistent = self._persistent
        if persistent is not None and not persistent.workers.belongs_here:
            self._persistent = None  # This process is a fork of the process that owns the workers.
            return None
        if persistent is None or not persistent.is_open or self._source.needs_new_workers(split):
            if persistent is not None:
                persistent.end_workers()
            self._persistent = None
            return None
        persistent.batches.close()
        return persistent.workers

    def _start_workers(self, job: FetchJob, base_seed: int) -> FetchWorkers:
        settings = self._settings
        max_tasks = (settings.prefetch_factor or 1) * settings.num_workers
        if settings.worker_method == "thread" or starts_threads(settings.multiprocessing_context):
            return FetchThreads(job, base_seed, max_tasks)
        context = settings.multiprocessing_context or torch.multiprocessing
        return FetchProcesses(job, base_seed, context, max_tasks)


class FetchedBatches(BatchIterator):
    """An iterator over one epoch's batches that pins them if requested, and warns of bad samples or a wrong length.

    Args:
        batches: The source of the batches.
        settings: The settings of the loader.
        epoch: The epoch.
        bad_samples: The policy for samples that raise errors.
        number: The epoch's number, if the order is shardio's.
    """

    def __init__(
        self,
        batches: CallerBatches | WorkerBatches | _PersistentBatches,
        settings: ExecutorSettings,
        epoch: FetchedEpoch,
        bad_samples: BadSamples | None,
        number: int | None,
    ) -> None:
        self._batches, self._bad_samples, self._number = batches, bad_samples, number
        self._pins = settings.pin_memory and torch.accelerator.is_available()
        self._dataset, self._length = settings.dataset, epoch.length
        self._num_workers, self._num_yielded = settings.num_workers, 0
        # Tools that read profiles look for torch's name.
        kind = "_MultiProcessing" if settings.num_workers else "_SingleProcess"
        self._profile_name = f"enumerate(DataLoader)#{kind}DataLoaderIter.__next__"

    @property
    def members(self) -> Sequence[Any]:
        return self._batches.members

    @property
    def indices(self) -> Iterator[Any]:
        return self._batches.indices

    def __next__(self) -> Any:
        with torch.autograd.profiler.record_function(self._profile_name):
            try:
                batch = next(self._batches)
            except StopIteration:
                if self._bad_samples is not None:
                    self._bad_samples.warn_of_counted(self._number)
                raise
            if isinstance(batch, Failure):
                return batch
            if self._pins:
                try:
                    batch = pin_memory(batch)
                except Exception as error:
                    let_through(error)
                    return Failure(error=error)
        self._num_yielded += 1
        if self._length is not None and self._num_yielded > self._length:
            self._warn()
        return batch

    def is_ready(self, timeout_s: float) -> bool:
        return self._batches.is_ready(timeout_s)

    def close(self) -> None:
        self._batches.close()

    def end_workers(self) -> None:
        self._batches.end_workers()

    def _warn(self) -> None:
        said = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._length} (when accessing "
            f"len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self._num_workers:
            said += (
                "The cause may be that each worker yields the whole dataset: its __iter__ must call get_worker_info() "
                "and yield only the worker's part"
            )
        warnings.warn(said, UserWarning, stacklevel=find_user_level())


class _PersistentBatches(BatchIterator):
    """The latest batches of persistent workers. As in torch, all iterators of the loader share these batches."""

    def __init__(self, batches: WorkerBatches) -> None:
        self.batches, self.workers = batches, batches.workers
        self.is_open = True

    @property
    def members(self) -> Sequence[Any]:
        return self.workers.members

    @property
    def indices(self) -> Iterator[Any]:
        return self.batches.indices

    def __next__(self) -> Any:
        return next(self.batches)

    def is_ready(self, timeout_s: float) -> bool:
        return self.batches.is_ready(timeout_s)

    def close(self) -> None:
        """End the workers if the epoch is not over, because an answer may have been lost when an error occurred."""
        if self.batches.is_open:
            self.end_workers()

    def end_workers(self) -> None:
        self.is_open = False
        self.batches.close()
        self.workers.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.is_open and not is_exiting():
            self.end_workers()


def _warn_of_skipping(loader: Any, position: EpochPosition) -> None:
    num_batches = sum(worker.num_since for worker in position.workers if worker.state is None)
    if position.is_iterable and num_batches:
        name = type(loader.dataset).__name__
        warnings.warn(
            f"{name} has no state_dict, so resuming reads its first {count(num_batches, 'batch', 'batches')} again, "
            f"without delivering the samples: give {name} or its iterator the methods state_dict and load_state_dict "
            "to resume directly",
            RuntimeWarning,
            stacklevel=find_user_level(),
        )


def _warn_of_pinning(settings: ExecutorSettings) -> None:
    if settings.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
            "used.",
            UserWarning,
            stacklevel=find_user_level(),
        )


class TorchIterators(Executor):
    """An executor that runs torch's own iterators, for loaders that :class:`Fetching` does not support.

    Args:
        source: The source of the batches.
        settings: The settings of the loader.
        bad_samples: The policy for unreadable samples; None raises their errors.
    """

    def __init__(self, settings: ExecutorSettings, source: FetchSource, bad_samples: BadSamples | None) -> None:
        self._settings, self._source, self._bad_samples = settings, source, bad_samples
        self._persistent: _BaseDataLoaderIter | None = None
        self._latest: weakref.ref[Any] | None = None  # The loader of the latest epoch, which may own this executor.

    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        if self._bad_samples is not None:
            self._bad_samples.begin_count(self._settings.num_workers, are_new=self._persistent is None)
        loader = self._source.find_loader(cursor, split)
        # torch's loader creates iterators in the same way, but a subclass may override its methods.
        with _endless_collate(loader):
            if (iterator := self._persistent) is not None and self._latest is not None and self._latest() is loader:
                iterator._reset(loader)
            else:
                kind = _MultiProcessingDataLoaderIter if loader.num_workers else _SingleProcessDataLoaderIter
                iterator = kind(loader)
        self._persistent, self._latest = iterator if loader.persistent_workers else None, weakref.ref(loader)
        return _TorchBatches(iterator, self._forget, self._bad_samples, None if cursor is None else cursor.epoch)

    def _forget(self) -> None:
        self._persistent = None


class _TorchBatches(BatchIterator):
    def __init__(
        self,
        batches: _BaseDataLoaderIter,
        forget: Callable[[], None],
        bad_samples: BadSamples | None,
        number: int | None,
    ) -> None:
        self._batches: _BaseDataLoaderIter | None = batches
        self._forget, self._bad_samples, self._number = forget, bad_samples, number
        self._latest = weakref.ref(batches)

    @property
    def members(self) -> Sequence[Any]:
        return getattr(self._latest(), "_workers", ())

    def __next__(self) -> Any:
        assert self._batches is not None, "it was not closed"
        try:
            return next(self._batches)
        except StopIteration:
            self.close()
            if self._bad_samples is not None:
                self._bad_samples.warn_of_counted(self._number)
            raise
        except Exception as error:
            if not _is_of_a_batch(error) or is_interruption(error):  # All other errors leave the epoch intact.
                raise
            return Failure(error=error)

    def close(self) -> None:
        self._batches = None

    def end_workers(self) -> None:
        self.close()
        self._forget()  # The workers end when the last reference to torch's iterator is dropped.


def _is_of_a_batch(error: Exception) -> bool:
    """Return whether an error from torch's iterator concerns one batch, not the sampler or a dead worker."""
    functions = (ExceptionWrapper.reraise, _MapDatasetFetcher.fetch, _IterableDatasetFetcher.fetch)
    of_batches = {function.__code__ for function in functions}
    return any(frame.f_code in of_batches for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass(frozen=True, slots=True)
class _CollateEndless:
    """A collate function that raises RuntimeError if the user's function raises StopIteration."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except StopIteration as error:
            raise no_end(error) from error


@contextmanager
def _endless_collate(loader: Any) -> Iterator[None]:
    collate_fn = loader.collate_fn
    loader.collate_fn = _CollateEndless(collate_fn)
    try:
        yield
    finally:
        loader.collate_fn = collate_fn


class _CollatedItems(torch.utils.data.Dataset[Any]):
    """A job as a dataset whose items are batches or Failures, because torch's loader cannot tell which batch failed."""

    def __init__(self, job: FetchJob) -> None:
        self.job = job

    def __getitem__(self, index: Any) -> Any:
        return self._fetch(make_fetcher(self.job, None), index)

    def _fetch(self, fetcher: Any, index: Any) -> Any:
        try:
            return self.job.collate_fn(fetcher.fetch(index))
        except DatasetEndError:
            raise
        except Exception as error:
            let_through(error)
            failure = no_end(error)
            return describe_failure(failure) if is_torch_worker() else Failure(error=failure)


class _CollatedStream(_CollatedItems, torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        fetcher = make_fetcher(self.job, None)
        with suppress(DatasetEndError):
            while True:
                yield self._fetch(fetcher, [None] * (self.job.batch_size or 1))


class _LatestIndices:
    indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


def _keep(batch: Any) -> Any:
    return batch
