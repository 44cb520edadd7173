"""What an executor is made from: a loader's attributes as they are when it is iterated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any

import torch.utils.data.dataloader

from shardio.datasets import Transformed, unwrap
from shardio.decoding import FieldDecoder
from shardio.loader.fetching.job import WorkerMethod, is_iterable

TorchDataLoader = torch.utils.data.dataloader.DataLoader
"""torch's class itself. Programs replace the name in torch by shardio's class."""

_VALUES = (bool, int, float, str, MethodType)
"""Types whose instances are compared by value. Methods are created at each access and compare by their objects."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExecutorSettings:
    """What an executor is made from. If it changes, the loader needs another executor.

    Attributes:
        datasets: The loader's dataset; for torch's Subsets and ConcatDatasets, also the datasets in them.
        decoder: The decoder of the dataset inside; None if the dataset is not shardio's.
        is_ours: Whether shardio's own code can make the batches.
        batch_size: The samples of a full batch; None if a batch sampler decides, or for single samples.
        batch_sampler: Yields the indices of each batch, where the dataset and ``batch_size`` allow it.
        num_workers: How many workers there are.
        collate_fn: Makes a batch of samples.
        worker_init_fn: Called in each worker that calls the dataset.
        multiprocessing_context: How workers that call the dataset start.
        generator: Seeds workers that call the dataset, and rng keys where the order is not shardio's.
        timeout_s: How long to wait for a batch; 0 waits indefinitely.
        prefetch_factor: How many batches are made ahead; a DefaultPrefetch if the user did not set it.
        persistent_workers: Whether the workers serve several epochs.
        worker_method: What workers are that call the dataset.
        in_order: Whether batches are delivered in order.
        snapshot_every_n_steps: How often the user's dataset is asked for its state.
        pin_memory: The argument of torch's loader.
        pin_memory_device: The argument of torch's loader.
        pins: Whether batches are copied to torch's pinned memory: whether that is wanted and CUDA is available.
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

        The ``==`` of the user's objects may raise, as that of dataclasses with tensors does, and equal objects may
        do different things.
        """
        return all(_is_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))


def find_override(loader: Any) -> str | None:
    """Return the overridden torch hook that determines what a batch consists of; None if there is none.

    Such a loader has torch's semantics: the hook decides, not shardio's order.
    """
    for name in ("_auto_collation", "_index_sampler"):
        if getattr(type(loader), name) is not getattr(TorchDataLoader, name):
            return f"{type(loader).__name__} overrides {name}"
    if is_iterable(loader) != isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return f"{type(loader).__name__} sets _dataset_kind"
    return None


def find_decoder(dataset: Any) -> FieldDecoder | None:
    """Return the decoder of shardio's dataset; None for any other, whose transform works differently."""
    inner = unwrap(dataset).dataset
    return inner.decoder if isinstance(inner, Transformed) else None


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, _VALUES) and bool(one == other))
