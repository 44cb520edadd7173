"""The training loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardio.classes import warn_of_other_classes
from shardio.device import DevicePrefetcher
from shardio.train.callbacks import Callback
from shardio.train.claims import claimed
from shardio.train.config import TrainConfig
from shardio.train.hints import SizeHints
from shardio.train.logs import JsonLog, TensorBoardLog
from shardio.train.meters import EpochResult, Score
from shardio.train.optimizers import make_optimizer
from shardio.train.ranks import (
    failures_told,
    gather,
    joined,
    pick_device,
    same_buffers,
    share_gradients,
    without_wrapper,
)
from shardio.train.repeats import warn_of_repeats
from shardio.train.report import Report
from shardio.train.run import Run
from shardio.train.schedules import Schedule
from shardio.train.seeds import algorithms
from shardio.train.step import TrainStep, autocast, in_groups
from shardio.world import World


class Loader(Protocol):
    """What is asked of a loader: batches that begin with images and labels."""

    def __iter__(self) -> Iterator[Any]: ...


def train(
    model: nn.Module,
    loader: Loader,
    config: TrainConfig,
    *,
    val_loader: Loader | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[EpochResult]:
    """Train a classifier.

    Started by torchrun, ranks share their gradients, each with its own part of the data, as the loader deals it. With
    a ``directory``, the same call goes on where it was stopped, also with another number of ranks. All is then as if
    it had not stopped, with two limits: transforms of one's own that draw from torch's, numpy's or Python's generators
    draw other numbers (shardio's do not), and on CUDA only ``deterministic`` repeats every bit.

    Args:
        model: From images float [N, C, H, W] to outputs [N, classes]. It is moved to the device and changed.
        loader: Batches that begin with images [N, …] and integer labels [N]. Images that are uint8 [N, C, H, W] are
            normalised.
        config: How to train.
        val_loader: Batches to measure the model by after each epoch, as :func:`evaluate` does.
        callbacks: What is to be done besides.

    Returns:
        The figures of each epoch.

    Raises:
        NonFiniteLossError: If the loss is NaN or infinite.
        StateError: If the directory holds a run of other settings, another model or other data, a run whose last
            checkpoint is gone, or another tool's log.
        FormatError: If its checkpoint cannot be read.
        OSError: If a checkpoint cannot be written; the one before it is kept.
        BusyError: If another run writes into the directory.
    """
    if val_loader is not None:
        warn_of_other_classes(loader, val_loader)
    device = pick_device(config.device)
    directory = None if config.directory is None else Path(config.directory)
    with (
        failures_told(),
        algorithms(deterministic=config.deterministic),
        joined(device) as world,
        claimed(directory, world),
    ):
        if val_loader is not None:
            warn_of_repeats(val_loader, world, stacklevel=2)
        hints = [SizeHints()] if device.type == "cuda" and config.precision != "fp32" and world.rank == 0 else []
        callbacks = [*callbacks, *hints, *_make_writers(config, world)]
        return _train(model, _prefetch(loader, config, device), config, val_loader, callbacks, world)


def _train(
    model: nn.Module,
    batches: DevicePrefetcher,
    config: TrainConfig,
    val_loader: Loader | None,
    callbacks: Sequence[Callback],
    world: World,
) -> list[EpochResult]:
    """Train on this rank. All that knows the other ranks is gone when it returns, before they part."""
    val_batches = None if val_loader is None else _prefetch(val_loader, config, batches.device)
    run = _prepare(model, batches, config, world, callbacks)
    network = without_wrapper(run.step.model)  # To validate, ranks need not go in step.
    run.begin()
    for epoch in run.epochs():
        model.train()
        for batch, ends_step in in_groups(run.batches_of(epoch), config.accumulate):
            images, labels = images_and_labels(batch)
            outputs, loss = run.step(images, labels, ends_step=ends_step)
            run.note(batch, outputs, loss, ends_step=ends_step)
        run.log()
        score = None if val_batches is None else _evaluate(network, val_batches, config)
        run.end_epoch(score)
    for callback in callbacks:
        callback.on_end(run.results)
    return run.results


def evaluate(model: nn.Module, loader: Iterable[Any], config: TrainConfig) -> Score:
    """Measure a model over all batches of all ranks, each of which must call this; leave it as it was.

    It is exact where each sample comes once, or what comes again is marked by a last field of booleans [N] that says
    which samples count: that is what shardio's loaders do with ``remainder="mask"``. A loader that repeats samples
    without marks gets a RuntimeWarning.

    Args:
        model: From images to outputs [N, classes], on the device.
        loader: Batches that begin with images and labels.
        config: The precision, and how images are normalised.

    Returns:
        The score over all ranks.

    Raises:
        ValueError: If there is no sample.
    """
    device = pick_device(config.device)
    with joined(device) as world:
        warn_of_repeats(loader, world, stacklevel=2)
        batches = loader if isinstance(loader, DevicePrefetcher) else _prefetch(loader, config, device)
        return _evaluate(model, batches, config)


def _evaluate(model: nn.Module, batches: DevicePrefetcher, config: TrainConfig) -> Score:
    """Measure a model, as :func:`evaluate` does, among ranks that are joined."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        same_buffers(model)
        score = _score(model, batches, config).over_ranks()
    model.train(was_training)
    if not score.num_images:
        raise ValueError("there is nothing to evaluate: the loader gave no samples, or all were marked as repeats")
    return score


def _score(model: nn.Module, batches: DevicePrefetcher, config: TrainConfig) -> Score:
    score = Score(batches.device)
    for batch in batches:
        images, labels = images_and_labels(batch)
        with autocast(batches.device, config.precision):
            outputs = model(images)
            losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        last = batch[-1]
        is_mask = isinstance(last, torch.Tensor) and last.dtype == torch.bool
        score.add(losses, outputs, labels, last if is_mask else None)
    return score


def images_and_labels(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first two fields of a batch."""
    fields = batch if isinstance(batch, (tuple, list)) else ()
    if len(fields) < 2 or not all(isinstance(field, torch.Tensor) for field in fields[:2]):
        found = f"{type(batch).__name__} of {', '.join(type(field).__name__ for field in fields) or 'something else'}"
        raise TypeError(f"batches must begin with a tensor of images and one of labels, got a {found}")
    return fields[0], fields[1]


def _prefetch(loader: Iterable[Any], config: TrainConfig, device: torch.device) -> DevicePrefetcher:
    return DevicePrefetcher(loader, device, normalize=(config.mean, config.std), channels_last=config.channels_last)


def _prepare(
    model: nn.Module, batches: DevicePrefetcher, config: TrainConfig, world: World, callbacks: Sequence[Callback]
) -> Run:
    """Bring the model to its device and its ranks together; return the run."""
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model.to(batches.device, memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack it
    wrapped = model
    for callback in callbacks:
        wrapped = callback.wrap_model(wrapped)
    optimizer = make_optimizer(model, config)
    schedule = Schedule(optimizer, config, count_steps(batches.loader, config))
    step = TrainStep(
        share_gradients(wrapped, batches.device, deterministic=config.deterministic),
        optimizer,
        schedule=schedule,
        precision=config.precision,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm,
        clip_value=config.clip_value,
        hooks=[callback.add_to_loss for callback in callbacks],
    )
    return Run(config, model, step, schedule, batches, world, callbacks)


def _make_writers(config: TrainConfig, world: World) -> list[Callback]:
    """Return who writes into the run's directory: on rank 0, if there is one."""
    if config.directory is None or world.rank != 0:
        return []
    directory = Path(config.directory)
    writers: list[Callback] = [JsonLog(directory), Report(directory, config)]
    if importlib.util.find_spec("tensorboard") is not None:
        writers.append(TensorBoardLog(directory))
    return writers


def count_steps(loader: Any, config: TrainConfig) -> int:
    """Return how many steps a full epoch has.

    Raises:
        ValueError: If the loader has no length and the settings do not say, or ranks have different ones.
    """
    if config.steps_per_epoch is not None:
        return config.steps_per_epoch
    try:
        num_batches = gather(len(loader))
    except TypeError as error:
        raise ValueError(
            f"{type(loader).__name__} has no length, and the schedule needs one: say steps_per_epoch"
        ) from error
    if len(set(num_batches)) > 1:
        raise ValueError(
            f"ranks must have equally many batches, and have {num_batches}: share the samples out with "
            "remainder='pad' or 'drop'"
        )
    return max(-(-num_batches[0] // config.accumulate), 1)
