"""Find what to change about a loader, and measure or estimate the speed-up of each change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
import torch.utils.data

from shardio.datasets import EpochSampler, ImageFolder
from shardio.device.tiles import TiledImages
from shardio.diagnosis.rates import (
    WORTHWHILE,
    Advice,
    LoaderEvidence,
    LoaderRun,
    holds,
    rebuild,
    share_of_stage,
    without,
)
from shardio.diagnosis.stored_forms import advise_forms
from shardio.loader import DataLoader
from shardio.loader.executor import TorchDataLoader
from shardio.transforms import Transform, is_made_for_pillow, replace_leading
from shardio.values import count, format_bytes

MUCH_MEMORY = 256 << 20
"""The total size of all copies of a dataset, in bytes, above which advice is given."""

MUCH_READING_S = 0.1
"""The reading time, in seconds, above which storage may be slow. Less may be due to the start of an epoch alone."""

BASE_THREADS = 3
"""The number of threads in one of torch's worker processes, not counting those of other libraries."""

FLOAT_CONVERSIONS = ("ToTensor", "ConvertImageDtype", "ToDtype", "Normalize")
"""torchvision's transforms that convert images to floating-point numbers; a GPU can convert them faster."""


def find_remedies(evidence: LoaderEvidence) -> list[Advice]:
    """Return all advice, the largest speed-up first, and then advice that is not about speed."""
    found = advise_forms(evidence)
    found += [advice for find in REMEDIES if (advice := find(evidence)) is not None]
    return sort_advice(found)


def sort_advice(advice: Iterable[Advice]) -> list[Advice]:
    """Return advice with the largest speed-up first, and then advice that is not about speed."""
    return sorted(advice, key=lambda each: -(each.speedup or 0.0))


def advise_prefetcher(run: LoaderRun, alone: LoaderRun) -> Iterator[Advice]:
    """Yield advice about a DevicePrefetcher without a device, given its speed and that of its loader alone."""
    own_s, speedup = run.own_cpu_s - alone.own_cpu_s, alone.samples_per_s / run.samples_per_s
    if speedup > WORTHWHILE and own_s > 0:
        yield Advice(
            cause=f"DevicePrefetcher prepares batches on the CPU: {1e6 * own_s:,.0f} µs per sample in this process",
            remedy="a GPU does this while it trains: measure on the machine that has one",
            speedup=speedup,
            is_measured=True,
        )


def _advise_workers(evidence: LoaderEvidence) -> Advice | None:
    loader, wanted = evidence.loader, evidence.num_processors
    if not evidence.is_torchs or loader.num_workers == wanted:
        return None
    speedup = evidence.try_change(num_workers=wanted)
    also = ""
    if loader.num_workers < wanted and speedup > WORTHWHILE:
        kind = "few"
    elif loader.num_workers > 2 * wanted and speedup > 1 / WORTHWHILE:
        kind = "many"
        saved = sum(worker.private_bytes for worker in evidence.run.workers) * (1 - wanted / loader.num_workers)
        also = f", which also saves about {format_bytes(saved)} of memory" if saved else ""
    else:
        return None
    have = count(loader.num_workers, "worker") if loader.num_workers else "no workers"
    cause = f"too {kind} workers: {have} on {count(wanted, 'processor')}"
    return Advice(cause=cause, remedy=f"num_workers={wanted}{also}", speedup=speedup, is_measured=True)


def _advise_threads(evidence: LoaderEvidence) -> Advice | None:
    num_threads = median(worker.num_threads for worker in evidence.run.workers or ()) if evidence.run.workers else 0
    num_workers = getattr(evidence.loader, "num_workers", 0) or 0
    extra = num_threads - BASE_THREADS
    if evidence.stats is not None or extra < 2 or num_workers * extra <= 2 * evidence.num_processors:
        return None
    library = "OpenCV" if "cv2" in sys.modules else "OpenMP"
    remedy = "cv2.setNumThreads(0)" if library == "OpenCV" else "torch.set_num_threads(1), OMP_NUM_THREADS=1"
    speedup = None
    if evidence.is_torchs:
        speedup = evidence.try_change(worker_init_fn=_SingleThreaded(evidence.loader.worker_init_fn))
    return Advice(
        cause=f"too many {library} threads: each of {num_workers} workers has {num_threads:.0f}, on "
        f"{count(evidence.num_processors, 'processor')}",
        remedy=f"call {remedy} in worker_init_fn or in the dataset",
        speedup=speedup,
        is_measured=speedup is not None,
    )


