"""Implement ``shardio doctor`` and ``bench``, which measure loaders."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardio.cli.options import (
    LOADING,
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
    make_transform,
    read_access,
    read_remote_arguments,
    report_rank,
    suggest_on_error,
)
from shardio.cli.terminal import echo, name_of, value_errors_as_usage_errors
from shardio.images.formats import IMAGE_FIELDS
from shardio.values import count, format_bytes, load_function

if TYPE_CHECKING:
    from shardio.loader import DataLoader, LoaderStats
    from shardio.shards import ShardTable
    from shardio.storage.remote import StoreSpeed

in_loading, in_output, of_samples = (
    partial(typer.Option, rich_help_panel=panel) for panel in (LOADING, "Output", "Samples")
)
"""Functions that create an option in a panel of ``--help``."""

MAX_TARS = 8
"""The maximum number of tars that ``shardio doctor`` reads to measure their store."""

NUMS_REQUESTS = (1, 2, 4, 8, 16, 32)
"""The numbers of simultaneous requests for which ``shardio doctor`` measures the bandwidth."""


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A function that returns any loader, such as train.py:make_loader; or a packed dataset or class "
            "folders, which are loaded with random crops.",
        ),
    ],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:NAME",
            help="The training step, a function of a batch, such as train.py:step. With it, the doctor can say whether "
            "loading is the bottleneck.",
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Samples per second that training needs (datasets only).")
    ] = None,
    batch_size: BatchSize = 128,
    num_workers: NumWorkers = 2,
    seconds: Annotated[float, typer.Option(min=0.01, help="Duration of each measurement in seconds.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Find out whether a loader holds training back, which stage is responsible, and what to change.

    The doctor measures the loader, the step and both together, and then tries changes, such as different numbers of
    workers. For a dataset in an object store, the doctor also measures the store by reading parts of up to 8 shards.

    Example: shardio doctor train.py:make_loader --step train.py:step
    """
    import shardio

    report_rank()
    loader: Any = None
    store: StoreNeeds | None = None
    with value_errors_as_usage_errors():
        step_function = None if step is None else load_function(step)
        path = target.rpartition(":")[0]
        if path and "://" not in target and not Path(target).exists():
            if rate is not None:
                raise ValueError("--rate applies only to datasets: pass --step instead")
            loader = load_function(target)()
        else:
            remote = read_remote_arguments(storage_option, None, None, False)
            has_images, store = _examine(target, seconds, storage_option)
            if has_images:
                transform = {"transform": _choose_transform(None, 224)}
                options = make_loader_options(batch_size, num_workers, "raise")
                loader = _make_loader(target, None, transform, options, remote)
    diagnosis = None if loader is None else shardio.doctor(loader, step_function, seconds=seconds)
    if as_json:
        found = {"store": store and store.as_json(), "loader": diagnosis and diagnosis.as_json()}
        echo(json.dumps(found, indent=1))
        return
    lines = [] if store is None else [*store.describe(rate), ""]
    if diagnosis is not None:
        lines.append(str(diagnosis))
        if rate is not None:
            lines.append(f"needed: {rate:,.0f} samples/s; the loader delivers {diagnosis.run.samples_per_s:,.0f}")
    echo("\n".join(lines).rstrip())


@dataclass(frozen=True, slots=True)
class StoreNeeds:
    """The speed of a dataset's store, and the mean size of a sample in bytes."""

    speed: StoreSpeed
    sample_size: float

    @property
    def samples_per_s(self) -> float:
        """The maximum number of samples per second that the store can deliver."""
        return self.speed.best / self.sample_size

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "latency_s": self.speed.latency_s,
            "bytes_per_s": {str(number): found for number, found in self.speed.bytes_per_s.items()},
            "saturated_by": self.speed.num_saturating,
            "bytes_per_sample": self.sample_size,
            "samples_per_s": self.samples_per_s,
        }

    def describe(self, rate: float | None) -> Iterator[str]:
        """Yield human-readable lines, with a verdict if the needed number of samples per second is given."""
        speed, size = self.speed, self.sample_size
        yield f"latency    {1000 * speed.latency_s:.1f} ms for one byte"
        for number, found in speed.bytes_per_s.items():
            yield f"bandwidth  {format_bytes(found)}/s with {count(number, 'request')} at a time"
        yield f"saturated  by {count(speed.num_saturating, 'request')} at a time; shardio uses 16 to read ahead"
        yield f"samples    at most {self.samples_per_s:,.0f} samples/s of {format_bytes(size)}, without a cache"
        if rate is not None:
            is_enough = rate <= self.samples_per_s
            verdict = "the store is fast enough" if is_enough else "the store is too slow: cache the data (cache=)"
            yield f"needed     {format_bytes(rate * size)}/s for {rate:,.0f} samples/s: {verdict}"


def _examine(source: str, seconds: float, storage_option: list[str] | None) -> tuple[bool, StoreNeeds | None]:
    """Return whether a dataset has images, and its store's speed (None for class folders and local images)."""
    from shardio.shards import open_table

    access = read_access(storage_option)
    if has_class_folders(source, access):
        return True, None
    table = open_table(source, access)
    has_images = not set(IMAGE_FIELDS).isdisjoint(table.manifest.fields)
    is_local = all(tar.store.is_local for tar in table.tars)
    return has_images, None if has_images and is_local else _measure_store(table, seconds)


