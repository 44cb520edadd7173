"""The executor for any dataset, which calls it and collates its samples as torch's DataLoader does."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.data
from torch.utils.data._utils.pin_memory import pin_memory

from shardio.bad_samples import BadSamples
from shardio.datasets import Transformed, unwrap
from shardio.loader.arguments import find_user_level
from shardio.loader.epochs import Epochs
from shardio.loader.fetch_workers import FetchProcesses, FetchThreads, FetchWorkers
from shardio.loader.fetched_batches import CallerBatches, WorkerBatches
from shardio.loader.fetchers import FetchJob, WorkerMethod, is_iterable
from shardio.loader.saved_state import EpochPosition, has_state
from shardio.loader.stats import LoaderStats, Tally
from shardio.loader.wire import Failure
from shardio.order import Cursor, Split
from shardio.process import let_through


def can_fetch(loader: Any, worker_method: WorkerMethod) -> bool:
    """Return whether this executor can make a loader's batches; otherwise, torch's own iterators do."""
    if isinstance(loader.dataset, torch.utils.data.IterDataPipe | torch.utils.data.MapDataPipe):
        return False  # They share seeds between ranks.
    if not loader.num_workers or worker_method == "thread":
        return True
    if starts_threads(loader.multiprocessing_context):
        return isinstance(unwrap(loader.dataset).dataset, Transformed)  # In torch's way, all know one worker's id.
    return hasattr(os, "memfd_create")


def starts_threads(context: Any) -> bool:
    """Return whether a context of multiprocessing starts threads instead of processes, as that of some libraries."""
    kind = getattr(context, "Process", BaseProcess)
    return not (isinstance(kind, type) and issubclass(kind, BaseProcess))


class Fetching:
    """An executor that gets samples from the user's dataset and collates them with the loader's ``collate_fn``.

    Args:
        loader: The loader, which owns this executor.
        epochs: The positions at which its epochs begin.
        worker_method: The kind of its workers.
        snapshot_every_n_steps: The number of batches after which workers report the state of an iterable dataset.
        bad_samples: The policy for samples that raise errors; None raises them.
    """

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        epochs: Epochs,
        worker_method: WorkerMethod,
        snapshot_every_n_steps: int,
        bad_samples: BadSamples | None = None,
    ) -> None:
        self._loader = weakref.ref(loader)  # Weak: workers end as soon as the loader is released.
        self._epochs, self._bad_samples = epochs, bad_samples
        self._worker_method, self._snapshot_every_n_steps = worker_method, snapshot_every_n_steps
        self._tally = Tally(num_workers=loader.num_workers)
        self._task_ids = count()
        self._persistent: _PersistentBatches | None = None

    def start(self, cursor: Cursor | None, split: Split | None) -> FetchedBatches:
        """Begin an epoch and return its batches."""
        loader: Any = self._loader()
        assert loader is not None, "the loader owns this executor"
        _warn_of_pinning(loader)
        workers = self._find_workers() if loader.num_workers else None
        if self._bad_samples is not None:
            self._bad_samples.begin_count(loader.num_workers, are_new=workers is None)
        job = make_job(loader, self._bad_samples)
        tally = self._tally = begin_tally(job)
        position, indices = self._epochs.begin(loader, has_new_workers=workers is None)
        _warn_of_skipping(loader, position)
        if not loader.num_workers:
            in_caller = CallerBatches(job, indices, position, tally)
            self._epochs.watch(in_caller)
            return FetchedBatches(in_caller, loader, self._bad_samples)
        if workers is None:
            assert position.base_seed is not None, "it was drawn for them"
            workers = _start_workers(loader, job, position.base_seed, self._worker_method)
        batches = WorkerBatches(
            workers,
            indices,
            position,
            self._task_ids,
            tally,
            in_order=loader.in_order,
            timeout_s=loader.timeout,
            # A map-style dataset reports its state after each batch, because it cannot skip batches to resume.
            state_every=-(-self._snapshot_every_n_steps // loader.num_workers) if position.is_iterable else 1,
            closes_workers=not loader.persistent_workers,
        )
        if has_state(loader.dataset):
            batches.await_workers(raises=True)
        for _ in range(position.num_to_replay):
            next(batches)
        self._epochs.watch(batches)
        if not loader.persistent_workers:
            return FetchedBatches(batches, loader, self._bad_samples)
        if self._persistent is None or self._persistent.workers is not workers:
            self._persistent = _PersistentBatches(batches)
        else:
            self._persistent.batches = batches
        return FetchedBatches(self._persistent, loader, self._bad_samples)

    def start_workers(self) -> None:
        """Do nothing: the workers start when the epoch begins."""

    def stats(self) -> LoaderStats:
        """Return the statistics of the latest epoch."""
        return self._tally.sum_up()

    def _find_workers(self) -> FetchWorkers | None:
        persistent = self._persistent
        if persistent is not None and not persistent.workers.belongs_here:
            self._persistent = None  # This process is a fork of the one that has the workers.
            return None
        if persistent is None or persistent.is_closed or self._epochs.resumes:
            if persistent is not None:
                persistent.end_workers()
            self._persistent = None
            return None
        persistent.batches.close()
        return persistent.workers


class FetchedBatches:
    """The batches of one epoch, in pinned memory if requested, with torch's warning of a wrong length.

    Args:
        batches: The source of the batches.
        loader: The loader.
        bad_samples: The policy for samples that raise errors, which warns of them at the end.
    """

    def __init__(
        self, batches: CallerBatches | WorkerBatches | _PersistentBatches, loader: Any, bad_samples: BadSamples | None
    ) -> None:
        self._batches, self._bad_samples = batches, bad_samples
        self._pins = loader.pin_memory and torch.accelerator.is_available()
        self._dataset, self._num_workers = loader.dataset, loader.num_workers
        self._length = loader._IterableDataset_len_called if is_iterable(loader) else None
        self._num_yielded = 0
        # Tools that read profiles look for torch's name.
        kind = "_MultiProcessing" if loader.num_workers else "_SingleProcess"
        self._profile_name = f"enumerate(DataLoader)#{kind}DataLoaderIter.__next__"

    @property
    def members(self) -> Sequence[Any]:
        """The worker processes or threads."""
        return () if isinstance(self._batches, CallerBatches) else self._batches.workers.members

    @property
    def indices(self) -> Iterator[Any]:
        """The indices that the sampler still yields."""
        batches = self._batches.batches if isinstance(self._batches, _PersistentBatches) else self._batches
        return batches.indices

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead."""
        with torch.autograd.profiler.record_function(self._profile_name):
            try:
                batch = next(self._batches)
            except StopIteration:
                if self._bad_samples is not None:
                    self._bad_samples.warn_of_counted(None)
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
        """Wait up to ``timeout_s`` for the next batch; return whether it is there."""
        return self._batches.is_ready(timeout_s)

    def close(self) -> None:
        """End the epoch; drop batches that were fetched ahead."""
        self._batches.close()

    def end_workers(self) -> None:
        """End the workers, also those that persist."""
        if isinstance(self._batches, _PersistentBatches):
            self._batches.end_workers()
        else:
            self._batches.close()

    def _warn(self) -> None:
        said = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._length} (when accessing "
            f"len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self._num_workers:
            said += (
                "For multiprocessing data-loading, this can have one cause: each worker yields the whole dataset. Its "
                "__iter__ must ask get_worker_info() for its part"
            )
        warnings.warn(said, UserWarning, stacklevel=find_user_level())


class _PersistentBatches:
    """The batches of the latest epoch of persistent workers. As in torch, all iterators of the loader share them.

    Attributes:
        batches: The batches of the latest epoch.
        workers: The workers.
        is_closed: Whether the workers have ended.
    """

    def __init__(self, batches: WorkerBatches) -> None:
        self.batches = batches
        self.workers = batches.workers
        self.is_closed = False

    def __next__(self) -> Any:
        return next(self.batches)

    def is_ready(self, timeout_s: float) -> bool:
        return self.batches.is_ready(timeout_s)

    def close(self) -> None:
        """End the workers if the epoch is not over, because an error may have lost one of their answers."""
        if self.batches.is_open:
            self.end_workers()

    def end_workers(self) -> None:
        self.is_closed = True
        self.batches.close()
        self.workers.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "is_closed") and not self.is_closed:
            self.end_workers()


