"""The choice of the executor that makes a loader's batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch.utils.data
from torch.utils.data import ConcatDataset

from shardio.bad_samples import BadSamples
from shardio.datasets import (
    Concatenated,
    ImageFolder,
    ShardDataset,
    ShardMapDataset,
    Unwrapped,
    find_overridden,
    unwrap,
    unwrap_parts,
    why_not_concatenated,
)
from shardio.decoding import FieldDecoder
from shardio.loader.any_dataset import (
    Fetching,
    FetchSource,
    OrderSource,
    SamplerSource,
    TorchIterators,
    can_fetch,
)
from shardio.loader.arguments import OwnArguments
from shardio.loader.assembly import BatchSettings, ChunkSizing, DefaultPrefetch
from shardio.loader.batch_plans import OrderPlanner, Planner, SamplerPlanner
from shardio.loader.buffers import BufferWatch
from shardio.loader.collate import Collation, collate_channels_last
from shardio.loader.epochs import Epochs
from shardio.loader.executor import Executor, ExecutorSettings, LoaderOrder, find_decoder, find_override
from shardio.loader.fetchers import WorkerMethod
from shardio.loader.pipeline import CallingProcess, WorkerProcesses
from shardio.loader.wire import why_not_sendable

_log = logging.getLogger("shardio")


def make_executor(
    loader: torch.utils.data.DataLoader[Any],
    settings: ExecutorSettings,
    order: LoaderOrder | None,
    epochs: Epochs,
    bad_samples: BadSamples | None,
    watches: Sequence[BufferWatch],
) -> Executor:
    """Return the executor of a loader.

    Args:
        loader: The loader.
        settings: Its settings.
        order: The loader's order; None if it is not shardio's.
        epochs: The positions at which the loader's epochs begin, if the order is not shardio's.
        bad_samples: The policy for unreadable samples; None raises their errors.
        watches: The watches of the epoch that begins. The loader changes this list.
    """
    if settings.is_ours:
        assert settings.decoder is not None, "the dataset is shardio's"
        if replacements := settings.decoder.replacements:
            names = ", ".join(map(repr, replacements))
            _log.info("shardio's transforms replace what this dataset's transform begins with: %s", names)
        planner = _make_planner(loader, settings, order, epochs)
        collation = _make_collation(settings, settings.decoder)
        sizing = ChunkSizing(
            num_threads=max(settings.num_workers, 1),
            chunk_size=settings.decoder.chunk_size,
            prefetch=None if isinstance(settings.prefetch_factor, DefaultPrefetch) else settings.prefetch_factor,
            keeps_whole=collation is not None,
        )
        batches = BatchSettings(
            batch_size=settings.batch_size,
            sizing=sizing,
            bad_samples=bad_samples,
            pins=settings.pins,
            collation=collation,
        )
        if not settings.num_workers:
            return CallingProcess(planner, batches)
        return WorkerProcesses(
            planner, batches, watches, timeout_s=settings.timeout_s, closes_workers=not settings.persistent_workers
        )
    _log.info("the dataset's own methods make the samples of this loader: %s", fallback_reason(loader))
    source: FetchSource
    if order is None:
        source = SamplerSource(loader, epochs, bad_samples)
    else:
        source = OrderSource(settings, order.ordered, bad_samples)
    if _can_fetch(loader, settings.worker_method, has_order=order is not None):
        return Fetching(settings, source, bad_samples)
    _log.info("torch's own iterators make the batches of this loader")
    return TorchIterators(settings, source, bad_samples)


def _can_fetch(loader: Any, worker_method: WorkerMethod, *, has_order: bool) -> bool:
    return can_fetch(
        loader.dataset, loader.num_workers, worker_method, loader.multiprocessing_context, has_order=has_order
    )


def _make_collation(settings: ExecutorSettings, decoder: FieldDecoder) -> Collation | None:
    """Return the maker of whole batches; None if shardio can make them column by column."""
    is_own = settings.collate_fn is not collate_channels_last
    if not is_own and decoder.transform_sample is None:
        return None
    return Collation(settings.collate_fn, is_seeded=is_own and decoder.seed_transforms)


def _make_planner(loader: Any, settings: ExecutorSettings, order: LoaderOrder | None, epochs: Epochs) -> Planner:
    dataset = unwrap(settings.dataset)
    if order is not None:
        return OrderPlanner(dataset, order.ordered)
    return SamplerPlanner(dataset, loader, epochs)


def is_torchs(loader: Any, worker_method: WorkerMethod) -> bool:
    """Return whether torch's own iterators make a loader's batches, unless the order is shardio's."""
    return fallback_reason(loader) is not None and not _can_fetch(loader, worker_method, has_order=False)


def find_settings(loader: Any, arguments: OwnArguments) -> ExecutorSettings:
    """Return the settings of a loader's executor, from the loader's current attributes.

    Args:
        loader: The loader.
        arguments: The arguments that torch's loader does not have.
    """
    return ExecutorSettings(
        datasets=unwrap(loader.dataset).datasets,
        decoder=find_decoder(loader.dataset),
        is_ours=fallback_reason(loader) is None,
        batch_size=loader.batch_size,
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        timeout_s=loader.timeout,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        worker_method=arguments.worker_method,
        in_order=loader.in_order,
        snapshot_every_n_steps=arguments.snapshot_every_n_steps,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        pins=loader.pin_memory and torch.cuda.is_available(),
    )


def fallback_reason(loader: Any) -> str | None:
    """Return the reason why shardio's own code cannot make a loader's batches; None if it can."""
    if (why := find_override(loader) or _why_not_dataset(loader.dataset)) is not None:
        return why
    for name, default in (("worker_init_fn", None), ("multiprocessing_context", None), ("in_order", True)):
        if getattr(loader, name) != default:
            return f"{name} is {getattr(loader, name)!r}"
    if loader.batch_sampler is None:
        return "batch_size is None"
    if loader.collate_fn is collate_channels_last:
        return None
    return why_not_sendable(loader.collate_fn, f"collate_fn {loader.collate_fn!r}")


def _why_not_dataset(dataset: Any) -> str | None:
    unwrapped = unwrap(dataset)
    inner = unwrapped.dataset
    if (why := _why_not_read(unwrapped, is_whole=inner is dataset)) is not None:
        return (
            f"the dataset is a {unwrapped.kind}{why}, but shardio's own code reads only ShardDataset, ShardMapDataset "
            "and ImageFolder, and torch's Subset and ConcatDataset of the last two"
        )
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create, which needs Linux with glibc 2.27 or newer"
    return why_not_sendable(inner.decoder, "transform") if inner.decoder.runs_user_code else None


def _why_not_read(unwrapped: Unwrapped, *, is_whole: bool) -> str | None:
    """Return the reason why shardio's own code cannot read a dataset, "" if it is the type alone; None if it can."""
    inner = unwrapped.dataset
    if isinstance(inner, Concatenated):
        return None
    if isinstance(inner, ShardMapDataset | ImageFolder) or (is_whole and isinstance(inner, ShardDataset)):
        return f", which overrides {overridden}" if (overridden := find_overridden(type(inner))) else None
    if type(inner) is ConcatDataset:
        return f": {why_not_concatenated(unwrap_parts(inner))}"
    return ""
