"""Iterate over a loader's batches, and count the batches that the user receives.

``Accelerator.prepare`` does not wrap a loader that already splits samples over ranks. So this module also does the work
of Accelerate's wrappers: it reports the last batch to ``accumulate``, and its repeats to ``gather_for_metrics``.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _get_distributed_settings,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from shardio.epochs import find_rng_keys, hand_over
from shardio.loader.executor import BatchIterator
from shardio.loader.wire import Failure
from shardio.order import Progress, Split, make_rng_key
from shardio.process import call_at_fork, cut_short, describe_error
from shardio.values import count


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunEpoch:
    """An epoch that has begun.

    Attributes:
        made: The executor and its settings.
        batches: The executor's batches.
        check: Raises an error if no further batch may be requested.
        is_latest: Returns whether no later epoch uses this epoch's workers.
        modes: Returns a context in which batches are made, with the torch modes that apply to them.
        progress: The counter of the batches; None if the order is not shardio's.
        seed: The seed of shardio's order or, if the order is not shardio's, the seed drawn for the workers as in torch.
        length: Returns the number of this rank's batches in a full epoch.
    """

    made: Any
    batches: BatchIterator
    check: Callable[[], None]
    is_latest: Callable[[], bool]
    modes: Callable[[], AbstractContextManager[None]]
    progress: Progress | None
    seed: int | None
    length: Callable[[], int]


class EpochStart(Protocol):
    """A function that begins a loader's next epoch."""

    def __call__(self, loader: Any, sampler: Any, *, made: Any) -> BegunEpoch:
        """Begin the epoch.

        Args:
            loader: The loader.
            sampler: The loader's ``_index_sampler``.
            made: The ``made`` of the BegunEpoch of the iterator's previous epoch; None for the iterator's first epoch.
        """


class LoaderIterator(_BaseDataLoaderIter):
    """The base class of iterators over a loader's batches.

    The class has the interface of torch's iterators, even private names, because programs and frameworks use them.
    torch's own constructor is not called, because it draws random numbers.
    """

    def _adopt(self, loader: Any, sampler: Any) -> None:
        """Copy the loader's attributes under the names that they have in torch's iterators.

        Args:
            loader: The loader.
            sampler: The loader's ``_index_sampler``, a property that subclasses override, so it is read once per epoch.
        """
        self._dataset, self._dataset_kind = loader.dataset, loader._dataset_kind
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        self._auto_collation, self._drop_last = loader._auto_collation, loader.drop_last
        self._index_sampler, self._num_workers = sampler, loader.num_workers
        self._pin_memory, self._pin_memory_device = loader.pin_memory and torch.accelerator.is_available(), None
        self._timeout, self._collate_fn = loader.timeout, loader.collate_fn
        self._persistent_workers = loader.persistent_workers
        self._prefetch_factor, self._in_order = loader.prefetch_factor, loader.in_order
        self._worker_init_fn = loader.worker_init_fn
        self._shared_seed = self._pg = None
        self._world_size, self._rank = _get_distributed_settings()
        self._profile_name = f"enumerate(DataLoader)#{type(self).__name__}.__next__"
        self._num_yielded = 0

    def _next_data(self) -> Any:
        return next(self)


