"""Compare the speed of loaders with common training recipes.

``python -m benchmarks.recipes PHOTOS`` measures torchvision's ResNet-50 recipe (random crop, TrivialAugmentWide,
RandomErasing), SimCLR's two views and DINO's ten crops of photographs, at 224×224 and 96×96, with two workers. Loaders
take turns, one epoch each. The rate (images/s) is the number of photographs per second of wall-clock time. CPU time
is that of the process and its children.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
import torch
import torch.utils.data
import typer
from torch.utils.data import BatchSampler, RandomSampler, default_collate

import shardio
from benchmarks.bench_own_code import cpu_s, repeat_photos
from benchmarks.recipes.dali import make_dali
from benchmarks.recipes.pipelines import (
    SIZE,
    Make,
    decode_opencv,
    decode_pillow,
    decode_tensor,
    make_albumentations,
    make_torchvision,
)
from shardio.transforms import recipes

NUM_WORKERS = 2
BATCH_SIZE = 64

GOALS = {"resnet50": 3, "simclr": 10, "dino": 10}
"""The factor by which shardio, with tiled shards, should be faster than the fastest peer."""

OURS: dict[str, Callable[[], Any]] = {
    "resnet50": lambda: recipes.trivial_augment(SIZE),
    "simclr": lambda: recipes.simclr(SIZE),
    "dino": lambda: recipes.dino(SIZE),
}


@dataclass(frozen=True)
class Photographs(torch.utils.data.Dataset[Any]):
    """A typical map-style dataset of photographs: (image or crops, label)."""

    paths: list[Path]
    decode: Callable[[bytes], Any]
    make: Make

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.decode(self.paths[index].read_bytes())), 3


def find_loaders(recipe: str, folder: Path, tiled: Path) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield each loader of a recipe by name."""
    options: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}
    directory = shardio.ImageFolder(folder, transform=OURS[recipe]())
    sampler = shardio.EpochSampler(directory)
    yield "shardio, directory", shardio.DataLoader(directory, BATCH_SIZE, sampler=sampler, **options)
    shards = shardio.ShardDataset(tiled, shuffle=True, transform=OURS[recipe]())
    yield "shardio, tiled", shardio.DataLoader(shards, BATCH_SIZE, **options)

    paths = [Path(path) for path, _ in shardio.ImageFolder(folder).samples]
    pillow = Photographs(paths, decode_pillow, make_torchvision(recipe, takes_tensors=False))
    tensors = Photographs(paths, decode_tensor, make_torchvision(recipe, takes_tensors=True))
    arrays = Photographs(paths, decode_opencv, make_albumentations(recipe))
    for name, files in (("Pillow", pillow), ("tensors", tensors), ("Albumentations", arrays)):
        yield f"DataLoader, {name}", torch.utils.data.DataLoader(files, BATCH_SIZE, shuffle=True, **options)
    for name, files in (("Pillow", pillow), ("tensors", tensors)):
        yield f"torchdata.nodes, {name}", make_nodes(files)
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        yield "DALI, CPU", make_dali(recipe, folder, BATCH_SIZE, NUM_WORKERS)


def make_nodes(files: Photographs) -> Iterable[Any]:
    """Return a torchdata.nodes loader that uses threads."""
    nodes: Any = importlib.import_module("torchdata.nodes")
    batches = BatchSampler(RandomSampler(files), BATCH_SIZE, drop_last=False)

    def load(indices: list[int]) -> Any:
        return default_collate([files[index] for index in indices])

    node = nodes.ParallelMapper(nodes.SamplerWrapper(batches), load, num_workers=NUM_WORKERS, method="thread")
    prefetcher = nodes.Prefetcher(node, prefetch_factor=2)
    return nodes.Loader(prefetcher, restart_on_stop_iteration=True)  # type: ignore[no-any-return]


def settle() -> None:
    """Wait until no background work is left, because some loaders prepare the next epoch's first batches."""
    before = cpu_s()
    while True:
        time.sleep(0.3)  # Loaders do not report when they are idle, but their CPU time shows it.
        if (after := cpu_s()) - before < 0.01:
            return
        before = after


def measure(loader: Iterable[Any]) -> tuple[float, float, float]:
    """Load an epoch when no background work is left.

    Returns:
        Images/s, the CPU time of all processes in µs per image, and the mean of all pixels.
    """
    settle()
    began, cpu_before, num_images, total, num_pixels = time.perf_counter(), cpu_s(), 0, 0.0, 0
    for images, labels in loader:
        num_images += len(labels)
        for crop in images if isinstance(images, list | tuple) else [images]:
            part = np.asarray(
                crop[:4]
            )  # Four images per batch are enough: the mean only shows that all loaders do the same work.
            total, num_pixels = total + float(part.sum(dtype=np.float64)), num_pixels + part.size
    return num_images / (time.perf_counter() - began), 1e6 * (cpu_s() - cpu_before) / num_images, total / num_pixels


def race(recipe: str, folder: Path, tiled: Path, rounds: int) -> None:
    """Measure the loaders of a recipe and print its table."""
    loaders = dict(find_loaders(recipe, folder, tiled))
    figures: dict[str, list[tuple[float, float, float]]] = {each: [] for each in loaders}
    for number in range(rounds + 1):  # The first round is a warm-up.
        for each, loader in loaders.items():
            measured = measure(loader)
            if number:
                figures[each].append(measured)
    speeds = {each: statistics.median(speed for speed, *_ in found) for each, found in figures.items()}
    best = max(speed for each, speed in speeds.items() if not each.startswith("shardio"))
    print(f"| {recipe} (goal {GOALS[recipe]} ×) | images/s | CPU µs per image | mean pixel | × fastest peer |")
    print("|---|---|---|---|---|")
    for each, found in figures.items():
        spread = f"{min(speed for speed, *_ in found):,.0f} to {max(speed for speed, *_ in found):,.0f}"
        cpu, mean = (statistics.median(one[i] for one in found) for i in (1, 2))
        print(f"| {each} | {speeds[each]:,.0f} ({spread}) | {cpu:,.0f} | {mean:.1f} | {speeds[each] / best:.2f} |")
    print(flush=True)


def main(
    photos: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples; photos are repeated to reach it.")] = 570,
    recipe: Annotated[list[str] | None, typer.Option(help="Run only this recipe. Repeatable.")] = None,
) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    with tempfile.TemporaryDirectory(prefix="shardio-recipes-") as work:
        folder = repeat_photos(photos, Path(work) / "folder", samples)
        shardio.pack(folder, Path(work) / "tiled", jpeg="tile", max_shard_samples=100)
        print(f"{samples} samples, {NUM_WORKERS} workers, medians of {rounds} rounds\n")
        for name in recipe or OURS:
            race(name, folder, Path(work) / "tiled", rounds)


if __name__ == "__main__":
    typer.run(main)
