"""``shardio bench``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.console import wrong_values_are_wrong_usage

if TYPE_CHECKING:
    from shardio.loader import DataLoader, LoaderStats

STAGES = {
    "read": "reading bytes",
    "transform": "reading images' heads, drawing crops",
    "decode": "decoding, cropping, resizing",
    "wait": "waiting until a batch is taken",
}
"""What workers do, for people."""

REMEDIES = {
    "read": "storage is the bottleneck: more workers read more at a time; a local disk or larger shards read faster",
    "transform": "images' heads and crops are the bottleneck: the images are small; more workers share the work",
    "decode": "decoding is the bottleneck: more workers, up to the number of cores, or less to decode: "
    "pack --jpeg tile, or --jpeg reencode --max-side 400",
    "wait": "handing batches over is the bottleneck: a larger --batch-size",
}
"""What can be done where most of the time goes to a stage."""


def bench(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, tars, or class folders of images.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 128,
    num_workers: Annotated[int, typer.Option(min=0, help="Workers; 0 decodes in the training process.")] = 2,
    image_size: Annotated[int, typer.Option(min=1, help="Side of the random crops in pixels.")] = 224,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs; workers start in the first.")] = 1,
    fields: Annotated[
        str | None, typer.Option(help="Fields to load, as image,label or bin; by default the image.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, a line an epoch.")] = False,
) -> None:
    """Load a dataset as training would, and say how fast that is and what holds it back."""
    with wrong_values_are_wrong_usage():
        loader = _make_loader(source, fields, image_size, batch_size=batch_size, num_workers=num_workers)
    for epoch in range(epochs):
        for _ in loader:
            pass
        stats = loader.stats()
        if as_json:
            typer.echo(json.dumps({"epoch": epoch, **asdict(stats), "samples_per_s": stats.samples_per_s}))
        else:
            typer.echo("\n".join(_describe(epoch, stats)))


def _make_loader(source: Path, fields: str | None, image_size: int, **options: Any) -> DataLoader:
    import shardio
    from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

    options["persistent_workers"] = options["num_workers"] > 0
    transform = Compose([RandomResizedCrop(image_size), RandomHorizontalFlip()])
    if _has_class_folders(source):
        folder = shardio.ImageFolder(source, transform=transform)
        return shardio.DataLoader(folder, sampler=shardio.EpochSampler(folder), **options)
    names = "image" if fields is None else tuple(fields.split(","))
    return shardio.DataLoader(shardio.ShardDataset(source, fields=names, shuffle=True, transform=transform), **options)


def _has_class_folders(source: Path) -> bool:
    from shardio.shards import MANIFEST_NAME

    if not source.is_dir() or (source / MANIFEST_NAME).exists() or any(source.glob("*.tar")):
        return False
    return any(entry.is_dir() for entry in source.iterdir())


def _describe(epoch: int, stats: LoaderStats) -> list[str]:
    times = {"read": stats.read_s, "transform": stats.transform_s, "decode": stats.decode_s}
    if stats.num_workers:
        times["wait"] = stats.wait_for_slot_s
    total_s = sum(times.values()) or 1.0
    lines = [
        f"epoch {epoch}: {stats.num_samples} samples in {stats.num_batches} batches, {stats.elapsed_s:.2f} s, "
        f"{stats.samples_per_s:,.0f} samples/s; first batch after {1000 * (stats.first_batch_s or 0):.0f} ms",
        f"  {'workers':<40} {'seconds':>9} {'share':>6} {'µs a sample':>12}",
    ]
    for stage, seconds in times.items():
        a_sample = 1e6 * seconds / max(stats.num_samples, 1)
        lines.append(f"  {STAGES[stage]:<40} {seconds:>9.3f} {seconds / total_s:>6.0%} {a_sample:>12.1f}")
    longest = max(times, key=lambda stage: times[stage])
    lines.append(f"  {stats.num_workers} workers on {os.cpu_count()} cores: {REMEDIES[longest]}")
    return lines
