"""Check the arguments that torch's loader does not have, and choose a loader's executor."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
)

from shardio.bad_samples import BadSamples, OnError, check_quarantine
from shardio.datasets import (
    Concatenated,
    EpochSampler,
    ImageFolder,
    MapDataset,
    MixedDataset,
    MixedSamples,
    Ordered,
    ShardDataset,
    ShardMapDataset,
    Transformed,
    Unwrapped,
    find_digest,
    find_overridden,
    unwrap,
    unwrap_parts,
    why_not_concatenated,
)
from shardio.decoding import CHUNK, FieldDecoder
from shardio.device.prefetcher import DecodePlace
from shardio.errors import Stage, find_user_level
from shardio.loader.any_dataset import Fetching, FetchSource, OrderSource, SamplerSource, TorchIterators, starts_threads
from shardio.loader.assembly import BatchSettings, ChunkSizing, DefaultPrefetch
from shardio.loader.batches import (
    Collation,
    OrderPlanner,
    Planner,
    SamplerPlanner,
    collate_channels_last,
    yields_images,
)
from shardio.loader.buffers import BufferWatch
from shardio.loader.executor import Executor, ExecutorSettings, LoaderOrder, find_decoder, find_override
from shardio.loader.fetch_job import WorkerMethod
from shardio.loader.pipeline import CallingProcess, WorkerProcesses
from shardio.loader.sampler_epochs import Epochs
from shardio.loader.wire import why_not_sendable
from shardio.order import DROP_LAST, Split
from shardio.sample import warn_of_other_classes
from shardio.values import check_choice, check_flag, check_integer, count
from shardio.world import find_world


@dataclass(frozen=True, kw_only=True)
class OwnArguments:
    """A loader's checked arguments that torch's loader does not have; DataLoader describes them.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is not among its choices or is out of range.
    """

    worker_method: WorkerMethod = "multiprocessing"
    snapshot_every_n_steps: int = 1
    on_error: OnError = "raise"
    on_error_in: Collection[Stage] = ("read", "decode")
    quarantine: str | os.PathLike[str] = "quarantine.jsonl"
    check_duplicates: bool = False
    device: str | torch.device | None = None
    decode: DecodePlace = "workers"

    def __post_init__(self) -> None:
        vars(self).update(
            worker_method=check_choice("worker_method", self.worker_method, WorkerMethod),
            snapshot_every_n_steps=check_integer("snapshot_every_n_steps", self.snapshot_every_n_steps, at_least=0),
            on_error=check_choice("on_error", self.on_error, OnError),
            on_error_in=_check_stages(self.on_error_in),
            check_duplicates=check_flag("check_duplicates", self.check_duplicates),
            decode=check_choice("decode", self.decode, DecodePlace),
        )
        if self.decode == "device" and self.device is None:
            raise ValueError("decode='device' needs device=, such as device='cuda'")

    @property
    def passed(self) -> dict[str, Any]:
        """The arguments that differ from their defaults."""
        values = {each.name: (each.default, getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, (default, value) in values.items() if value != default}


def check_dataset(dataset: Any, *, shuffle: bool | None, drop_last: bool) -> None:
    """Check a loader's dataset, ``shuffle`` and ``drop_last``; warn if parts of the dataset have different classes.

    Raises:
        TypeError: If ``shuffle`` or ``drop_last`` is not a boolean. With datasets that are not shardio's, any value is
            accepted, as in torch.
        ValueError: If ``shuffle`` is set for a dataset that shuffles itself.
    """
    if yields_images(dataset):
        check_flag("shuffle", False if shuffle is None else shuffle)
        check_flag("drop_last", drop_last)
    if isinstance(dataset, Ordered) and shuffle:
        name = type(dataset).__name__
        raise ValueError(f"a {name} shuffles its samples itself: pass shuffle=True to {name}, not to the loader")
    warn_of_other_classes(dataset, stacklevel=4)


def check_samplers_dataset(dataset: Any, sampler: Any, *, compares_digests: bool = False) -> None:
    """Raise ValueError if an EpochSampler belongs to a dataset other than the loader's, or if the dataset has changed.

    Args:
        dataset: The loader's dataset.
        sampler: Any sampler.
        compares_digests: Whether to compare the datasets' digests, if both have one, in addition to their sizes.
    """
    if not isinstance(sampler, EpochSampler) or not isinstance(dataset, Sized):
        return
    remedy = "create the EpochSampler over the loader's dataset in its current state"
    if len(dataset) != sampler.num_all_samples:
        raise ValueError(
            f"the EpochSampler was created for {count(sampler.num_all_samples, 'sample')}, but the loader's "
            f"{type(dataset).__name__} has {len(dataset)}: {remedy}"
        )
    # A sampler over one part of a StackDataset is also valid for the whole dataset.
    is_joined = any(isinstance(each, ConcatDataset | StackDataset) for each in (dataset, sampler.dataset))
    if not compares_digests or is_joined or dataset is sampler.dataset:
        return
    if "" not in (digests := {find_digest(dataset), sampler.digest}) and len(digests) > 1:
        raise ValueError(
            f"the EpochSampler was created for samples other than those of the loader's {type(dataset).__name__}, "
            f"although both have {count(len(dataset), 'sample')}: {remedy}"
        )


def check_prefetch_factor(prefetch_factor: int | None) -> int | None:
    """Check and return ``prefetch_factor``; None or a DefaultPrefetch means that the user did not set it.

    Raises:
        TypeError: If ``prefetch_factor`` is not an integer.
        ValueError: If ``prefetch_factor`` is less than 1.
    """
    if prefetch_factor is None or isinstance(prefetch_factor, DefaultPrefetch):
        return prefetch_factor
    return check_integer("prefetch_factor", prefetch_factor, at_least=1)


def _check_stages(stages: Collection[Stage]) -> tuple[Stage, ...]:
    if isinstance(stages, str) or not isinstance(stages, Collection):
        raise TypeError(f"on_error_in must be a tuple of stages, such as ('read', 'decode'), got {stages!r}")
    if not stages:
        raise ValueError("on_error_in is empty, so on_error would have no effect: name at least one stage")
    return tuple(check_choice("on_error_in", stage, Stage) for stage in stages)


def check_policy(
    on_error: OnError, dataset: Any, *, has_order: bool, has_batches: bool, is_fetched: bool, obstacle: str | None
) -> None:
    """Raise ValueError if bad samples cannot be replaced or skipped.

    Args:
        on_error: The user's policy.
        dataset: The loader's dataset.
        has_order: Whether the loader has shardio's order.
        has_batches: Whether the loader delivers batches, not single samples.
        is_fetched: Whether shardio's own workers, or the calling process, call the dataset.
        obstacle: The reason why shardio's own code cannot read the samples; None if it can.
    """
    if on_error == "raise":
        return
    if on_error == "skip" and not has_batches:
        raise ValueError(
            "on_error='skip' makes batches smaller, but batch_size=None disables batching: use on_error='replace'"
        )
    if on_error == "skip" and isinstance(dataset, ShardDataset) and dataset.overrides_iteration:
        raise ValueError(
            f"on_error='skip' does not work with {type(dataset).__name__}, which overrides __iter__: that method "
            "would receive placeholders for the skipped samples. Use on_error='replace', or move its code to the "
            "transform or to collate_fn"
        )
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, Ordered):
        raise ValueError(
            f"on_error={on_error!r} does not work with {type(dataset).__name__}, because an iterable dataset cannot "
            "continue after an error: catch errors in its __iter__, or use a map-style dataset"
        )
    if not isinstance(dataset, Sized | Ordered):
        raise ValueError(
            f"on_error={on_error!r} requires a dataset with a length; {type(dataset).__name__} has no __len__"
        )
    if has_order or obstacle is None or is_fetched:
        return
    raise ValueError(
        f"on_error={on_error!r} requires shardio's order, because torch makes this loader's batches ({obstacle}): "
        "use sampler=EpochSampler(dataset)"
    )


def make_bad_samples(
    on_error: OnError, stages: Collection[Stage], quarantine: str | os.PathLike[str], dataset: Any
) -> BadSamples | None:
    """Return the policy for unreadable samples; None if unreadable samples raise errors.

    Args:
        on_error: The treatment of unreadable samples.
        stages: The stages whose errors the policy handles.
        quarantine: The file that logs replaced and skipped samples.
        dataset: The loader's dataset.

    Raises:
        TypeError: If ``quarantine`` is not a path.
        ValueError: If the file cannot be written.
    """
    if on_error == "raise":
        return None
    # A sample of a Subset is replaced by one from the same Subset: held-out samples stay held out.
    num_samples = dataset.num_all_samples if isinstance(dataset, ShardDataset) else len(unwrap(dataset))
    starts = dataset.order.starts if isinstance(dataset, MixedDataset) else None
    return BadSamples(on_error, check_quarantine(quarantine), num_samples, stages, starts)


def check_order(order: Ordered, *, batch_size: int | None, drop_last: bool, in_order: bool) -> None:
    """Raise ValueError if a loader's arguments contradict its order."""
    if not in_order:
        raise ValueError(
            "in_order=False is not supported, because the loader's state counts batches in order: leave it unset"
        )
    if drop_last and order.remainder_policy.is_exact:
        raise ValueError(f"drop_last=True and remainder={order.remainder!r} contradict each other: remove one of them")
    said = order.batch_size
    if said is not None and said != (batch_size or 1):
        raise ValueError(
            f"the dataset or sampler has batch_size={said}, but the loader has batch_size={batch_size}: "
            "set it only on the shardio.DataLoader"
        )


