"""The training loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardio.device import DevicePrefetcher
from shardio.sample import warn_of_other_classes
from shardio.train.callbacks import Callback, HtmlReport, JsonLog, SizeHints, TensorBoardLog
from shardio.train.checkpoint import algorithms
from shardio.train.config import TrainConfig
from shardio.train.meters import (
    EpochResult,
    gather,
    joined_ranks,
    reported_failures,
    share_gradients,
    unwrap,
    use_device,
)
from shardio.train.optimizers import LrSchedule, make_optimizer
from shardio.train.run import TrainRun, claimed
from shardio.train.step import (
    TrainStep,
    images_and_labels,
    in_groups,
    make_loss,
    make_transforms,
    measure,
    prefetch,
    warn_of_repeats,
)
from shardio.world import World


def train(
    model: nn.Module,
    loader: Iterable[Any],
    config: TrainConfig,
    *,
    val_loader: Iterable[Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[EpochResult]:
    """Train a classifier.

    Under torchrun, ranks average their gradients, and the loader gives each rank its own part of
    the data. With a ``directory``, the same call resumes an interrupted run, on any number of
    ranks. On the same number of ranks, the resumed run equals an uninterrupted one, with two
    exceptions: in datasets that are not shardio's, transforms draw different numbers if they use the
    generators of torch, numpy or Python, and results are bitwise equal only on a CPU with
    ``deterministic``. On a different number of ranks, each sample is still used once per epoch;
    without shardio's order, such a run must resume after an epoch. Callbacks resume if they have a
    ``state_dict``.

    Args:
        model: A module that maps images, float [N, C, H, W], to outputs [N, classes]. It is moved
            to the device and trained in place.
        loader: An iterable of batches that start with images [N, …] and labels: integers [N] or
            floats [N, classes]. Images that are uint8 [N, C, H, W] are normalised.
        config: The settings.
        val_loader: Batches to evaluate the model on after each epoch, as :func:`evaluate` does.
        callbacks: Additions to the loop.

    Returns:
        The metrics of each epoch.

    Raises:
        NonFiniteLossError: If the loss or a weight is NaN or infinite.
        StateError: If the directory contains a run with other settings, another model or other data, a run without its
            last checkpoint, or another tool's log.
        FormatError: If the checkpoint cannot be read.
        OSError: If a checkpoint cannot be written. The previous one is kept.
        BusyError: If another run is writing to the directory.
    """
    if val_loader is not None:
        warn_of_other_classes(loader, val_loader)
    device = use_device(config.device)
    directory = None if config.directory is None else Path(config.directory)
    with (
        reported_failures(),
        algorithms(deterministic=config.deterministic, tf32=config.tf32),
        joined_ranks(device) as world,
        claimed(directory),
    ):
        if val_loader is not None:
            warn_of_repeats(val_loader, world, stacklevel=2)
        callbacks = [*callbacks, *_make_callbacks(config, directory, device)] if world.rank == 0 else callbacks
        batches = prefetch(loader, config, device, make_transforms(loader, config))
        return _train(model, batches, config, val_loader, callbacks, world)


def _train(
    model: nn.Module,
    batches: DevicePrefetcher,
    config: TrainConfig,
    val_loader: Iterable[Any] | None,
    callbacks: Sequence[Callback],
    world: World,
) -> list[EpochResult]:
    """Train on this rank. On return, everything that refers to other ranks is freed."""
    batches.start_workers()  # They start while the model is moved and the optimizer is made.
    val_batches = None if val_loader is None else prefetch(val_loader, config, batches.device)
    run = _make_run(model, batches, config, callbacks, world)
    network = unwrap(run.step.model)  # Ranks may have different numbers of validation batches.
    run.start()
    for epoch in run.epochs():
        model.train()
        for batch, ends_step in in_groups(run.batches_of(epoch), config.accumulate):
            images, labels = images_and_labels(batch)
            outputs, loss = run.step(images, labels, ends_step=ends_step)
            run.record(batch, outputs, loss, ends_step=ends_step)
        run.log()
        run.end_epoch(None if val_batches is None else measure(network, val_batches, config))
    for callback in callbacks:
        callback.on_end(run.results)
    return run.results


def _make_run(
    model: nn.Module, batches: DevicePrefetcher, config: TrainConfig, callbacks: Sequence[Callback], world: World
) -> TrainRun:
    """Return the run, with its model moved to the device and connected to the other ranks."""
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model.to(batches.device, memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack it
    wrapped = model
    for callback in callbacks:
        wrapped = callback.wrap_model(wrapped)
    optimizer = make_optimizer(model, config)
    schedule = LrSchedule(optimizer, config, count_steps(batches.loader, config))
    step = TrainStep(
        share_gradients(wrapped, batches.device, deterministic=config.deterministic),
        optimizer,
        schedule=schedule,
        precision=config.precision,
        accumulate=config.accumulate,
        loss_fn=make_loss(config),
        clip_norm=config.clip_norm,
        clip_value=config.clip_value,
        hooks=[callback.add_to_loss for callback in callbacks],
    )
    return TrainRun(config, model, step, schedule, batches, world, callbacks)


def _make_callbacks(config: TrainConfig, directory: Path | None, device: torch.device) -> list[Callback]:
    """Return the callbacks that rank 0 adds: hints for the GPU, and the files in the run's directory."""
    callbacks: list[Callback] = []
    if device.type == "cuda" and config.precision != "fp32":
        callbacks.append(SizeHints())
    if directory is not None:
        callbacks += [JsonLog(directory), HtmlReport(directory, config)]
        if importlib.util.find_spec("tensorboard") is not None:
            callbacks.append(TensorBoardLog(directory))
    return callbacks


def count_steps(loader: Any, config: TrainConfig) -> int:
    """Return the number of steps in a full epoch.

    Raises:
        ValueError: If the loader has no length and the settings do not give one, or if the ranks' loaders have
            different numbers of batches.
    """
    if config.steps_per_epoch is not None:
        return config.steps_per_epoch
    try:
        num_batches = gather(len(loader))
    except TypeError as error:
        raise ValueError(
            f"{type(loader).__name__} has no length, which the schedule needs: set steps_per_epoch"
        ) from error
    if len(set(num_batches)) > 1:
        raise ValueError(
            f"all ranks must have the same number of batches, got {num_batches}: use remainder='pad' or 'drop' in the "
            "ShardDataset or EpochSampler"
        )
    return max(-(-num_batches[0] // config.accumulate), 1)
