"""``shardio bench``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardio.cli.options import (
    BatchSize,
    CacheFolder,
    CacheShared,
    CacheSize,
    NumWorkers,
    OnError,
    RemoteArguments,
    StorageOptionTexts,
    has_class_folders,
    make_loader_options,
    read_remote_arguments,
    report_rank,
    suggest_on_error,
)
from shardio.cli.terminal import count, echo, name_of, value_errors_as_usage_errors
from shardio.images.formats import IMAGE_FORMATS
from shardio.process import count_processors

if TYPE_CHECKING:
    from shardio.datasets import ImageFolder
    from shardio.loader import DataLoader, LoaderStats


STAGES = {
    "read": "reading bytes",
    "transform": "reading image headers, choosing crops",
    "python": "your own code",
    "decode": "decoding, cropping, resizing",
    "idle": "idle until a batch is taken",
}
"""Descriptions of the stages on which workers spend their time."""

INTERRUPTED = 130
"""The exit code that shells report after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFormat:
    """The format in which samples are stored.

    Attributes:
        in_shards: Whether the samples are in shards rather than in class folders.
        has_images: Whether images are loaded.
        formats: The formats of the images, such as ``"PNG"``, as far as they are known.
        jpeg: The treatment of JPEGs when the shards were packed: ``copy``, ``tile`` or ``reencode``; None if unknown.
    """

    in_shards: bool
    has_images: bool
    formats: frozenset[str] = frozenset()
    jpeg: Any = None


def stage_seconds(stats: LoaderStats) -> dict[str, float]:
    """Return the total seconds that all workers spent on each stage."""
    times = {"read": stats.read_s, "transform": stats.transform_s - stats.python_s, "decode": stats.decode_s}
    if stats.in_python:
        times["python"] = stats.python_s
    return {**times, "idle": stats.idle_s} if stats.num_workers else times


def advise(stats: LoaderStats, stored: DatasetFormat, num_processors: int, *, is_first: bool) -> str:
    """Return a sentence that names the bottleneck of an epoch and suggests remedies.

    Args:
        stats: The statistics of the epoch.
        stored: The format of the samples.
        num_processors: The number of processors that this process may use.
        is_first: Whether workers started in this epoch.
    """
    times = stage_seconds(stats)
    # A running worker is always in one of the stages, so the remaining time passed before it ran.
    start_s = stats.elapsed_s - sum(times.values()) / max(stats.num_workers, 1)
    if stats.num_workers and start_s > stats.elapsed_s / 2:
        if not is_first:
            return f"this epoch ({stats.elapsed_s:.2f} s) is too short to judge: use a dataset with more samples"
        return (
            f"this epoch is too short to judge: workers took about {start_s:.2f} s of {stats.elapsed_s:.2f} s to "
            "start. They start only once: see the second epoch (--epochs 2)"
        )
    longest = max(times, key=lambda stage: times[stage])
    more_workers = (
        f"more workers (up to {num_processors}, the number of processors)" if stats.num_workers < num_processors else ""
    )
    match longest:
        case "read":
            bottleneck = "storage is the bottleneck"
            remedies = ["more workers (more reads at a time)", _faster_storage(stored)]
        case "transform":
            bottleneck = "per-image overhead is the bottleneck because the images are small"
            remedies = [more_workers]
        case "python":
            bottleneck = f"your own code is the bottleneck ({', '.join(stats.in_python)})"
            remedies = [more_workers, "less work in it"]
        case "decode":
            bottleneck = "decoding is the bottleneck"
            remedies = [more_workers, _less_to_decode(stored)]
        case _:
            bottleneck = "handing batches to the training process is the bottleneck"
            remedies = ["a larger --batch-size"]
    suggestion = ", or ".join(filter(None, remedies))
    remedy = f"try {suggestion}" if suggestion else "there are already at least as many workers as processors"
    workers = count(stats.num_workers, "worker") if stats.num_workers else "no workers"
    return f"{workers} on {count(num_processors, 'processor')}: {bottleneck}; {remedy}"


def _faster_storage(stored: DatasetFormat) -> str:
    return "a local disk, or larger shards" if stored.in_shards else "a local disk, or shards (shardio pack)"


