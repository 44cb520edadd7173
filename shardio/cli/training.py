"""The data, the model and the output of ``shardio train``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from shardio.cli.options import RemoteArguments, has_class_folders, make_transform
from shardio.cli.terminal import echo, make_bar, name_of
from shardio.datasets import EpochSampler, ImageFolder, ShardMapDataset
from shardio.errors import FormatError
from shardio.loader import DataLoader
from shardio.order import make_rng_key, permute
from shardio.process import count_processors
from shardio.shards import open_table
from shardio.storage import make_access
from shardio.train import EpochResult, PrintEpochs, make_model
from shardio.transforms import (
    CenterCrop,
    Compose,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    count_crops,
    recipes,
)
from shardio.world import find_local_world_size, find_world

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables by which users set torch's threads. torchrun sets the first one to 1 if it starts several ranks."""


def choose_threads(num_processors: int, num_ranks: int, num_workers: int) -> int:
    """Return the number of torch threads of each rank of a machine, in addition to its loader's workers, at least 1.

    By default, torch uses all processors. After each operation, its threads wait in a busy loop until all of them have
    finished, so one thread on a busy processor delays all others.

    >>> choose_threads(8, 1, 2), choose_threads(8, 2, 2), choose_threads(2, 1, 2)
    (6, 2, 1)
    """
    return max(1, num_processors // num_ranks - num_workers)


def leave_processors_to_workers(num_workers: int, device: torch.device, num_before: int) -> str | None:
    """Reduce torch's threads if it computes on a CPU and the user has not chosen their number.

    Args:
        num_workers: The number of the loader's workers.
        device: The device on which torch computes.
        num_before: The number of torch's threads when the process started. A different number now is the user's choice.

    Returns:
        A message about the change; None if nothing changed.
    """
    if device.type != "cpu" or torch.get_num_threads() != num_before or any(map(os.environ.get, VARIABLES)):
        return None
    num_processors, num_ranks = count_processors(), find_local_world_size()
    num_threads = choose_threads(num_processors, num_ranks, num_workers)
    if num_threads >= num_before:  # torch counts cores, each of which may be two processors.
        return None
    torch.set_num_threads(num_threads)
    return (
        f"torch uses {num_threads} of its {num_before} threads and leaves processors to the loader (processors: "
        f"{num_processors}, ranks: {num_ranks}, workers: {num_workers}): change this with --threads or OMP_NUM_THREADS"
    )


MapDataset = ImageFolder | ShardMapDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainData:
    """The training and validation data.

    Attributes:
        training: The training samples, with random crops.
        validation: Other samples, with central crops; None without validation.
        num_classes: The number of classes.
        seed: The seed of the order and the crops.
    """

    training: MapDataset | Subset[Any]
    validation: MapDataset | Subset[Any] | None
    num_classes: int
    seed: int

    def make_loaders(self, options: dict[str, Any]) -> tuple[DataLoader, DataLoader | None]:
        """Return the loaders for training and validation, given DataLoader's other arguments."""
        loader = DataLoader(self.training, sampler=EpochSampler(self.training, seed=self.seed), **options)
        if self.validation is None:
            return loader, None
        # Repeated samples are marked, so the validation is exact on any number of ranks.
        sampler = EpochSampler(self.validation, shuffle=False, remainder="mask")
        return loader, DataLoader(self.validation, sampler=sampler, **options)


@dataclass(frozen=True, slots=True)
class Transforms:
    """The transforms of the training and of the validation images."""

    training: Callable[[Any], Any]
    validation: Callable[[Any], Any]


def choose_transforms(recipe: str | None, transform: str | None, image_size: int) -> Transforms:
    """Return the transforms that ``--recipe`` or ``--transform`` names, or by default crops and flips.

    Raises:
        ValueError: If there is no such transform, or it makes several crops of an image.
    """
    if recipe is None and transform is None:
        augmented = Compose([RandomResizedCrop(image_size, scale=(0.25, 1.0)), RandomHorizontalFlip()])
        return Transforms(augmented, Compose([Resize(image_size * 8 // 7), CenterCrop(image_size)]))
    made = make_transform(recipe, transform, image_size)
    if count_crops(made) is not None:
        raise ValueError(f"{recipe or transform} makes several crops of each image, and a classifier needs one")
    validation = recipes.cifar_eval if recipe == "cifar" else recipes.imagenet_eval
    return Transforms(made, validation(image_size))


def open_data(
    source: Path,
    val_source: Path | None,
    val_share: float,
    transforms: Transforms,
    seed: int,
    max_pixels: int,
    remote: RemoteArguments,
) -> TrainData:
    """Open the training data and the validation data. The latter is another source, or a share of the same source."""
    open_source = partial(_open_source, max_pixels=max_pixels, remote=remote)
    central = transforms.validation
    training = open_source(source, transforms.training)
    if val_source is not None:
        try:
            validation = open_source(val_source, central, classes=training)
        except ValueError as error:
            raise FormatError(
                f"the validation data {name_of(val_source)} does not fit the classes of the training data "
                f"{name_of(source)}: {error}"
            ) from error
        return TrainData(training=training, validation=validation, num_classes=len(training.classes), seed=seed)
    if not val_share:
        return TrainData(training=training, validation=None, num_classes=len(training.classes), seed=seed)
    num_val = round(len(training) * val_share)
    if not 0 < num_val < len(training):
        raise FormatError(
            f"{name_of(source)} has {len(training)} samples, too few to set aside a share of {val_share:g} for "
            "validation: pass another --val-share, --val DATA, or --val-share 0 to train without validation"
        )
    chosen = permute(np.arange(len(training)), np.array([len(training)]), make_rng_key(seed, "split")).tolist()
    return TrainData(
        training=Subset(training, sorted(chosen[num_val:])),
        validation=Subset(open_source(source, central), sorted(chosen[:num_val])),
        num_classes=len(training.classes),
        seed=seed,
    )


def make_network(name: str, num_classes: int, image_size: int, *, pretrained: bool, is_scripted: bool) -> nn.Module:
    """Return the model of this name, as TorchScript if ``is_scripted``."""
    network = make_model(name, num_classes=num_classes, image_size=image_size, pretrained=pretrained)
    return torch.jit.script(network) if is_scripted else network


class EpochBar(PrintEpochs):
    """Prints a line for each epoch and, on a terminal, a progress bar, both on rank 0 only. A context manager."""

    def __init__(self, num_batches: int, *, is_shown: bool) -> None:
        self._bar = make_bar() if is_shown and find_world().rank == 0 else None
        super().__init__(echo if self._bar is None else partial(self._bar.console.print, highlight=False))
        self._num_images, self._start = 0, time.perf_counter()
        if self._bar is not None:
            self._bar.add_task("epoch 0", total=num_batches, rate="")

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        super().on_start(num_epochs, num_steps)
        self._begin(num_epochs)

    def on_batch(self, batch: Any) -> None:
        if self._bar is not None:
            self._num_images += len(batch[1])
            rate = self._num_images / (time.perf_counter() - self._start)
            self._bar.update(self._bar.task_ids[0], advance=1, rate=f"{rate:.0f} images/s")

    def on_epoch(self, result: EpochResult) -> None:
        super().on_epoch(result)
        self._begin(result.epoch + 1)

    def __enter__(self) -> EpochBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _begin(self, epoch: int) -> None:
        self._num_images, self._start = 0, time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=0, description=f"epoch {epoch}")


def _open_source(
    source: Path,
    transform: Callable[[Any], Any],
    *,
    max_pixels: int,
    remote: RemoteArguments,
    classes: MapDataset | None = None,
) -> MapDataset:
    access = make_access(**remote)
    if has_class_folders(source, access):
        return ImageFolder(source, transform=transform, max_pixels=max_pixels, classes=classes, **remote)
    if not open_table(source, access).manifest.classes:
        raise FormatError(
            f"{name_of(source)} has no class names: pass class folders of images, or a dataset that shardio packed "
            "from them (shardio pack IMAGES OUT)"
        )
    fields = ("image", "label", "key")
    return ShardMapDataset(source, fields=fields, transform=transform, max_pixels=max_pixels, classes=classes, **remote)