class EpochIterator(LoaderIterator):
    """An iterator over the batches of an epoch.

    An error in one batch does not end the epoch. Any other error ends the epoch: after an error from a signal handler,
    for example, a batch may have been lost, so every further call raises an error.

    In shardio's order, a batch is counted when the user receives it. A failed batch is counted when the user requests
    the next one, so a run that ends with the error resumes at that batch.

    The iterator does not refer to the loader, because the loader may refer to it.

    Args:
        begin: A function that begins a loader's next epoch.
        loader: The loader.
        owns_workers: Whether the workers persist as long as this iterator exists.

    Attributes:
        progress: The counter of the epoch's batches; None if the order is not shardio's.
    """

    def __init__(self, begin: EpochStart, loader: Any, *, owns_workers: bool) -> None:
        self._begin, self._owns_workers = begin, owns_workers
        self._made: Any = None
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the loader's next epoch. torch's loader calls this if its workers persist."""
        sampler = loader._index_sampler
        epoch = self._begin(loader, sampler, made=None if first_iter else self._made)
        self._made = epoch.made
        self._batches, self._check, self._modes, self.progress = epoch.batches, epoch.check, epoch.modes, epoch.progress
        self._seed, self._length, self._is_latest = epoch.seed, epoch.length, epoch.is_latest
        self._adopt(loader, sampler)
        self._base_seed = epoch.seed  # type: ignore[assignment]  # torch's iterators always have a seed
        self._sampler_iter = getattr(epoch.batches, "indices", None) or _draw(self._index_sampler)
        self._num_taken = self._num_counted = 0
        self._is_over = False
        self._cut_short_by: str | None = None

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        """Return the next batch, or raise the batch's error; the next call returns the following batch.

        Raises:
            RuntimeError: If the number of batches differs from that in the order, or an earlier error ended the epoch.
        """
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if self._is_over:
            raise StopIteration
        self._check()
        self._cut_short_by = "an error"  # Cleared once the batch is made; an error before then may lose it.
        try:
            self._count()
            with before_shutdown(), self._modes():
                made = next(self._batches)
            self._num_taken += 1
            failure = made.restore() if isinstance(made, Failure) else None
            if failure is None:
                self._num_yielded += 1
                self._count()
                if self.progress is not None and (keys := find_rng_keys()) is not None:
                    keys.make = partial(self._make_rng_key, self._num_taken - 1)
        except StopIteration:
            self.close()
            self._finish()
            self._cut_short_by = None
            raise
        except BaseException as error:
            self._cut_short_by = describe_error(error)
            self.close()
            raise
        # No call may follow the next line: Python runs signal handlers where functions are called.
        self._cut_short_by = None
        if failure is None:
            return made
        try:
            raise failure
        finally:
            del made, failure  # Otherwise, the error's traceback would keep this frame, and so the error, alive.

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is ready."""
        if self._is_over or self._cut_short_by is not None:
            return True
        try:
            with before_shutdown(), self._modes():
                return self._batches.is_ready(timeout_s)
        except BaseException as error:  # As in __next__.
            self._cut_short_by = describe_error(error)
            self.close()
            raise

    def close(self) -> None:
        """End the epoch; drop batches that were made in advance."""
        self._is_over = True
        self._batches.close()

    def _make_rng_key(self, num_before: int) -> int:
        """Return the rng key of the batch that follows ``num_before`` batches of this iterator."""
        progress, seed = self.progress, self._seed
        assert progress is not None, "only shardio's order has rng keys"
        assert seed is not None, "shardio's order has a seed"
        split = progress.split
        (rng_key,) = make_rng_key(seed, progress.cursor.epoch, "batch", split.position_after(num_before), split.rank)
        return int(rng_key)

    def _count(self) -> None:
        if self.progress is not None and self._num_counted < self._num_taken:
            self._num_counted = self._num_taken
            hand_over([partial(setattr, self.progress, "num_batches", self._num_counted)])

    def _finish(self) -> None:
        if self.progress is None:
            return
        hand_over([partial(setattr, self.progress, "is_finished", True)])
        expected, dataset = self.progress.split.num_batches, type(self._dataset).__name__
        if self._num_counted != expected:
            raise RuntimeError(
                f"the epoch had {count(self._num_counted, 'batch', 'batches')} instead of {expected}: {dataset} must "
                "yield one value for each of its samples, because the state counts them. Filter in collate_fn instead, "
                "or use torch's DataLoader"
            )


class CallersIterator(EpochIterator, _SingleProcessDataLoaderIter):
    """The iterator without workers."""


class WorkersIterator(EpochIterator, _MultiProcessingDataLoaderIter):
    """The iterator with workers."""

    @property
    def _workers(self) -> list[Any]:  # type: ignore[override]  # torch's is an attribute
        return list(self._batches.members)

    @property
    def _shutdown(self) -> bool:  # type: ignore[override]  # torch's is an attribute
        return self._is_over

    def _shutdown_workers(self) -> None:
        """End the epoch and stop its workers. Frameworks call this method."""
        if not self._is_over:
            self._cut_short_by = "its workers were shut down"
        self.close()
        if self._is_latest():
            self._batches.end_workers()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and getattr(self, "_owns_workers", False) and hasattr(self, "_is_over"):
            self._shutdown_workers()


def make_epoch_iterator(begin: EpochStart, loader: Any, *, owns_workers: bool) -> EpochIterator:
    """Begin a loader's next epoch and return an iterator of the kind that torch's loader returns.

    Args:
        begin: A function that begins a loader's next epoch.
        loader: The loader.
        owns_workers: Whether the workers persist as long as the iterator exists.
    """
    kind = WorkersIterator if loader.num_workers else CallersIterator
    return kind(begin, loader, owns_workers=owns_workers)


