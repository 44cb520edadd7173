"""Train with torchvision's ResNet-50 recipe. Stop it at any time, even with SIGKILL, and rerun it to resume.

    python examples/resnet50_recipe.py OUT                      # creates small images first, and trains a small model
    python examples/resnet50_recipe.py IMAGES OUT --model torchvision:resnet50 --image-size 176 --epochs 600 \
        --batch-size 128 --lr 0.0625

The recipe has random crops, flips, TrivialAugmentWide and RandomErasing for each sample. Compiled code applies these
transforms in shardio's worker processes. The recipe also has MixUp or CutMix for each batch, on the device, and label
smoothing. All random numbers are functions of the seed, the epoch and the sample or batch. So a run that was killed and
resumed has the same losses as an uninterrupted run, and on a CPU they are bit-identical: compare the files
OUT/run/log.jsonl. (The recipe's repeated augmentation and weight averaging are left out.)

Source: PyTorch's blog, "How to train state-of-the-art models using TorchVision's latest primitives", 2021.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import shardio
from shardio.train import PrintEpochs, TrainConfig, make_model, seed_everything, train
from shardio.transforms import recipes


def render_images(folder: Path) -> None:
    """Write 100 images in random colors for each pattern: horizontal stripes, vertical stripes and a checkerboard."""
    random = np.random.default_rng(0)
    y, x = np.arange(48)[:, np.newaxis], np.arange(64)
    patterns = {"across": y + 0 * x, "down": x + 0 * y, "chessboard": x // 8 + y // 8 << 3}
    for name, pattern in patterns.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(100):
            is_first = pattern // 8 % 2 == random.integers(2)
            colors = random.integers(0, 256, (2, 3))
            pixels = np.where(is_first[..., np.newaxis], colors[0], colors[1]).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.jpg", quality=90)


def make_loaders(packed: Path, image_size: int, batch_size: int) -> tuple[shardio.DataLoader, shardio.DataLoader]:
    """Return a loader for training and one for validation; every fifth shard is for validation."""
    shards = sorted(packed.glob("*.tar"))
    held_out = shards[::5]
    training = shardio.ShardDataset(
        [shard for shard in shards if shard not in held_out],
        shuffle=True,
        transform=recipes.trivial_augment(image_size),
    )
    # Validation images are larger than training images, as in the recipe: 224 and 176 pixels.
    larger = image_size * 224 // 176
    validation = shardio.ShardDataset(
        held_out, remainder="mask", transform=recipes.imagenet_eval(larger, resize=larger * 232 // 224)
    )
    return (
        shardio.DataLoader(training, batch_size, num_workers=2, persistent_workers=True),
        shardio.DataLoader(validation, batch_size, num_workers=2, persistent_workers=True),
    )


def main() -> None:
    """Pack the images if they are not packed yet, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?", help="a directory of class folders")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02, help="the recipe uses 0.5 for batches of 1,024 images")
    parser.add_argument("--image-size", type=int, default=32, help="side of the training images in pixels")
    parser.add_argument("--model", default="small", help="small, torchvision:NAME or timm:NAME")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    options = parser.parse_args()
    packed = options.out / "packed"

    if not (packed / "shardio.json").exists():  # The manifest is written last, so it marks a finished pack.
        images = options.images or options.out / "images"
        if options.images is None:
            render_images(images)
        num_images = len(shardio.ImageFolder(images))
        shardio.pack(images, packed, jpeg="tile", max_shard_samples=-(-num_images // 10))

    loader, val_loader = make_loaders(packed, options.image_size, options.batch_size)
    num_classes = len(shardio.ShardDataset(packed).classes)
    seed_everything(0)  # Seeds the initial weights; TrainConfig seeds everything else.
    model = make_model(options.model, num_classes=num_classes, image_size=options.image_size)
    config = TrainConfig(
        epochs=options.epochs,
        optimizer="sgd",
        lr=options.lr,
        weight_decay=2e-5,
        decay_all=False,
        schedule="cosine",
        warmup=min(5 / options.epochs, 0.2),
        label_smoothing=0.1,
        mixup=0.2,
        cutmix=1.0,
        num_classes=num_classes,  # A dataset of listed tars has no class names.
        precision=options.precision,
        deterministic=True,
        directory=options.out / "run",
        checkpoint_every=5,
        log_every=1,
    )
    train(model, loader, config, val_loader=val_loader, callbacks=[PrintEpochs()])


if __name__ == "__main__":
    main()
