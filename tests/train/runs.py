"""Training runs for tests: data, models, callbacks that stop runs, and the figures in their logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardio
from shardio import ShardMapDataset
from shardio.train import Callback, StepRecord, TrainConfig
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

Batch = tuple[torch.Tensor, torch.Tensor]

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
"""A normalization that only divides by 255."""


def make_batches(sizes: Sequence[int], *, num_classes: int = 3, side: int = 6, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator),
            torch.randint(0, num_classes, (size,), generator=generator),
        )
        for size in sizes
    ]


def make_separable_batches(num_batches: int, batch_size: int = 20, seed: int = 0) -> list[Batch]:
    """Return batches of noise in three classes, in which red, green or blue is brightest."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        labels = torch.randint(0, 3, (batch_size,), generator=generator)
        images = torch.randint(0, 120, (batch_size, 3, 6, 6), dtype=torch.uint8, generator=generator)
        images[torch.arange(batch_size), labels] += 100
        batches.append((images, labels))
    return batches


def make_floats(sizes: Sequence[int]) -> list[Batch]:
    return [(images.float() / 255, labels) for images, labels in make_batches(sizes)]


def join(batches: Sequence[Batch]) -> Batch:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def make_linear(num_classes: int = 3, side: int = 6, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, num_classes))


def make_network(num_classes: int = 3, side: int = 6, seed: int = 0) -> nn.Sequential:
    """Return a network that has one hidden layer and handles each sample separately."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 16), nn.Tanh(), nn.Linear(16, num_classes))


class Poison(nn.Module):
    """A module that turns its inputs into NaN, beginning with forward pass number ``first`` (counted from 1)."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.num_passes = first, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        return images * float("nan") if self.num_passes >= self.first else images


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


BATCH_SIZE, EPOCHS = 4, 3

STEPS_PER_EPOCH = 3
"""The number of steps: 21 samples are six batches, and each step has two batches."""

TIMES = ("train_s", "data_wait_s", "images_per_s", "step_s", "data_wait_share", "memory_allocated", "memory_reserved")


def read_figures(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without times and memory."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


class Collect(Callback):
    """A callback that keeps the batches and the records."""

    def __init__(self) -> None:
        self.batches, self.records = list[Any](), list[StepRecord]()

    def on_batch(self, batch: Any) -> None:
        self.batches.append(batch)

    def on_log(self, record: StepRecord) -> None:
        self.records.append(record)


class StopError(Exception):
    """An error that stops a run."""


class StopAfter(Callback):
    def __init__(self, num_batches: int) -> None:
        self.num_left = num_batches

    def on_batch(self, batch: Any) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise StopError


def make_model() -> nn.Sequential:
    """Return a network with state other than weights: BatchNorm statistics, and Dropout's random numbers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 7 * 7, 3)
    )


def make_loader(packed: Path, *, torchs: bool = False, num_workers: int = 0, remainder: Any = "pad") -> Any:
    transform = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=transform)
    if torchs:
        torch.manual_seed(0)
        return torch.utils.data.DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers)
    sampler = shardio.EpochSampler(dataset, seed=1, remainder=remainder)
    return shardio.DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


def make_config(directory: Path, **options: Any) -> TrainConfig:
    usual = {"epochs": EPOCHS, "precision": "fp32", "device": "cpu", "lr": 0.02, "accumulate": 2, "log_every": 1}
    return TrainConfig(**{**usual, "deterministic": True, "directory": directory, **options})


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(a, b)
