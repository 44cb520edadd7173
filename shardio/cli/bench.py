"""``shardio bench``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.advice import STAGES, Stored, advise, share_out
from shardio.cli.console import count, wrong_values_are_wrong_usage
from shardio.cli.loading import (
    BatchSize,
    NumWorkers,
    OnError,
    bad_samples_name_the_option,
    has_class_folders,
    make_loader_options,
    tell_of_the_share,
)
from shardio.cli.terminal import echo
from shardio.processors import count_processors

if TYPE_CHECKING:
    from shardio.loader import DataLoader, LoaderStats

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def bench(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, tars, or class folders of images.")],
    batch_size: BatchSize = 128,
    num_workers: NumWorkers = 2,
    image_size: Annotated[int, typer.Option(min=1, help="Side of the random crops in pixels.")] = 224,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs; workers start in the first.")] = 1,
    batches: Annotated[int | None, typer.Option(min=1, help="End each epoch after so many batches.")] = None,
    fields: Annotated[
        str | None, typer.Option(help="Fields of shards to load, as image,label or bin; by default the image.")
    ] = None,
    on_error: OnError = "raise",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, a line an epoch.")] = False,
) -> None:
    """Load a dataset as training would, and say how fast that is and what holds it back.

    Ctrl-C ends it with the figures until then.
    """
    with wrong_values_are_wrong_usage():
        loader, stored = _make_loader(
            source, fields, image_size, make_loader_options(batch_size, num_workers, on_error)
        )

    tell_of_the_share()

    def report(epoch: int, meter: Meter) -> None:
        stats = None if loader.runs_torchs_workers else loader.stats()
        echo(_as_json(epoch, meter, stats) if as_json else _describe(epoch, meter, stats, stored))

    epoch, meter = 0, Meter()
    try:
        for epoch in range(epochs):
            meter = Meter()
            with bad_samples_name_the_option(on_error):
                meter.watch(islice(loader, batches))
            report(epoch, meter)
    except KeyboardInterrupt:
        report(epoch, meter)
        echo("interrupted: the last figures are those until then", err=True)
        raise typer.Exit(INTERRUPTED) from None


@dataclass(slots=True, kw_only=True)
class Meter:
    """Counts an epoch's batches by the clock, whoever makes them. Times are in seconds from when it was made.

    Attributes:
        num_batches: Batches that came.
        num_samples: The samples in them.
        elapsed_s: When the last one came.
        first_batch_s: When the first one came; None before.
        num_first: The samples in that one.
        began: When it was made, by time.perf_counter.
    """

    num_batches: int = 0
    num_samples: int = 0
    elapsed_s: float = 0.0
    first_batch_s: float | None = None
    num_first: int = 0
    began: float = field(default_factory=time.perf_counter)

    def watch(self, batches: Iterable[Any]) -> None:
        """Count all of these."""
        for batch in batches:
            self.elapsed_s = time.perf_counter() - self.began
            num_samples = len(batch[0] if isinstance(batch, list | tuple) else batch)
            if self.first_batch_s is None:
                self.first_batch_s, self.num_first = self.elapsed_s, num_samples
            self.num_batches += 1
            self.num_samples += num_samples

    @property
    def samples_per_s(self) -> float:
        """The rate with the start of the workers."""
        return self.num_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def samples_per_s_after_first_batch(self) -> float | None:
        """The rate from the first batch to the last one; None where that is the same batch."""
        if self.num_batches < 2 or self.first_batch_s is None:
            return None
        return (self.num_samples - self.num_first) / (self.elapsed_s - self.first_batch_s)


def _make_loader(
    source: Path, fields: str | None, image_size: int, options: dict[str, Any]
) -> tuple[DataLoader, Stored]:
    import shardio
    from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

    transform = Compose([RandomResizedCrop(image_size), RandomHorizontalFlip()])
    if has_class_folders(source):
        if fields is not None:
            raise ValueError(f"--fields is for shards, and {source} has class folders, of which the image is loaded")
        folder = shardio.ImageFolder(source, transform=transform)
        loader = shardio.DataLoader(folder, sampler=shardio.EpochSampler(folder), **options)
        return loader, Stored(in_shards=False, has_images=True)
    names = ("image",) if fields is None else tuple(fields.split(","))
    has_images = "image" in names
    dataset = shardio.ShardDataset(source, fields=names, shuffle=True, transform=transform if has_images else None)
    stored = Stored(in_shards=True, has_images=has_images, jpeg=dataset.table.manifest.pack.get("jpeg"))
    return shardio.DataLoader(dataset, **options), stored


def _as_json(epoch: int, meter: Meter, stats: LoaderStats | None) -> str:
    from shardio.world import find_world

    counts = {name: getattr(meter, name) for name in ("num_batches", "num_samples", "elapsed_s", "first_batch_s")}
    rates = {name: getattr(meter, name) for name in ("samples_per_s", "samples_per_s_after_first_batch")}
    return json.dumps(
        {"epoch": epoch, **asdict(find_world()), **counts, **({} if stats is None else asdict(stats)), **rates}
    )


def _describe(epoch: int, meter: Meter, stats: LoaderStats | None, stored: Stored) -> str:
    head = (
        f"epoch {epoch}: {count(meter.num_samples, 'sample')} in {count(meter.num_batches, 'batch', 'batches')}, "
        f"{meter.elapsed_s:.2f} s, {meter.samples_per_s:,.0f} samples/s"
    )
    if meter.first_batch_s is None:
        return f"{head}: no batch came"
    head += f"; first batch after {1000 * meter.first_batch_s:.0f} ms"
    if (rate := meter.samples_per_s_after_first_batch) is not None:
        head += f", from then on {rate:,.0f} samples/s"
    if stats is None:
        return f"{head}\n  torch's workers ran, of which it is not known what they spent their time on"
    times = share_out(stats)
    total_s = sum(times.values()) or 1.0
    lines = [head, f"  {'workers':<40} {'seconds':>9} {'share':>6} {'µs a sample':>12}"]
    for stage, seconds in times.items():
        a_sample = 1e6 * seconds / max(stats.num_samples, 1)
        lines.append(f"  {STAGES[stage]:<40} {seconds:>9.3f} {seconds / total_s:>6.0%} {a_sample:>12.1f}")
    lines.append(f"  {advise(stats, stored, count_processors())}")
    return "\n".join(lines)