class _SingleThreaded:
    """A ``worker_init_fn`` that limits OpenCV and torch to one thread, after calling the user's own function."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker_id: int) -> None:
        if self._inner is not None:
            self._inner(worker_id)
        if (cv2 := sys.modules.get("cv2")) is not None:
            cv2.setNumThreads(0)
        torch.set_num_threads(1)


def _advise_start(evidence: LoaderEvidence) -> Advice | None:
    run, loader = evidence.run, evidence.loader
    if run.epoch_s is None or not getattr(loader, "num_workers", 0):
        return None
    speedup = run.epoch_s / max(run.epoch_s - run.start_s, 1e-3)
    if speedup < WORTHWHILE or getattr(loader, "persistent_workers", False):
        return None
    context = loader.multiprocessing_context
    method = context.get_start_method() if hasattr(context, "get_start_method") else context
    how = f" with {method}" if method not in (None, "fork") else ""
    return Advice(
        cause=f"a slow start to each epoch: the first batch takes {run.start_s:.2f} s of {run.epoch_s:.2f} s",
        remedy=f"persistent_workers=True: {count(loader.num_workers, 'worker')} start again{how} in each epoch",
        speedup=speedup,
    )


def _advise_replacement(evidence: LoaderEvidence) -> Advice | None:
    """Suggest shardio's DataLoader, with shardio's ImageFolder in place of torchvision's."""
    loader = evidence.loader
    if type(loader) is not TorchDataLoader or loader.batch_size is None:
        return None
    dataset: Any = loader.dataset
    is_folder = (type(dataset).__module__, type(dataset).__name__) == ("torchvision.datasets.folder", "ImageFolder")
    if not is_folder or dataset.target_transform is not None:
        speedup = evidence.try_change(DataLoader)
        if speedup < WORTHWHILE:
            return None
        return Advice(
            cause="torch's DataLoader",
            remedy="loader = shardio.DataLoader(…) with the same arguments",
            speedup=speedup,
            is_measured=True,
        )
    pipeline = dataset.transform
    if not isinstance(steps := getattr(pipeline, "transforms", None), list):
        return None
    names = [type(step).__name__ for step in steps]
    dropped = [name for name in names if name in FLOAT_CONVERSIONS]
    if dropped:  # shardio's transforms replace the steps before PILToTensor. Its result is a tensor, as before.
        is_kept = [name not in (*FLOAT_CONVERSIONS, "ToImage") for name in names]
        kept, place = [step for step, keeps in zip(steps, is_kept, strict=True) if keeps], names.index(dropped[0])
        package = sys.modules[type(pipeline).__module__.rpartition(".")[0]]
        kept.insert(sum(is_kept[:place]), package.PILToTensor())
        pipeline = type(pipeline)(kept)
    folder = ImageFolder(dataset.root, transform=pipeline)
    speedup = evidence.try_loader(rebuild(loader, DataLoader, dataset=folder, sampler=EpochSampler(folder)))
    change = f"  # with PILToTensor() in place of {' and '.join(dropped)}" if dropped else ""
    normalize = "\nloader = shardio.DevicePrefetcher(loader, normalize=(mean, std))" if dropped else ""
    return Advice(
        cause="torchvision's ImageFolder decodes whole images, one at a time",
        remedy=f"dataset = shardio.ImageFolder({dataset.root!r}, transform=…){change}\n"
        f"loader = shardio.DataLoader(dataset, sampler=shardio.EpochSampler(dataset), …){normalize}",
        speedup=speedup,
        is_measured=True,
    )


def _advise_device(evidence: LoaderEvidence) -> Advice | None:
    """Suggest decoding tiled JPEGs on the GPU. Only the workers' part is measured, not the GPU's."""
    stats, loader = evidence.stats, evidence.loader
    if stats is None or stats.stored is None or not stats.stored.has_gpu or stats.stored.jpeg != "tile":
        return None
    if stats.num_images_by_decoder.get("device"):
        return None
    with loader.watch_memory(lambda memory: None, takes_tiles=True):
        run = evidence.measure(loader)
    # Workers decode images that no device can decode, such as those with operations after the crop.
    if not holds(run.batches[0], TiledImages) or (speedup := evidence.compare(run)) < WORTHWHILE:
        return None
    return Advice(
        cause=f"decoding takes {share_of_stage(stats, 'decode'):.0%} of the workers' busy time",
        remedy="shardio.DevicePrefetcher(loader, decode='device'): the workers only collect tiles, and the GPU decodes "
        "(pip install 'shardio-loader[cuda]')",
        speedup=speedup,
        is_measured=True,
    )


