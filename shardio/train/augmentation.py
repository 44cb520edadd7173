"""What makes training harder than validation: mixed and erased images, and smoothed labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardio.classes import count_classes
from shardio.device import BatchRandomErasing, CutMix, MixUp, OneOf
from shardio.device.generators import BatchTransform
from shardio.train.config import TrainConfig
from shardio.train.step import LossFunction


def make_transforms(loader: Any, config: TrainConfig) -> list[BatchTransform]:
    """Return the transforms of training batches on the device, in the order of torchvision's reference training.

    Raises:
        ValueError: If batches are to be mixed and the number of classes is unknown.
    """
    transforms = list[BatchTransform]()
    if config.random_erasing:
        transforms.append(BatchRandomErasing(config.random_erasing))
    if config.mixup or config.cutmix:
        transforms.append(_make_mixing(loader, config))
    return transforms


def make_loss(config: TrainConfig) -> LossFunction:
    """Return the training loss, for class numbers [N] and for soft labels [N, classes]."""

    def compute_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.is_floating_point() and labels.shape != outputs.shape:
            raise ValueError(
                f"soft labels {list(labels.shape)} must have the shape of the model's outputs, {list(outputs.shape)}: "
                "if mixup or cutmix made them, set num_classes to the number of outputs"
            )
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=config.label_smoothing)

    return compute_loss


def _make_mixing(loader: Any, config: TrainConfig) -> BatchTransform:
    num_classes = config.num_classes or count_classes(loader)
    if num_classes is None:
        raise ValueError(
            f"mixup and cutmix need the number of classes, which the dataset of this {type(loader).__name__} does not "
            "have: set num_classes"
        )
    mixing = list[BatchTransform]()
    if config.mixup:
        mixing.append(MixUp(alpha=config.mixup, num_classes=num_classes))
    if config.cutmix:
        mixing.append(CutMix(alpha=config.cutmix, num_classes=num_classes))
    return OneOf(mixing)
