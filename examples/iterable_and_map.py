"""Load the same images as an iterable dataset, as a map-style dataset, and from class folders, with two loaders.

    python examples/iterable_and_map.py [IMAGES]    # IMAGES/class/…/name.jpg; creates images by default

| dataset           | kind      | what defines the order                                    |
|-------------------|-----------|-----------------------------------------------------------|
| `ShardDataset`    | iterable  | the dataset itself, for all ranks and workers             |
| `ShardMapDataset` | map-style | `EpochSampler`, or your own sampler                       |
| `ImageFolder`     | map-style | the same, but for images that are not packed              |

Each dataset runs in shardio's DataLoader and in torch's. Both loaders deliver every sample exactly once in each of two
epochs, in a different order each time. A model is then trained on each loader for one epoch, and the losses on the two
datasets of shards are equal.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import shardio
from shardio.check import assert_exactly_once
from shardio.train import TrainConfig, seed_everything, small_resnet, train
from shardio.transforms import CenterCrop, Compose, Resize

IMAGE_SIZE, BATCH_SIZE = 32, 16


def render_images(folder: Path) -> None:
    """Write 40 images of each of two classes: noise that is brighter in the left or in the right half."""
    random = np.random.default_rng(0)
    for name, half in (("left", slice(0, 40)), ("right", slice(40, 80))):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            pixels = random.integers(0, 200, (60, 80, 3), dtype=np.uint8)
            pixels[:, half] += 55
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.jpg", quality=90)


def make_loaders(images: Path, packed: Path, loader_type: Any) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """Yield a loader for each dataset, and the function that sets its epoch."""
    # Without random crops, the content identifies a sample. With random crops, use fields=(…, "key"), and key= for
    # the check.
    transform = Compose([Resize(IMAGE_SIZE), CenterCrop(IMAGE_SIZE)])
    options = {"batch_size": BATCH_SIZE, "num_workers": 2}
    # A dataset cannot see torch's batch size. Passing it gives both loaders the same batches.
    iterable = shardio.ShardDataset(packed, shuffle=True, transform=transform, batch_size=BATCH_SIZE)
    yield loader_type(iterable, **options), iterable.set_epoch
    for dataset in (shardio.ShardMapDataset(packed, transform=transform), shardio.ImageFolder(images, transform)):
        sampler = shardio.EpochSampler(dataset, batch_size=BATCH_SIZE)
        yield loader_type(dataset, sampler=sampler, **options), sampler.set_epoch


def main() -> None:
    """Check each loader and train with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?", help="a directory of class folders")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as work:
        images, packed = options.images or Path(work) / "images", Path(work) / "packed"
        if options.images is None:
            render_images(images)
        manifest = shardio.pack(images, packed, max_shard_samples=25)
        for loader_type in (shardio.DataLoader, torch.utils.data.DataLoader):
            for loader, set_epoch in make_loaders(images, packed, loader_type):
                assert_exactly_once(loader, expected=manifest.num_samples, epochs=2, set_epoch=set_epoch)
                seed_everything(0)
                model = small_resnet(len(manifest.classes), IMAGE_SIZE)
                (result,) = train(model, loader, TrainConfig(epochs=1, precision="fp32"))
                name = f"{type(loader.dataset).__name__} in {loader_type.__module__.split('.')[0]}'s loader"
                print(f"{name:<33} {manifest.num_samples} samples, each exactly once; loss {result.loss:.4f}")


if __name__ == "__main__":
    main()
