"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from shardio.device import DevicePrefetcher
from shardio.train.config import TrainConfig
from shardio.train.meters import EpochResult, Score, TimedBatches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Loader(Protocol):
    """What is asked of a loader: batches that begin with images and labels, and their number."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


def train(
    model: nn.Module,
    loader: Loader,
    config: TrainConfig,
    *,
    val_loader: Loader | None = None,
    on_batch: Callable[[int, Score], None] | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
) -> list[EpochResult]:
    """Train a classifier.

    Args:
        model: From images float [N, C, H, W] to outputs [N, classes]. It is moved to the device and changed.
        loader: Batches that begin with uint8 images [N, C, H, W] and integer labels [N].
        config: How to train.
        val_loader: Batches to measure the model by after each epoch.
        on_batch: Called after each microbatch with its number in the epoch and the epoch's score so far.
        on_epoch: Called after each epoch with its result.

    Returns:
        The figures of each epoch.
    """
    batches = DevicePrefetcher(loader, config.device, normalize=(config.mean, config.std))
    device = batches.device
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    steps_per_epoch = -(-len(loader) // config.accumulate)
    optimizer = _make_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.epochs * steps_per_epoch, cycle_momentum=False
    )
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    results, lr = [], schedule.get_last_lr()[0]
    for epoch in range(config.epochs):
        model.train()
        score, timed, start = Score(device), TimedBatches(batches), time.perf_counter()
        batches.set_epoch(epoch)
        for number, (images, labels, *_) in enumerate(timed):
            with _autocast(device, config):
                outputs = model(images)
                loss = nn.functional.cross_entropy(outputs, labels)
            scaler.scale(loss / _group_size(number, len(loader), config.accumulate)).backward()
            if (number + 1) % config.accumulate == 0 or number + 1 == len(loader):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                lr = schedule.get_last_lr()[0]
                schedule.step()
            score.add(loss, outputs, labels)
            if on_batch is not None:
                on_batch(number, score)
        loss_value, train_s = score.loss, time.perf_counter() - start  # Reading the loss waits for the device.
        validation = None if val_loader is None else evaluate(model, val_loader, config)
        result = EpochResult(
            epoch=epoch,
            loss=loss_value,
            accuracy=score.accuracy,
            val_loss=validation.loss if validation else None,
            val_accuracy=validation.accuracy if validation else None,
            num_images=score.num_images,
            train_s=train_s,
            data_wait_s=timed.wait_s,
            lr=float(lr),
        )
        results.append(result)
        if on_epoch is not None:
            on_epoch(result)
    return results


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Any], config: TrainConfig) -> Score:
    """Measure a model over a loader's batches, which begin with images and labels; leave the model as it was."""
    batches = DevicePrefetcher(loader, config.device, normalize=(config.mean, config.std))
    was_training = model.training
    model.eval()
    score = Score(batches.device)
    for images, labels, *_ in batches:
        with _autocast(batches.device, config):
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
        score.add(loss, outputs, labels)
    model.train(was_training)
    return score


def _make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), config.lr, momentum=0.9, weight_decay=config.weight_decay)
    return torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay)


def _autocast(device: torch.device, config: TrainConfig) -> torch.autocast:
    return torch.autocast(device.type, DTYPES[config.precision], enabled=config.precision != "fp32")


def _group_size(number: int, num_batches: int, accumulate: int) -> int:
    """Return how many microbatches the step has to which this one belongs: fewer at the end of an epoch."""
    first = number - number % accumulate
    return min(accumulate, num_batches - first)