def _draw(sampler: Any) -> Iterator[Any]:
    """Iterate over a sampler. The sampler's ``__iter__`` is not called until the first value is requested."""
    yield from sampler


def is_preparing() -> bool:
    """Return whether the caller's caller is one of Accelerate's ``prepare`` methods."""
    return sys._getframe(2).f_globals.get("__name__") == "accelerate.accelerator"


class PreparedEpoch(LoaderIterator):
    """An iterator that moves an epoch's batches to Accelerate's device and keeps ``GradientState`` up to date.

    This iterator has the attributes of the iterator that makes the batches.

    Args:
        batches: The epoch's batches.
    """

    def __init__(self, batches: EpochIterator) -> None:
        from accelerate.state import AcceleratorState

        self._batches = batches
        self._device = AcceleratorState().device
        self._gradients = _gradients_class()()
        self._is_begun = self._is_listed = False

    def __next__(self) -> Any:
        from accelerate.utils import send_to_device

        if not self._is_begun:
            self._is_begun = self._is_listed = True
            self._gradients.begin()
            self._gradients.remainder = find_remainder(self._find_progress().split)
        try:
            batch = next(self._batches)
        except StopIteration:
            hand_over([self._leave])
            raise
        hand_over([self._note_end])
        return send_to_device(batch, self._device)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # Not set yet.
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._batches._reset(loader, first_iter)
        self._is_begun = False

    def _note_end(self) -> None:
        self._gradients.end_of_dataloader = self._find_progress().is_over

    def _find_progress(self) -> Progress:
        progress = self._batches.progress
        assert progress is not None, "Accelerate prepares only loaders with shardio's order"
        return progress

    def _leave(self) -> None:
        if self._is_listed:
            self._is_listed = False
            self._gradients.end()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_is_listed"):
            self._leave()


def find_remainder(split: Split) -> int:
    """Return the number of samples in the ranks' last batches that ``gather_for_metrics`` must keep; 0 for all.

    ``gather_for_metrics`` concatenates the batches by rank and truncates the result. The repeats that pad the epoch are
    at the end of the last step, so they are truncated.
    """
    if split.stop <= split.num_samples:
        return 0
    return split.num_samples - split.position_after(split.num_batches - 1)


def check_parallelism(split: Split) -> None:
    """Check that a loader that Accelerate has prepared gives each data-parallel rank its own share.

    Raises:
        ValueError: If ranks that must share their data, as in tensor parallelism, would get different samples.
    """
    from accelerate.state import AcceleratorState

    config: Any = getattr(AcceleratorState(), "parallelism_config", None)
    if config is None or config.non_data_parallel_size == 1 or split.world_size <= config.data_parallel_size:
        return
    raise ValueError(
        f"each of {split.world_size} ranks would get different samples, but with this tensor, context or sequence "
        f"parallelism, the number of different shares must be {config.data_parallel_size}. On the dataset or sampler, "
        f"set world_size={config.data_parallel_size}, and rank to the index of this process's share (0 for the first)"
    )


@cache
def _gradients_class() -> type[Any]:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class Gradients(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types.
        def __init__(self) -> None:
            self.gradient_state = GradientState()

    return Gradients


PATIENCE_S = 5.0
"""The maximum time, in seconds, that Python's shutdown waits for batches that other threads have requested."""


class _Gate:
    """A gate that records the threads inside it, and admits no more threads once it is closed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._condition, self._is_closed = threading.Condition(), False
        self._inside: list[int] = []  # Holds a thread's id once for each time that the thread has entered.

    def __enter__(self) -> None:
        with self._condition:
            if self._is_closed:
                raise RuntimeError(
                    "Python is shutting down, so no batch can be made: read all batches before the program ends"
                )
            self._inside.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._inside.remove(threading.get_ident())
            if self._is_closed:
                self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            here = threading.get_ident()  # If Ctrl-C interrupted __exit__(), this thread is still counted as inside.
            self._condition.wait_for(lambda: all(thread == here for thread in self._inside), PATIENCE_S)


_gate = _Gate()


def before_shutdown() -> AbstractContextManager[None]:
    """Delay Python's shutdown until the ``with`` block, which makes a batch, ends.

    Raises:
        RuntimeError: If Python is shutting down.
    """
    _watch()
    return _gate


@cache
def _watch() -> None:
    # Called at the first batch: exit handlers run in reverse order, and this one must run before the workers end.
    atexit.register(_gate.close)
    # A forked child does not have the other threads that were inside the gate.
    call_at_fork(_gate, after_in_child=_Gate.clear)