def _less_to_decode(stored: DatasetFormat) -> str:
    if not stored.has_images:
        return ""
    if others := sorted(stored.formats - {"JPEG"}):
        return (
            f"JPEGs instead of {' and '.join(others)} (pack with --convert-to jpeg --jpeg tile, which changes pixels "
            "slightly)"
        )
    if stored.jpeg == "reencode":
        return "smaller images (pack with a smaller --max-side)"
    if stored.jpeg == "tile":
        return "smaller images (pack with --jpeg reencode --max-side 400)"
    return "images that decode faster (pack with --jpeg tile, or with --jpeg reencode --max-side 400)"


def bench(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest, a tar, a directory of tars, or class folders of images.",
        ),
    ],
    batch_size: BatchSize = 128,
    num_workers: NumWorkers = 2,
    image_size: Annotated[int, typer.Option(min=1, help="Side length of the random crops in pixels.")] = 224,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs. The first one includes worker start-up.")] = 1,
    batches: Annotated[int | None, typer.Option(min=1, help="Stop each epoch after this many batches.")] = None,
    fields: Annotated[
        str | None,
        typer.Option(help="Comma-separated fields to load from shards, such as image,label (default: image)."),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Your own transform, as package.module:name or path/to/file.py:name, as for shardio augment (default: "
            "random crops and flips).",
        ),
    ] = None,
    decode: Annotated[
        Literal["array", "pil"], typer.Option(help="What your transform takes: arrays or Pillow images.")
    ] = "array",
    on_error: OnError = "raise",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per epoch.")] = False,
    storage_option: StorageOptionTexts = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    cache_shared: CacheShared = False,
) -> None:
    """Load a dataset as training would, and report the speed and the bottleneck.

    Press Ctrl-C to stop early and print the results so far.

    Example: shardio bench packed/train --num-workers 8 --epochs 2
    """
    from shardio.loader.choice import fallback_reason
    from shardio.loader.data_loader import NO_STATS

    remote = read_remote_arguments(storage_option, cache, cache_size, cache_shared)
    with value_errors_as_usage_errors():
        options: dict[str, Any] = {"transform": _choose_transform(transform, image_size), "decode": decode}
        loader_options = make_loader_options(batch_size, num_workers, on_error)
        loader, stored = _make_loader(source, fields, options, loader_options, remote)

    report_rank()

    def report(epoch: int, meter: ThroughputMeter) -> None:
        why = fallback_reason(loader)
        stats = loader.stats() if why is None else None
        if as_json:
            echo(_as_json(epoch, meter, stats))
            return
        lines = [_describe_speed(epoch, meter)]
        if stats is None:
            lines.append(NO_STATS.format(reason=why))
        elif meter.num_batches:
            lines += _describe_stages(stats, stored, is_first=epoch == 0)
        echo("\n  ".join(lines))

    epoch, meter = 0, ThroughputMeter()
    try:
        for epoch in range(epochs):
            meter = ThroughputMeter()
            with suggest_on_error(on_error):
                meter.watch(islice(loader, batches))
            report(epoch, meter)
    except KeyboardInterrupt:
        report(epoch, meter)
        echo("interrupted: the last epoch is incomplete", err=True)
        raise typer.Exit(INTERRUPTED) from None


@dataclass(slots=True, kw_only=True)
class ThroughputMeter:
    """Measures the throughput of an epoch of any loader. Times are in seconds since the meter was created.

    Attributes:
        num_batches: The number of batches so far.
        num_samples: The number of samples in them.
        elapsed_s: The time of the last batch so far.
        first_batch_s: The time of the first batch; None before that.
        num_first: The number of samples in the first batch.
        started: The value of time.perf_counter() when the meter was created.
    """

    num_batches: int = 0
    num_samples: int = 0
    elapsed_s: float = 0.0
    first_batch_s: float | None = None
    num_first: int = 0
    started: float = field(default_factory=time.perf_counter)

    def watch(self, batches: Iterable[Any]) -> None:
        """Iterate over batches and count them."""
        for batch in batches:
            self.elapsed_s = time.perf_counter() - self.started
            num_samples = _count_samples(batch)
            if self.first_batch_s is None:
                self.first_batch_s, self.num_first = self.elapsed_s, num_samples
            self.num_batches += 1
            self.num_samples += num_samples

    @property
    def samples_per_s(self) -> float:
        """The rate, including the time that workers take to start."""
        return self.num_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def samples_per_s_after_first_batch(self) -> float | None:
        """The rate after the first batch; None if there are fewer than two batches."""
        if self.num_batches < 2 or self.first_batch_s is None:
            return None
        return (self.num_samples - self.num_first) / (self.elapsed_s - self.first_batch_s)


