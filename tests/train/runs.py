"""Training runs for tests: their data, what stops them, and their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardio
from shardio import ShardMapDataset
from shardio.train import Callback, TrainConfig
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.train.small_data import weights_of

BATCH_SIZE, EPOCHS = 4, 3
STEPS_PER_EPOCH = 3
"""21 samples make six batches, and two batches make a step."""

TIMES = ("train_s", "data_wait_s", "images_per_s", "step_s", "data_wait_share", "memory_allocated", "memory_reserved")


def read_figures(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without times and memory."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


class StopError(Exception):
    """Raised to stop a run."""


class StopAfter(Callback):
    def __init__(self, num_batches: int) -> None:
        self.num_left = num_batches

    def on_batch(self, batch: Any) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise StopError


def make_model() -> nn.Sequential:
    """Return a network with other state than weights: BatchNorm statistics, and the random numbers of Dropout."""
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
    return TrainConfig(
        **{
            "epochs": EPOCHS,
            "precision": "fp32",
            "device": "cpu",
            "lr": 0.02,
            "accumulate": 2,
            "log_every": 1,
            "deterministic": True,
            "directory": directory,
            **options,
        }
    )


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(a, b)
