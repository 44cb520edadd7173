"""Use your own code in every place where a loader accepts it: it runs in shardio's worker processes.

    python examples/own_code.py

Each case loads an epoch with two worker processes and again without any, and compares the batches, which include random
numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import random
import struct
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import default_collate

import shardio
from shardio.libraries import import_library
from shardio.transforms import Compose, RandomResizedCrop

NUM_SAMPLES = 60
WORDS = ("a", "bright", "dark", "picture", "of", "noise")
MAX_WORDS = 8


def write_tar(path: Path) -> None:
    """Write samples with an image, a caption, and temperatures in a custom format; some have no caption."""
    draw = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(NUM_SAMPLES):
            image = io.BytesIO()
            Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(image, "JPEG")
            fields = {"jpg": image.getvalue(), "heat": struct.pack("<3f", number, number + 1, number + 2)}
            if number % 5:
                fields["txt"] = " ".join(draw.choice(WORDS, size=1 + number % 4)).encode()
            for field, content in fields.items():
                member = tarfile.TarInfo(f"{number:03d}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def add_noise(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return an image with noise from numpy's global generator, as is common in user code."""
    noisy: NDArray[np.float32] = (pixels + np.random.normal(0, 5, pixels.shape)).clip(0, 255).astype(np.float32)
    return noisy


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the whole sample, with its caption (which may be missing) replaced by tokens."""
    tokens = np.zeros(MAX_WORDS, np.int64)
    for place, word in enumerate((sample["txt"] or "").split()):
        tokens[place] = 1 + WORDS.index(word)
    return {"image": sample["image"], "tokens": tokens, "is_flipped": random.random() < 0.5}


def decode_heat(content: bytes) -> torch.Tensor:
    """Decode a field in a custom format."""
    return torch.tensor(struct.unpack("<3f", content))


def mix(samples: list[Any]) -> dict[str, Any]:
    """Collate a batch and mix each image with another image (https://arxiv.org/abs/1710.09412)."""
    images = default_collate(samples).float() / 255
    share = float(np.random.beta(0.2, 0.2))
    return {"images": share * images + (1 - share) * images.flip(0), "share": share}


def find_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name of each case, and the arguments of the dataset and of the loader."""
    crop = RandomResizedCrop(32)
    yield "a function", {"transform": Compose([crop, add_noise])}, {}
    if importlib.util.find_spec("torchvision"):
        import_library("torchvision")  # A plain import fails if torchvision and torch were built for different devices.
        v2 = importlib.import_module("torchvision.transforms.v2")
        jitter = v2.ColorJitter(0.4, 0.4)
        of_tensors = v2.Compose([v2.RandomResizedCrop(32), jitter, v2.ToDtype(torch.float32, scale=True)])
        yield "torchvision on tensors", {"transform": of_tensors}, {}
        of_pictures = v2.Compose([v2.RandomResizedCrop(32), jitter, v2.PILToTensor()])
        yield "torchvision on Pillow images", {"transform": of_pictures, "decode": "pil"}, {}
    if importlib.util.find_spec("albumentations"):
        albumentations = importlib.import_module("albumentations")
        pipeline = albumentations.Compose([albumentations.RandomResizedCrop((32, 32)), albumentations.GaussNoise()])
        yield "Albumentations", {"transform": pipeline}, {}
    fields = {"fields": ("image", "txt"), "missing": None}
    yield "transform_sample", {**fields, "transform": crop, "transform_sample": tokenize}, {}
    yield "decoders", {"fields": ("key", "heat"), "decoders": {"heat": decode_heat}}, {}
    yield "collate_fn", {"transform": crop}, {"collate_fn": mix}


def load(tar: Path, of_dataset: dict[str, Any], of_loader: dict[str, Any], num_workers: int) -> list[Any]:
    """Return the batches of an epoch."""
    dataset = shardio.ShardDataset(tar, shuffle=True, **{"fields": "image", **of_dataset})
    loader = shardio.DataLoader(dataset, batch_size=8, num_workers=num_workers, **of_loader)
    assert not loader.calls_dataset
    return list(loader)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two batches are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def main() -> None:
    """Load each case twice."""
    with tempfile.TemporaryDirectory() as work:
        tar = Path(work) / "samples.tar"
        write_tar(tar)
        for name, of_dataset, of_loader in find_cases():
            batches = load(tar, of_dataset, of_loader, num_workers=2)
            if not are_equal(batches, load(tar, of_dataset, of_loader, num_workers=0)):
                raise SystemExit(f"{name}: the batches differ")
            print(f"{name}: {len(batches)} batches, equal with 0 and 2 workers")


if __name__ == "__main__":
    main()
