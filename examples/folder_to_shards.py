"""Pack class folders into shards, and train a model on them. Rerun the same command to resume.

    python examples/folder_to_shards.py OUT              # creates some images first
    python examples/folder_to_shards.py IMAGES OUT       # IMAGES/class/…/name.jpg
    python examples/folder_to_shards.py IMAGES OUT --epochs 20

The first run packs the images into OUT/packed. Some shards are held out for validation: packing mixes the classes, so
each shard is a random subset of the images. OUT/run contains checkpoints, a log and a report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import shardio
from shardio.train import PrintEpochs, TrainConfig, seed_everything, small_resnet, train
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

IMAGE_SIZE = 32


def render_images(folder: Path) -> None:
    """Write 100 images of each of three classes: colored noise with more red, green or blue."""
    random = np.random.default_rng(0)
    for label, name in enumerate(("red", "green", "blue")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(100):
            color = random.integers(0, 80, 3)
            color[label] += 50
            pixels = (random.integers(0, 126, (60, 80, 3)) + color).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.jpg", quality=90)


def pack(images: Path, packed: Path) -> None:
    """Pack class folders into about ten shards, or more if each of these would exceed 256 MiB."""
    num_images = len(shardio.ImageFolder(images))
    # Tiled JPEGs have the same pixels, but crops decode faster.
    manifest = shardio.pack(images, packed, jpeg="tile", max_shard_samples=-(-num_images // 10))
    print(f"packed {manifest.num_samples} images into {len(manifest.shards)} shards")


def make_loaders(packed: Path) -> tuple[shardio.DataLoader, shardio.DataLoader]:
    """Return a loader for training and one for validation; every fifth shard is for validation."""
    augmented = Compose([RandomResizedCrop(IMAGE_SIZE, scale=(0.25, 1.0)), RandomHorizontalFlip()])
    central = Compose([Resize(IMAGE_SIZE), CenterCrop(IMAGE_SIZE)])
    shards = sorted(packed.glob("*.tar"))
    held_out = shards[::5]
    training = shardio.ShardDataset(
        [shard for shard in shards if shard not in held_out], shuffle=True, transform=augmented
    )
    # With several ranks, some samples are repeated to fill the last batches; "mask" marks the repeats as invalid.
    validation = shardio.ShardDataset(held_out, remainder="mask", transform=central)
    return (
        shardio.DataLoader(training, batch_size=16, num_workers=2, persistent_workers=True),
        shardio.DataLoader(validation, batch_size=16, num_workers=2, persistent_workers=True),
    )


def main() -> None:
    """Pack the images unless they are already packed, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?", help="a directory of class folders")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16", help="fp32 is fast on any CPU")
    options = parser.parse_args()
    packed = options.out / "packed"

    if not (packed / "shardio.json").exists():  # The manifest is written last, so it marks a finished pack.
        images = options.images or options.out / "images"
        if options.images is None:
            render_images(images)
        pack(images, packed)

    loader, val_loader = make_loaders(packed)
    num_classes = len(shardio.ShardDataset(packed).classes)
    seed_everything(0)  # Seeds the initial weights; TrainConfig seeds everything else.
    model = small_resnet(num_classes, IMAGE_SIZE)
    config = TrainConfig(
        epochs=options.epochs, precision=options.precision, directory=options.out / "run", checkpoint_every=10
    )
    results = train(model, loader, config, val_loader=val_loader, callbacks=[PrintEpochs()])
    best = max(result.epoch for result in results if result.is_best)
    print(f"the best model is from epoch {best}: {options.out / 'run' / 'best.pt'}")


if __name__ == "__main__":
    main()