def warn_of_whole_epochs(dataset: Any, sampler: Any) -> None:
    """Warn if each of several ranks gets all samples of one of shardio's map-style datasets.

    Args:
        dataset: The loader's dataset.
        sampler: The loader's batch sampler or, without batches, its sampler.
    """
    drawing = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(drawing) not in (RandomSampler, SequentialSampler):
        return  # Other samplers may split the samples over ranks.
    if isinstance(unwrap(dataset).dataset, MapDataset) and (num_ranks := find_world().world_size) > 1:
        warnings.warn(
            f"{type(drawing).__name__} does not split samples over ranks: each of {num_ranks} ranks gets all "
            f"{len(dataset)} of them. Pass sampler=EpochSampler(dataset), or torch's DistributedSampler, to the "
            "DataLoader",
            RuntimeWarning,
            stacklevel=find_user_level(),
        )


def warn_of_no_batches(split: Split, warned_of: set[Split]) -> None:
    """Warn once per split if this rank gets no batches in an epoch. ``warned_of``: the splits already warned about."""
    if split in warned_of:
        return
    warned_of.add(split)
    if split.remainder_policy.leaves_out:
        why = (
            f"{count(split.num_samples, 'sample')} cannot fill a batch on every rank (that would take "
            f"{count(split.world_size * split.batch_size, 'sample')}), and drop_last=True or "
            f"remainder={split.remainder!r} leaves them out: use a smaller batch_size, or drop_last=False and a "
            "different remainder"
        )
    else:
        why = (
            f"rank {split.rank} of {split.world_size} gets none of the {count(split.num_samples, 'sample')}: use fewer "
            "ranks, or remainder='pad'"
        )
    warnings.warn(f"this loader's epochs have no batches: {why}", RuntimeWarning, stacklevel=find_user_level())