def _count_samples(batch: Any) -> int:
    column = batch[0] if isinstance(batch, list | tuple) else batch
    while isinstance(column, dict):
        column = next(iter(column.values()))
    return len(column)


def _choose_transform(name: str | None, image_size: int) -> Any:
    from shardio.cli.options import make_transform
    from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

    if name is None:
        return Compose([RandomResizedCrop(image_size), RandomHorizontalFlip()])
    return make_transform(None, name, image_size)


def _make_loader(
    source: Path, fields: str | None, settings: dict[str, Any], options: dict[str, Any], remote: RemoteArguments
) -> tuple[DataLoader, DatasetFormat]:
    import shardio
    from shardio.storage import make_access

    if has_class_folders(source, make_access(**remote)):
        if fields is not None:
            raise ValueError(f"--fields applies only to shards, but {name_of(source)} has class folders")
        folder = shardio.ImageFolder(source, **settings, **remote)
        loader = shardio.DataLoader(folder, sampler=shardio.EpochSampler(folder), **options)
        return loader, DatasetFormat(in_shards=False, has_images=True, formats=_find_formats(folder))
    names = ("image",) if fields is None else tuple(fields.split(","))
    has_images = "image" in names
    dataset = shardio.ShardDataset(source, fields=names, shuffle=True, **remote, **(settings if has_images else {}))
    manifest = dataset.table.manifest
    stored = DatasetFormat(
        in_shards=True,
        has_images=has_images,
        formats=frozenset(IMAGE_FORMATS[name] for name in manifest.fields if name in IMAGE_FORMATS),
        jpeg=manifest.pack.get("jpeg"),
    )
    return shardio.DataLoader(dataset, **options), stored


def _find_formats(folder: ImageFolder) -> frozenset[str]:
    """Return the formats of class folders' images, by the suffixes of up to 1,000 evenly spaced ones."""
    step = -(-len(folder) // 1000)
    paths = (folder.samples[index][0] for index in range(0, len(folder), step))
    return frozenset(IMAGE_FORMATS[path.rpartition(".")[2].lower()] for path in paths)


def _as_json(epoch: int, meter: ThroughputMeter, stats: LoaderStats | None) -> str:
    from shardio.world import find_world

    counts = {name: getattr(meter, name) for name in ("num_batches", "num_samples", "elapsed_s", "first_batch_s")}
    rates = {name: getattr(meter, name) for name in ("samples_per_s", "samples_per_s_after_first_batch")}
    return json.dumps(
        {"epoch": epoch, **asdict(find_world()), **counts, **({} if stats is None else asdict(stats)), **rates}
    )


def _describe_speed(epoch: int, meter: ThroughputMeter) -> str:
    said = (
        f"epoch {epoch}: {count(meter.num_samples, 'sample')} in {count(meter.num_batches, 'batch', 'batches')}, "
        f"{meter.elapsed_s:.2f} s, {meter.samples_per_s:,.0f} samples/s"
    )
    if meter.first_batch_s is None:
        return f"{said}: no batches"
    said += f"; first batch after {1000 * meter.first_batch_s:.0f} ms"
    rate = meter.samples_per_s_after_first_batch
    return said if rate is None else f"{said}, then {rate:,.0f} samples/s"


def _describe_stages(stats: LoaderStats, stored: DatasetFormat, *, is_first: bool) -> list[str]:
    """Return the lines of a table of the stages, of the use of the user's transform, and of advice."""
    times = stage_seconds(stats)
    total_s = sum(times.values()) or 1.0
    lines = [f"{'stage (all workers)':<40} {'seconds':>9} {'share':>6} {'µs/sample':>12}"]
    for stage, seconds in times.items():
        us_per_sample = 1e6 * seconds / max(stats.num_samples, 1)
        lines.append(f"{STAGES[stage]:<40} {seconds:>9.3f} {seconds / total_s:>6.0%} {us_per_sample:>12.1f}")
    if stats.recognised:
        lines.append(f"replaced by shardio's own transforms: {', '.join(stats.recognised)}")
    if stats.in_python:
        lines.append(f"run in Python: {', '.join(stats.in_python)}")
    return [*lines, advise(stats, stored, count_processors(), is_first=is_first)]
