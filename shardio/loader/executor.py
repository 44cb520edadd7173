"""The interface and settings of executors, which make a loader's batches, and the order of the batches.

To add an executor, write it in its own file and return it from :mod:`shardio.loader.choice`. If the executor
reads shardio's datasets itself, derive its iterators from :class:`shardio.loader.pipeline.PlannedBatches`, which count
batches, handle unreadable samples and assemble batches. User code must run in one thread of a process at a time,
because it draws from generators that all threads share, and that are seeded for each sample.
"""

from __future__ import annotations

import copy
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any

import torch.utils.data
import torch.utils.data.dataloader

from shardio.datasets import EpochSampler, Iterated, Ordered, Transformed, unwrap
from shardio.decoding import FieldDecoder
from shardio.loader.fetch_job import WorkerMethod, is_iterable
from shardio.loader.statistics import Tally
from shardio.order import Cursor, EpochCounter, Split

TorchDataLoader = torch.utils.data.dataloader.DataLoader
"""torch's own class. Some programs make torch's name refer to shardio's class."""

_VALUES = (bool, int, float, str, MethodType)
"""Types whose instances are compared by value. Each access to a method creates a new object, equal to earlier ones."""


SUPERSEDED = (
    "this iterator ended when the loader was iterated again: persistent_workers=True allows one iterator at a time. "
    "Use persistent_workers=False, or a second loader"
)

IN_ANOTHER_PROCESS = "this iterator belongs to the parent of this forked process: call iter(loader) again"


class BatchIterator(ABC):
    """The batches of one epoch, in order.

    The user's iterator has the same methods, but raises the error of a Failure, and accepts more calls after its end.
    :class:`shardio.testing.executor.ExecutorTests` checks any executor and its iterators.

    If the loader has a state, a batch is counted when :mod:`shardio.epochs` reports that the user has received it. A
    failed batch is counted when the next batch is requested. Neither :meth:`is_ready` nor :meth:`close` counts a batch.

    Attributes:
        is_open: Whether the epoch can continue. An open iterator is closed when it is freed.
        members: The processes or threads that call the user's dataset; none if shardio's own code makes the samples.
        indices: The sampler's remaining values, if a sampler determines the batches.
    """

    is_open = False

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead. After a Failure, the next batch can still be requested.

        Raises:
            StopIteration: If the epoch has no more batches. The death of a worker does not end the epoch in this way:
                either another worker makes the batches, or an error reports the death.
            BaseException: If the epoch ends with an error. Do not request another batch after this error.
        """

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether a request would return immediately.

        The request would return a batch or a Failure, raise an error, or end the epoch. If the calling process or
        torch's iterator makes the batches, the result is always true.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """End the epoch; drop batches that were made in advance. Later calls do nothing.

        Workers end, unless they persist for the next epoch.
        """

    def end_workers(self) -> None:
        """End the epoch and the workers, including persistent ones. Call this only if no later epoch has begun."""
        self.close()

    @property
    def members(self) -> Sequence[Any]:
        return ()

    @property
    def indices(self) -> Iterator[Any] | None:
        return None

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.is_open and not is_exiting():
            self.close()


class Executor(ABC):
    """The interface of executors, which make the batches of one loader, epoch after epoch.

    Attributes:
        tally: The counts of the latest epoch; None if this executor does not count.
    """

    tally: Tally | None = None

    @abstractmethod
    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        """Begin an epoch and return its batches.

        Args:
            cursor: The start of the epoch; None if the order is not shardio's.
            split: This rank's share, from the cursor to the end; None if the order is not shardio's.
        """

    def start_workers(self) -> None:  # noqa: B027  # Most executors have nothing to start.
        """Start the workers of the next epoch now, unless only the epoch itself can start them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExecutorSettings:
    """The settings of an executor. If a setting changes, the loader needs a new executor.

    Attributes:
        datasets: The loader's dataset; for torch's Subsets and ConcatDatasets, also the datasets in them.
        decoder: The decoder of the innermost dataset; None if that dataset is not shardio's.
        is_ours: Whether shardio's own code can make the batches.
        batch_size: The number of samples in a full batch; None if a batch sampler determines it, or for single samples.
        batch_sampler: The sampler of the indices of each batch; None for an iterable dataset or single samples.
        num_workers: The number of workers.
        collate_fn: The function that makes a batch from samples.
        worker_init_fn: The function that each worker runs first, if workers call the dataset.
        multiprocessing_context: The start method of workers that call the dataset.
        generator: The generator that supplies the seed of workers that call the dataset and, if the order is not
            shardio's, the rng keys.
        timeout_s: The longest wait for a batch, in seconds; 0 waits indefinitely.
        prefetch_factor: The number of batches that are made in advance; a DefaultPrefetch if the user did not set it.
        persistent_workers: Whether the workers serve several epochs.
        worker_method: The kind of workers that call the dataset.
        in_order: Whether batches are delivered in order.
        snapshot_every_n_steps: The number of batches after which the state of the user's dataset is read.
        pin_memory: torch's argument ``pin_memory``.
        pin_memory_device: torch's argument ``pin_memory_device``.
        pins: Whether batches are copied to torch's pinned memory: true if that is requested and CUDA is available.
    """

    datasets: tuple[Any, ...]
    decoder: FieldDecoder | None
    is_ours: bool
    batch_size: int | None
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: Any
    timeout_s: float
    prefetch_factor: int | None
    persistent_workers: bool
    worker_method: WorkerMethod
    in_order: bool
    snapshot_every_n_steps: int
    pin_memory: bool
    pin_memory_device: str
    pins: bool

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self.datasets[0]

    def is_same(self, other: ExecutorSettings) -> bool:
        """Return whether all settings are the same: plain values by value, the user's objects by identity.

        The ``==`` of the user's objects may raise an error, as that of dataclasses that hold tensors does, and equal
        objects may behave differently.
        """
        return all(_is_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))


