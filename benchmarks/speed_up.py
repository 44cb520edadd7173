"""Measure what each step of docs/speed-up.md gains: ``python -m benchmarks.speed_up PHOTOS``.

The steps take turns, one epoch each, with two persistent workers. CPU time is that of the process and its children.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.utils.data
import typer

import shardio
from benchmarks.bench_own_code import measure, repeat_photos
from benchmarks.timing import summarize
from shardio.libraries import import_library
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

BATCH_SIZE = 128
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPTIONS: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 2, "persistent_workers": True}


def find_steps(photos: Path, packed: Path) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the name and the loader of each step."""
    import_library("torchvision")
    datasets, v1 = importlib.import_module("torchvision.datasets"), importlib.import_module("torchvision.transforms")
    crop = [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip()]
    floats = v1.Compose([*crop, v1.ToTensor(), v1.Normalize(MEAN, STD)])
    theirs = datasets.ImageFolder(str(photos), transform=floats)
    yield "torchvision's ImageFolder, torch's DataLoader", torch.utils.data.DataLoader(theirs, shuffle=True, **OPTIONS)
    yield "shardio.DataLoader", shardio.DataLoader(theirs, shuffle=True, **OPTIONS)
    yield "shardio.ImageFolder and EpochSampler", make_folder(photos, floats)
    pixels = v1.Compose([*crop, v1.PILToTensor()])
    yield "PILToTensor, without ToTensor and Normalize", make_folder(photos, pixels)
    normalized = shardio.DevicePrefetcher(make_folder(photos, pixels), "cpu", normalize=(MEAN, STD))
    yield "the same, normalized on the CPU", normalized
    yield "without ToTensor, Normalize and PILToTensor", make_folder(photos, v1.Compose(crop))
    yield "tiled shards", make_shards(packed / "tiled", pixels)
    ours = Compose([RandomResizedCrop(224, antialias=True), RandomHorizontalFlip()])
    yield "shardio.transforms", make_shards(packed / "tiled", ours)
    yield "decoded_cache, after the first epoch", make_shards(packed / "tiled", ours, decoded_cache="4GB")
    yield "PPMs of 256 px", make_shards(packed / "ppm", ours)


def make_folder(photos: Path, transform: Callable[[Any], Any]) -> shardio.DataLoader[Any]:
    """Return a loader over class folders."""
    dataset = shardio.ImageFolder(photos, transform=transform)
    return shardio.DataLoader(dataset, sampler=shardio.EpochSampler(dataset), **OPTIONS)


def make_shards(packed: Path, transform: Callable[[Any], Any], **settings: Any) -> shardio.DataLoader[Any]:
    """Return a loader over shards."""
    dataset = shardio.ShardDataset(packed, shuffle=True, transform=transform, **settings)
    return shardio.DataLoader(dataset, **OPTIONS)


def main(
    photos: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples; photos are repeated to reach it.")] = 1536,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shardio-speed-up-") as work:
        folder = repeat_photos(photos, Path(work) / "folder", samples)
        shardio.pack(folder, Path(work) / "tiled", jpeg="tile", max_shard_samples=100)
        shardio.pack(folder, Path(work) / "ppm", convert_to="ppm", max_side=256, max_shard_samples=100)
        steps = dict(find_steps(folder, Path(work)))
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for number in range(rounds + 1):  # The first round is a warm-up.
            for name, loader in steps.items():
                measured = measure(loader)
                if number:
                    figures[name].append(measured)
    print(f"{samples} samples, batches of {BATCH_SIZE}, 2 workers, medians of {rounds} rounds\n")
    print("| step | CPU µs per image | images/s | torch's CPU time / this |\n|---|---|---|---|")
    first = [cpu_us for _, cpu_us in next(iter(figures.values()))]
    for name, found in figures.items():
        speeds, times = ([pair[part] for pair in found] for part in (0, 1))
        gain = statistics.median(theirs / own for theirs, own in zip(first, times, strict=True))
        print(f"| {name} | {summarize(times)} | {summarize(speeds)} | {gain:.1f} |")


if __name__ == "__main__":
    typer.run(main)
