"""Train on a WebDataset tar that another tool wrote, interrupt the epoch, and resume it.

    python examples/webdataset_tar.py

The script writes the tar with ``webdataset`` if it is installed, or else with ``tarfile``. Nothing is converted:
shardio indexes the tar on first use. The state of a loader is a small JSON object that works with any number of ranks
and workers. In this example, an epoch starts with two workers and ends with none.
"""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import shardio
from shardio.check import assert_exactly_once
from shardio.train import TrainStep, small_resnet
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

IMAGE_SIZE = 32
NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def make_samples(num_samples: int = 120) -> list[dict[str, Any]]:
    """Return samples as WebDataset's dicts: dark images have class 0, bright images class 1."""
    random, samples = np.random.default_rng(0), []
    for i in range(num_samples):
        label, file = i % 2, io.BytesIO()
        pixels = random.integers(0, 100, (60, 80, 3), dtype=np.uint8) + np.uint8(100 * label)
        Image.fromarray(pixels).save(file, "JPEG")
        about = json.dumps({"brightness": float(pixels.mean())}).encode()
        samples.append({"__key__": f"{i:04d}", "jpg": file.getvalue(), "cls": str(label).encode(), "json": about})
    return samples


def write_tar(path: Path) -> None:
    """Write the samples with webdataset, or with tarfile: one member key.field for each field."""
    if importlib.util.find_spec("webdataset"):
        import webdataset

        with webdataset.TarWriter(str(path)) as writer:
            for sample in make_samples():
                writer.write(sample)
        return
    with tarfile.open(path, "w") as tar:
        for sample in make_samples():
            key = sample.pop("__key__")
            for field, content in sample.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def make_loader(tar: Path, num_workers: int) -> shardio.DataLoader:
    """Return a loader whose batches do not depend on the number of workers."""
    transform = Compose([RandomResizedCrop(IMAGE_SIZE, scale=(0.5, 1.0)), RandomHorizontalFlip()])
    # "image" is the decoded image, whatever its format; "jpg" would be the file's bytes.
    fields = ("image", "cls", "json", "key")
    dataset = shardio.ShardDataset(tar, fields=fields, shuffle=True, transform=transform)
    return shardio.DataLoader(dataset, batch_size=8, num_workers=num_workers)


def main() -> None:
    """Write a tar and train on it."""
    with tempfile.TemporaryDirectory() as work:
        write_tar(Path(work) / "samples.tar")
        run(Path(work) / "samples.tar", Path(work) / "state.json")


def run(tar: Path, state: Path) -> None:
    """Train on the first half of an epoch, save the loader's state, and train on the rest."""
    all_keys = list(shardio.ShardDataset(tar, fields="key"))
    num_classes = 1 + max(shardio.ShardDataset(tar, fields="cls"))  # A tar has no class names.
    torch.manual_seed(0)
    model = small_resnet(num_classes, IMAGE_SIZE)
    batches = shardio.DevicePrefetcher(make_loader(tar, num_workers=2), normalize=NORMALIZE)
    model.to(batches.device)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-3))
    seen: list[list[str]] = []

    with batches:
        for num_batches, (images, labels, about, keys) in enumerate(batches, start=1):
            _, loss = step(images, labels)
            seen.append(list(keys))
            if num_batches == 1:
                print(f"according to its json, the brightness of {keys[0]} is {about['brightness'][0]:.1f}")
            if num_batches == len(batches) // 2:
                state.write_text(json.dumps(batches.state_dict()))
                break
    print(f"interrupted after {len(seen)} of {len(batches)} batches, loss {loss:.3f}: {state.read_text()}")

    # A real run saves the states of the loader, model and step; train(…, TrainConfig(directory=…)) saves all three.
    batches = shardio.DevicePrefetcher(make_loader(tar, num_workers=0), normalize=NORMALIZE)
    batches.load_state_dict(json.loads(state.read_text()))
    for images, labels, _, keys in batches:
        _, loss = step(images, labels)
        seen.append(list(keys))
    assert_exactly_once(seen, expected=all_keys)
    print(f"resumed and continued to batch {len(seen)}, loss {loss:.3f}: {len(all_keys)} samples, each exactly once")


if __name__ == "__main__":
    main()