def _advise_float(evidence: LoaderEvidence) -> Advice | None:
    if evidence.profile is None:
        return None
    shares = {
        stage.name: share
        for stage, share in evidence.profile.stages.items()
        if stage.kind == "transform" and stage.name in FLOAT_CONVERSIONS
    }
    speedup = without(sum(shares.values()))
    if speedup < WORTHWHILE:
        return None
    return Advice(
        cause=f"{' and '.join(shares)} on the CPU: {sum(shares.values()):.0%} of a sample's time, and batches are four "
        "times as large",
        remedy="PILToTensor() instead, so batches are uint8; the GPU does the rest: "
        "shardio.DevicePrefetcher(loader, normalize=(mean, std))",
        speedup=speedup,
    )


def _advise_slow_code(evidence: LoaderEvidence) -> Advice | None:
    """Name the user's slowest transform or function, if it takes much of the time."""
    profile = evidence.profile
    if profile is None or not profile.stages:
        return None
    stages = {
        stage: share
        for stage, share in profile.stages.items()
        if stage.kind in ("transform", "your code")
        and stage.name not in FLOAT_CONVERSIONS
        and not stage.name.startswith(f"{_name_collation(evidence)} (")
    }
    stage, share = max(stages.items(), key=lambda item: item[1], default=(None, 0.0))
    if stage is None or share < 0.3:
        return None
    cause = f"{stage} takes {share:.0%} of a sample's time"
    if profile.waits:
        return Advice(cause=f"{cause}, and mostly waits", remedy="read in larger pieces, or use more workers")
    return Advice(
        cause=cause,
        remedy="make it faster: use numpy instead of loops, or shardio.transforms, which are compiled. The estimate "
        "assumes that this code becomes twice as fast",
        speedup=without(share / 2),
    )


def _advise_collation(evidence: LoaderEvidence) -> Advice | None:
    profile, name = evidence.profile, _name_collation(evidence)
    if profile is None:
        return None
    share = sum(share for stage, share in profile.stages.items() if stage.name.startswith(f"{name} ("))
    if share < 0.3:
        return None
    return Advice(
        cause=f"collate_fn ({name}) takes {share:.0%} of a sample's time",
        remedy="copy each sample once into a preallocated array, or return values of equal shapes and use the default",
        speedup=without(share),
    )


def _name_collation(evidence: LoaderEvidence) -> str:
    collate_fn = getattr(evidence.loader, "collate_fn", None)
    return getattr(collate_fn, "__qualname__", type(collate_fn).__name__)


def _advise_storage(evidence: LoaderEvidence) -> Advice | None:
    profile, stats = evidence.profile, evidence.stats
    is_packed = stats is not None and stats.stored is not None and stats.stored.in_shards
    if stats is not None:
        share = share_of_stage(stats, "read")
        is_slow = share > 0.5 and stats.read_s > MUCH_READING_S
    else:
        share = 0.0 if profile is None else profile.share("reading")
        is_slow = profile is not None and profile.waits and share > 0.4
    if not is_slow:
        return None
    packing = (
        f"pack the samples (shardio pack {evidence.source} OUT): shards are read in large pieces, ahead of training"
    )
    return Advice(
        cause=f"slow storage: reading takes {share:.0%} of a sample's time",
        remedy="use a local disk, cache= for a bucket, or more workers" if is_packed else packing,
        speedup=without(share),
    )