def find_override(loader: Any) -> str | None:
    """Return the overridden torch hook that determines what a batch consists of; None if no such hook is overridden.

    A loader with such a hook has torch's semantics: the hook, not shardio's order, determines the batches.
    """
    for name in ("_auto_collation", "_index_sampler"):
        if getattr(type(loader), name) is not getattr(TorchDataLoader, name):
            return f"{type(loader).__name__} overrides {name}"
    if is_iterable(loader) != isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return f"{type(loader).__name__} sets _dataset_kind"
    return None


def find_decoder(dataset: Any) -> FieldDecoder | None:
    """Return the decoder of a shardio dataset; None for any other dataset, whose transform works differently."""
    return None if (transformed := find_transformed(dataset)) is None else transformed.decoder


def find_transformed(dataset: Any) -> Transformed | None:
    """Return the shardio dataset inside torch's wrappers; None for any other dataset."""
    inner = unwrap(dataset).dataset
    return inner if isinstance(inner, Transformed) else None


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, _VALUES) and bool(one == other))


class LoaderOrder:
    """shardio's order in one loader, and the loader's progress in it.

    Attributes:
        ordered: The dataset or sampler that holds the order.
    """

    def __init__(self, ordered: Ordered) -> None:
        self.ordered = ordered
        self._counter = ordered.counter if isinstance(ordered, EpochSampler) else EpochCounter()
        self._num_epoch_sets = 0

    def copy(self) -> LoaderOrder:
        """Return the order for a copy of the loader. An EpochSampler keeps one counter for both loaders."""
        other = LoaderOrder(self.ordered)
        if isinstance(self.ordered, Iterated):
            other._counter, other._num_epoch_sets = copy.deepcopy(self._counter), self._num_epoch_sets
        return other

    def update_counter(self) -> EpochCounter:
        """Apply the dataset's or sampler's last ``set_epoch`` call; return the counter that determines the next epoch.

        An EpochSampler has its own counter, which its ``set_epoch`` changes. A dataset may serve several loaders,
        so each loader has its own counter, which follows the dataset's ``set_epoch``.
        """
        if isinstance(self.ordered, Iterated) and self.ordered.num_epoch_sets != self._num_epoch_sets:
            self._num_epoch_sets = self.ordered.num_epoch_sets
            self._counter.set_epoch(self.ordered.epoch)
        return self._counter


def find_order(loader: Any) -> LoaderOrder | None:
    """Return the order of a loader's samples; None if the order is not shardio's."""
    if find_override(loader) is not None:
        return None
    if isinstance(loader.dataset, Ordered):
        return LoaderOrder(loader.dataset)
    # A subclass that overrides ``__iter__`` or ``__len__`` has a different order.
    sampler = loader.sampler
    if isinstance(sampler, EpochSampler) and all(
        getattr(type(sampler), name) is getattr(EpochSampler, name) for name in ("__iter__", "__len__")
    ):
        return LoaderOrder(sampler)
    return None


class OrderSampler(torch.utils.data.Sampler[None]):
    """A sampler that yields no indices: it gives a loader the ``set_epoch`` method that frameworks call."""

    def __init__(self, order: LoaderOrder) -> None:
        self._order = order

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's next ``iter``."""
        self._order.update_counter().set_epoch(epoch)