def make_job(loader: Any, bad_samples: BadSamples | None) -> FetchJob:
    """Return the settings that the workers of a loader need."""
    return FetchJob(
        dataset=loader.dataset,
        is_iterable=is_iterable(loader),
        is_batched=loader._auto_collation,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        num_workers=loader.num_workers,
        bad_samples=bad_samples,
    )


def _start_workers(loader: Any, job: FetchJob, base_seed: int, method: WorkerMethod) -> FetchWorkers:
    max_tasks = loader.prefetch_factor * loader.num_workers
    if method == "thread" or starts_threads(loader.multiprocessing_context):
        return FetchThreads(job, base_seed, max_tasks)
    context = loader.multiprocessing_context or torch.multiprocessing
    return FetchProcesses(job, base_seed, context, max_tasks)


def _warn_of_skipping(loader: Any, position: EpochPosition) -> None:
    """Warn if batches of an iterable dataset must be read again to resume."""
    num_batches = sum(worker.num_since for worker in position.workers if worker.state is None)
    if position.is_iterable and num_batches:
        name = type(loader.dataset).__name__
        warnings.warn(
            f"{name} has no state_dict, so resuming reads its first {num_batches} batches again and drops them: give "
            f"{name} or its iterator the methods state_dict and load_state_dict to begin there at once",
            RuntimeWarning,
            stacklevel=find_user_level(),
        )


def _warn_of_pinning(loader: Any) -> None:
    if loader.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
            "used.",
            UserWarning,
            stacklevel=find_user_level(),
        )


def begin_tally(job: FetchJob) -> Tally:
    """Return the counts of an epoch that begins."""
    names = [getattr(each, "__qualname__", type(each).__name__) for each in (job.dataset, job.collate_fn)]
    return Tally(num_workers=job.num_workers, in_python=tuple(names))