def _advise_copies(evidence: LoaderEvidence) -> Advice | None:
    """Find a collection whose objects each worker process copies, because reference counting writes to them."""
    dataset, num_workers = getattr(evidence.loader, "dataset", None), getattr(evidence.loader, "num_workers", 0)
    if not num_workers or not hasattr(dataset, "__dict__"):
        return None
    for name, value in vars(dataset).items():
        if not isinstance(value, list | tuple | dict) or len(value) < 10_000:
            continue
        some = list(islice(value.items() if isinstance(value, dict) else value, 0, len(value), len(value) // 1000))
        size = sys.getsizeof(value) + len(value) * fmean(map(_measure, some))
        if size * num_workers > MUCH_MEMORY:
            return Advice(
                cause=f"the dataset is copied to each worker: {type(dataset).__name__}.{name} has {len(value):,} "
                f"objects, {format_bytes(size)}, times {count(num_workers, 'worker')}",
                remedy=f"self.{name} = shardio.SharedList({name}), or a numpy array",
            )
    return None


def _measure(value: Any) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, list | tuple):
        size += sum(map(_measure, value))
    elif isinstance(value, dict):
        size += sum(map(_measure, value)) + sum(map(_measure, value.values()))
    return size


def _advise_order(evidence: LoaderEvidence) -> Advice | None:
    """Find out from the labels in the first batches whether sorted data is barely shuffled."""
    labels = evidence.run.labels
    if len(labels) < 2:
        return None
    known = getattr(evidence.dataset, "classes", None)
    num_classes = len(known) if isinstance(known, Sized) else len(set().union(*labels))
    size = fmean(map(len, labels))
    expected = num_classes * (1 - (1 - 1 / max(num_classes, 1)) ** size)
    found = fmean(len(set(own)) for own in labels)
    if expected < 3 or found > expected / 2:
        return None
    return Advice(
        cause=f"batches are barely shuffled: a batch of {size:.0f} has {found:.1f} of {num_classes} classes, but "
        f"{expected:.1f} would be expected",
        remedy="shuffle=True, sampler=shardio.EpochSampler(dataset), or a larger window (see shardio order)",
    )


def _advise_shared_memory(evidence: LoaderEvidence) -> Advice | None:
    loader = evidence.loader
    num_workers = getattr(loader, "num_workers", 0)
    if evidence.stats is not None or not num_workers or evidence.shm_free is None:
        return None
    num_ahead = num_workers * (loader.prefetch_factor or 2)
    size = sum(value.nbytes for batch in evidence.run.batches[:1] for value in _find_tensors(batch)) * num_ahead
    if size < evidence.shm_free:
        return None
    return Advice(
        cause=f"/dev/shm is too small: {num_ahead} batches need {format_bytes(size)}, and "
        f"{format_bytes(evidence.shm_free)} is free",
        remedy="docker run --shm-size=8g, or shardio.DataLoader, which does not use /dev/shm",
    )


def _find_tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _find_tensors(value)


def _advise_whole_sample(evidence: LoaderEvidence) -> Advice | None:
    """Find another library's image transforms where shardio cannot recognize them."""
    decoder = getattr(evidence.dataset, "decoder", None)
    transform = getattr(decoder, "transform_sample", None)
    if evidence.profile is None or transform is None:
        return None
    names = [stage.name for stage in evidence.profile.stages if stage.kind == "transform"]
    share = evidence.profile.share("transform")
    if not names or share < 0.1:
        return None
    return Advice(
        cause=f"image transforms in transform_sample ({', '.join(names)}), where shardio decodes whole images for them",
        remedy="pass them as transform=, so that shardio decodes only the crops; keep the rest in transform_sample",
        speedup=without(share),
    )


def _advise_conversion(evidence: LoaderEvidence) -> Advice | None:
    """Find a torchvision pipeline that works on tensors of whole images because it does not convert Pillow images."""
    decoder = getattr(evidence.dataset, "decoder", None)
    transform, decode = getattr(decoder, "transform", None), getattr(decoder, "decode", None)
    if evidence.profile is None or decode != "array" or is_made_for_pillow(transform):
        return None
    found = replace_leading(transform, "pil")
    if found is None or replace_leading(transform, "array") is not None:
        return None
    names = [type(step).__name__ for step in found.transforms if isinstance(step, Transform)]
    stages = evidence.profile.stages.items()
    speedup = without(sum(share for stage, share in stages if stage.kind == "transform" and stage.name in names))
    if speedup < WORTHWHILE:
        return None
    return Advice(
        cause=f"torchvision's transforms ({', '.join(names)}) work on tensors of whole images",
        remedy=f"insert PILToTensor() after {names[-1]}: shardio then replaces the steps before it with its own, which "
        "give the pixels that torchvision gives for Pillow images, and decode only what they need",
        speedup=speedup,
    )


REMEDIES: Sequence[Callable[[LoaderEvidence], Advice | None]] = (
    _advise_replacement,
    _advise_device,
    _advise_workers,
    _advise_threads,
    _advise_start,
    _advise_float,
    _advise_whole_sample,
    _advise_conversion,
    _advise_slow_code,
    _advise_collation,
    _advise_storage,
    _advise_copies,
    _advise_order,
    _advise_shared_memory,
)
