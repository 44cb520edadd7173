"""The choice of the executor that makes a loader's batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from shardio.bad_samples import BadSamples
from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset, unwrap_subsets
from shardio.loader.batch_plans import OrderPlanner, Planner, SamplerPlanner
from shardio.loader.collate import collate_channels_last
from shardio.loader.executors.calling_process import CallingProcess
from shardio.loader.executors.chunk_sizing import ChunkSizing, DefaultPrefetch
from shardio.loader.executors.executor import Executor
from shardio.loader.executors.in_flight import BatchSettings
from shardio.loader.executors.torch_options import torch_options
from shardio.loader.executors.torch_workers import IndexTorchWorkers, ShardTorchWorkers
from shardio.loader.executors.worker_processes import WorkerProcesses
from shardio.loader.slots.slot_pool import MemoryCallback
from shardio.loader.state import LoaderOrder
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

_TRANSFORMS: frozenset[type] = frozenset([CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize])


def make_executor(
    loader: Any,
    order: LoaderOrder | None,
    bad_samples: BadSamples | None,
    reason: str | None,
    *,
    pins: bool,
    memory_callbacks: Sequence[MemoryCallback],
) -> Executor | None:
    """Return the executor of a loader, or None if torch's own iterator makes its batches.

    Args:
        loader: The DataLoader.
        order: Its order; None if that is not shardio's.
        bad_samples: The policy for unreadable samples; None raises their errors.
        reason: Why shardio's own code cannot make the batches; None if it can. See :func:`why_not_ours`.
        pins: Whether batches are copied to torch's pinned memory.
        memory_callbacks: Called once with each slot's memory.
    """
    if reason is None:
        planner = _make_planner(loader, order)
        sizing = ChunkSizing(
            num_threads=max(loader.num_workers, 1),
            chunk_size=planner.dataset.dataset.decoder.chunk_size,
            prefetch=None if isinstance(loader.prefetch_factor, DefaultPrefetch) else loader.prefetch_factor,
        )
        settings = BatchSettings(batch_size=loader.batch_size, sizing=sizing, bad_samples=bad_samples, pins=pins)
        if not loader.num_workers:
            return CallingProcess(planner, settings)
        return WorkerProcesses(
            planner,
            settings,
            memory_callbacks,
            timeout_s=loader.timeout,
            closes_workers=not loader.persistent_workers,
        )
    if order is None:
        return None
    options, source = torch_options(loader), order.source
    if isinstance(source, ShardDataset):
        return ShardTorchWorkers(source, options, bad_samples, reason)
    return IndexTorchWorkers(loader.dataset, source, options, bad_samples, reason)


def _make_planner(loader: Any, order: LoaderOrder | None) -> Planner:
    dataset = unwrap_subsets(loader.dataset)
    if order is not None:
        return OrderPlanner(dataset, order.source)
    return SamplerPlanner(dataset, loader.batch_sampler, loader.generator, keeps_seed=loader.persistent_workers)


def why_not_ours(loader: Any) -> str | None:
    """Return why shardio's own code cannot make a loader's batches; None if it can."""
    if (why := _why_not_dataset(loader.dataset)) is not None:
        return why
    for name, default in (("worker_init_fn", None), ("multiprocessing_context", None), ("in_order", True)):
        if getattr(loader, name) != default:
            return f"{name} is {getattr(loader, name)!r}"
    if loader.collate_fn is not collate_channels_last:
        return "batch_size is None" if loader.batch_sampler is None else f"collate_fn is {loader.collate_fn!r}"
    return None


def _why_not_dataset(dataset: Any) -> str | None:
    unwrapped = unwrap_subsets(dataset)
    inner = unwrapped.dataset
    names = [type(each).__name__ for each in (*unwrapped.subsets, inner)]
    if type(inner) not in (ShardMapDataset, ImageFolder) and type(dataset) is not ShardDataset:
        return (
            f"the dataset is a {' of a '.join(names)}, not exactly a ShardDataset, ShardMapDataset or ImageFolder, "
            "or torch's Subset of one of the last two"
        )
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create, which needs Linux with glibc 2.27 or newer"
    decoder = inner.decoder
    if decoder.trusted:
        return "trusted=True lets fields run code"
    if decoder.decode != "array" or not _is_ours(decoder.transform):
        return f"the transform {decoder.transform!r} is not one of shardio's"
    return None


def _is_ours(transform: Callable[[Any], Any] | None) -> bool:
    if type(transform) is Compose:
        return all(map(_is_ours, transform.transforms))
    return transform is None or type(transform) in _TRANSFORMS