def _measure_store(table: ShardTable, seconds: float) -> StoreNeeds:
    from shardio.storage.remote import measure_store

    tars = table.tars[:: -(-len(table.tars) // MAX_TARS)]
    with ExitStack() as stack:
        speed = measure_store([stack.enter_context(closing(tar.open())) for tar in tars], NUMS_REQUESTS, seconds)
    return StoreNeeds(speed, table.manifest.num_bytes / table.manifest.num_samples)


INTERRUPTED = 130
"""The exit code that shells report after Ctrl-C."""


def bench(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest, a tar, a directory of tars, or class folders of images.",
        ),
    ],
    batch_size: BatchSize = 128,
    num_workers: NumWorkers = 2,
    image_size: Annotated[int, of_samples(min=1, help="Side length of the random crops in pixels.")] = 224,
    epochs: Annotated[int, in_loading(min=1, help="Number of epochs. The first epoch includes worker start-up.")] = 1,
    batches: Annotated[int | None, in_loading(min=1, help="Stop each epoch after this many batches.")] = None,
    fields: Annotated[
        str | None, of_samples(help="Comma-separated fields to load from shards, such as image,label (default: image).")
    ] = None,
    transform: Annotated[
        str | None,
        of_samples(
            metavar="MODULE:NAME",
            help="Your own transform, as package.module:name or path/to/file.py:name, as for shardio augment (default: "
            "random crops and flips).",
        ),
    ] = None,
    decode: Annotated[
        Literal["array", "pil"], of_samples(help="Type of the images for your transform: arrays or Pillow images.")
    ] = "array",
    on_error: OnError = "raise",
    trace: Annotated[
        Path | None,
        in_output(
            metavar="FILE",
            help="Write what the workers did in the last epoch, and when batches were late, to this JSON file. Open it "
            "at https://ui.perfetto.dev.",
        ),
    ] = None,
    as_json: Annotated[bool, in_output("--json", help="Print JSON, one line per epoch.")] = False,
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
    from shardio.loader.statistics import describe_format, measure_decoded

    remote = read_remote_arguments(storage_option, cache, cache_size, cache_shared)
    with value_errors_as_usage_errors():
        options: dict[str, Any] = {"transform": _choose_transform(transform, image_size), "decode": decode}
        loader_options = make_loader_options(batch_size, num_workers, on_error)
        loader = _make_loader(source, fields, options, loader_options, remote)
    stored = measure_decoded(loader.dataset, describe_format(loader.dataset))

    report_rank()

    def report(epoch: int, meter: ThroughputMeter) -> None:
        why = fallback_reason(loader)
        stats = loader.stats(trace=trace) if why is None else None
        if as_json:
            echo(_as_json(epoch, meter, stats))
            return
        lines = [_describe_speed(epoch, meter)]
        if stats is None:
            lines.append(NO_STATS.format(reason=why))
        elif meter.num_batches:
            lines += replace(stats, stored=stored).describe_stages()
        echo("\n  ".join(lines))

    epoch, meter = 0, ThroughputMeter()
    try:
        for epoch in range(epochs):
            meter = ThroughputMeter()
            with suggest_on_error(on_error):
                meter.watch(islice(loader, batches))
            report(epoch, meter)
        if not as_json and stored is not None and stored.has_images:
            echo(f"hint: shardio doctor {shlex.quote(source)} measures the gain from possible changes", err=True)
    except KeyboardInterrupt:
        report(epoch, meter)
        echo("interrupted: the last epoch is incomplete", err=True)
        raise typer.Exit(INTERRUPTED) from None


@dataclass(slots=True, kw_only=True)
class ThroughputMeter:
    """A meter for the throughput of an epoch of any loader. Times are in seconds since the meter was created.

    Attributes:
        num_batches: The number of batches so far.
        num_samples: The number of samples so far.
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
        from shardio.diagnosis.rates import count_samples

        for batch in batches:
            self.elapsed_s = time.perf_counter() - self.started
            num_samples = count_samples(batch)
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


def _choose_transform(name: str | None, image_size: int) -> Any:
    from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

    if name is None:
        return Compose([RandomResizedCrop(image_size), RandomHorizontalFlip()])
    return make_transform(None, name, image_size)


def _make_loader(
    source: str, fields: str | None, settings: dict[str, Any], options: dict[str, Any], remote: RemoteArguments
) -> DataLoader:
    import shardio
    from shardio.storage import make_access

    if has_class_folders(source, make_access(**remote)):
        if fields is not None:
            raise ValueError(f"--fields applies only to shards, but {name_of(source)} has class folders")
        folder = shardio.ImageFolder(source, **settings, **remote)
        return shardio.DataLoader(folder, sampler=shardio.EpochSampler(folder), **options)
    names = ("image",) if fields is None else tuple(fields.split(","))
    own = settings if "image" in names else {}
    return shardio.DataLoader(shardio.ShardDataset(source, fields=names, shuffle=True, **remote, **own), **options)


def _as_json(epoch: int, meter: ThroughputMeter, stats: LoaderStats | None) -> str:
    from shardio.world import find_world

    counts = {name: getattr(meter, name) for name in ("num_batches", "num_samples", "elapsed_s", "first_batch_s")}
    rates = {name: getattr(meter, name) for name in ("samples_per_s", "samples_per_s_after_first_batch")}
    stages = {} if stats is None else asdict(stats)
    return json.dumps({"epoch": epoch, **asdict(find_world()), **counts, **stages, **rates})


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
