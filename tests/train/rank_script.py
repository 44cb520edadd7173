"""Perform one training run after another; each process is a rank of a test.

In the run's directory, each rank writes the keys of each of its steps to ``keys-LAUNCH-RANK.jsonl``, and its error,
if there is one, to ``error-RANK.txt``.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

import shardio
from shardio import ShardDataset, ShardMapDataset
from shardio.train import Callback, TrainConfig, evaluate, train
from shardio.transforms import CenterCrop, RandomResizedCrop
from shardio.world import find_world
from tests.train.runs import Poison, make_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    source: str  # The packed dataset.
    directory: str
    launch: int = 0  # The number of the launch.
    config: dict[str, Any]
    batch_size: int = 2
    num_workers: int = 0
    kill: tuple[int, int] | None = None  # (rank, step) at which a rank kills itself, to simulate a lost machine.
    fail: tuple[int, int] | None = None  # (rank, step) at which a rank raises an error.
    remainder: Any = "pad"
    nan: tuple[int, int] | None = None  # (rank, step) at which a rank's loss becomes NaN.
    sizes: list[list[int]] | None = None  # The sizes of each rank's batches of noise, which replace the dataset.
    repeat: int = 1
    is_plain: bool = False  # The model's output for a sample does not depend on other samples.
    is_torchs: bool = False  # The order is that of torch's DistributedSampler.
    is_refused: bool = False  # All ranks raise an error at the start; then the next run begins.


class Keys(Callback):
    """A callback that writes the keys of each step, and ends the rank at the step that the settings name."""

    def __init__(self, settings: Settings) -> None:
        self.rank = find_world().rank
        self.settings = settings
        self.path = Path(settings.directory) / f"keys-{settings.launch}-{self.rank}.jsonl"
        self.num_steps = self.epoch = 0

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        self.num_steps, self.epoch = num_steps, num_epochs

    def wrap_model(self, model: nn.Module) -> nn.Module:
        if self.settings.nan is None or self.settings.nan[0] != self.rank:
            return model
        return nn.Sequential(Poison(self.settings.nan[1]), model)

    def on_batch(self, batch: Any) -> None:
        self.num_steps += 1  # In these tests, each microbatch counts as a step.
        keys = list(batch[2]) if len(batch) > 2 else []
        line = {"rank": self.rank, "epoch": self.epoch, "step": self.num_steps, "keys": keys}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.settings.kill is not None and list(self.settings.kill) == [self.rank, self.num_steps]:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.settings.fail is not None and list(self.settings.fail) == [self.rank, self.num_steps]:
            raise ArithmeticError(f"rank {self.rank} fails on purpose")

    def on_epoch(self, result: Any) -> None:
        self.epoch = result.epoch + 1


def make_model(*, is_plain: bool = False) -> nn.Module:
    torch.manual_seed(1)
    if is_plain:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 7 * 7, 3)
    )


def train_as(settings: Settings) -> None:
    """Perform one run: train and evaluate a model, and write the run's figures to ``end-RANK.json``."""
    fields = ("image", "label", "key")
    dataset = ShardDataset(
        settings.source, fields=fields, shuffle=True, remainder=settings.remainder, transform=RandomResizedCrop(16)
    )
    loader = shardio.DataLoader(dataset, settings.batch_size, num_workers=settings.num_workers)
    if settings.is_torchs:
        mapped = ShardMapDataset(settings.source, fields=fields, transform=CenterCrop(16))
        world = find_world()
        sampler: Any = DistributedSampler(mapped, world.world_size, world.rank)
        loader = shardio.DataLoader(mapped, settings.batch_size, sampler=sampler)
    val_set = ShardMapDataset(settings.source, transform=CenterCrop(16))
    val_sampler = shardio.EpochSampler(val_set, shuffle=False, remainder="mask")
    val_loader = shardio.DataLoader(val_set, 3, sampler=val_sampler)
    options = {"precision": "fp32", "device": "cpu", "log_every": 1, "directory": settings.directory}
    config = TrainConfig(**{**options, **settings.config})
    own: Any = loader if settings.sizes is None else make_batches(settings.sizes[find_world().rank], side=16)
    for _ in range(settings.repeat):
        model = make_model(is_plain=settings.is_plain)
        train(model, own, config, val_loader=val_loader, callbacks=[Keys(settings)])
    score = evaluate(model, val_loader, config)
    tensors = [weight.detach().flatten() for weight in model.parameters()]
    weights = sum(float((tensor * torch.arange(1, len(tensor) + 1)).sum()) for tensor in tensors)
    figures = {"num_images": score.num_images, "accuracy": score.accuracy, "weights": weights}
    (Path(settings.directory) / f"end-{find_world().rank}.json").write_text(json.dumps(figures))


def train_as_rank(rank: int, runs: list[dict[str, Any]]) -> None:
    """Perform all runs as one of the ranks of :func:`tests.processes.run_launched_ranks`."""
    train_runs(runs)


def train_runs(runs: list[dict[str, Any]]) -> None:
    for settings in (Settings(**run) for run in runs):
        try:
            train_as(settings)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            (Path(settings.directory) / f"error-{find_world().rank}.txt").write_text(message)
            if not settings.is_refused:
                raise
        if dist.is_initialized():  # After an error.
            dist.destroy_process_group()