def sole_split(num_samples: int, batch_size: int | None) -> Split:
    """Return the share of a single rank, without the samples that do not fill a batch."""
    alone: dict[str, int] = {"num_samples": num_samples, "start": 0, "rank": 0, "world_size": 1}
    return Split(**alone, batch_size=batch_size or 1, strata=1, remainder=DROP_LAST)


_log = logging.getLogger("shardio")

_COPIED = (
    *("batch_size", "batch_sampler", "num_workers", "collate_fn", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order", "pin_memory", "pin_memory_device"),
)
"""The attributes of a loader that are copied to its settings."""


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
        settings: The loader's settings.
        order: The loader's order; None if the order is not shardio's.
        epochs: The positions at which the loader's epochs begin, if the order is not shardio's.
        bad_samples: The policy for unreadable samples; None raises their errors.
        watches: The watches of the next epoch. The loader changes this list.
    """
    if settings.is_ours:
        assert settings.decoder is not None, "the dataset is shardio's"
        if replacements := settings.decoder.replacements:
            names = ", ".join(map(repr, replacements))
            _log.info("shardio's transforms replace the first steps of this dataset's transform: %s", names)
        planner = make_planner(loader, settings, order, epochs)
        batches = make_batch_settings(settings, settings.decoder, bad_samples)
        if not settings.num_workers:
            return CallingProcess(planner, batches, watches)
        return WorkerProcesses(
            planner, batches, watches, timeout_s=settings.timeout_s, closes_workers=not settings.persistent_workers
        )
    _log.info("the dataset's own methods make the samples of this loader: %s", fallback_reason(loader))
    source = make_source(loader, settings, order, epochs, bad_samples)
    if _can_fetch(loader, settings.worker_method, has_order=order is not None):
        return Fetching(settings, source, bad_samples)
    _log.info("torch's own iterators make the batches of this loader")
    return TorchIterators(settings, source, bad_samples)


def _can_fetch(loader: Any, worker_method: WorkerMethod, *, has_order: bool) -> bool:
    """Return whether the executor for any dataset can make a loader's batches; if not, torch's iterators do."""
    if isinstance(loader.dataset, torch.utils.data.IterDataPipe | torch.utils.data.MapDataPipe) and not has_order:
        return False  # torch's datapipes share seeds between ranks.
    if not loader.num_workers or worker_method == "thread":
        return True
    if starts_threads(loader.multiprocessing_context):  # torch reports the same worker id to all threads.
        return has_order or isinstance(unwrap(loader.dataset).dataset, Transformed)
    return hasattr(os, "memfd_create")


def make_source(
    loader: Any, settings: ExecutorSettings, order: LoaderOrder | None, epochs: Epochs, bad_samples: BadSamples | None
) -> FetchSource:
    """Return the sample source for an executor that calls the dataset. See :func:`make_executor`."""
    if order is None:
        return SamplerSource(loader, epochs, bad_samples)
    return OrderSource(settings, order.ordered, bad_samples)


def make_batch_settings(
    settings: ExecutorSettings, decoder: FieldDecoder, bad_samples: BadSamples | None
) -> BatchSettings:
    """Return the settings of the batches that shardio's own code makes. See :func:`make_executor`."""
    collation = _make_collation(settings, decoder)
    sizing = ChunkSizing(
        num_threads=max(settings.num_workers, 1),
        # Without images, a chunk needs no more memory than its part of the batch.
        chunk_size=decoder.chunk_size if decoder.image_names else CHUNK,
        prefetch=None if isinstance(settings.prefetch_factor, DefaultPrefetch) else settings.prefetch_factor,
        keeps_whole=collation is not None,
    )
    return BatchSettings(
        batch_size=settings.batch_size, sizing=sizing, bad_samples=bad_samples, pins=settings.pins, collation=collation
    )


def _make_collation(settings: ExecutorSettings, decoder: FieldDecoder) -> Collation | None:
    """Return the builder of whole batches; None if shardio can make them column by column."""
    is_own = settings.collate_fn is not collate_channels_last
    if not is_own and decoder.transform_sample is None:
        return None
    return Collation(settings.collate_fn, is_seeded=is_own and decoder.seed_transforms)


def make_planner(loader: Any, settings: ExecutorSettings, order: LoaderOrder | None, epochs: Epochs) -> Planner:
    """Return the planner of the batches that shardio's own code makes. See :func:`make_executor`."""
    dataset = unwrap(settings.dataset)
    if order is not None:
        return OrderPlanner(dataset, order.ordered)
    return SamplerPlanner(dataset, loader, epochs)


def is_torchs(loader: Any, worker_method: WorkerMethod) -> bool:
    """Return whether torch's own iterators make a loader's batches if the order is not shardio's."""
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
        timeout_s=loader.timeout,
        worker_method=arguments.worker_method,
        snapshot_every_n_steps=arguments.snapshot_every_n_steps,
        pins=loader.pin_memory and torch.cuda.is_available(),
        **{name: getattr(loader, name) for name in _COPIED},
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
    """Return the reason why shardio's own code cannot read a dataset: "" if its type is the reason; None if it can."""
    inner = unwrapped.dataset
    if isinstance(inner, Concatenated):
        return None
    if isinstance(inner, MixedSamples):
        return None if inner.obstacle is None else f": {inner.obstacle}"
    if isinstance(inner, ShardMapDataset | ImageFolder) or (is_whole and isinstance(inner, ShardDataset)):
        return f", which overrides {overridden}" if (overridden := find_overridden(type(inner))) else None
    if type(inner) is ConcatDataset:
        return f": {why_not_concatenated(unwrap_parts(inner))}"
    return ""
