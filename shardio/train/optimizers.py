"""The optimisers, by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shardio.train.config import OptimizerName, TrainConfig

OPTIMIZERS: dict[OptimizerName, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, ("lr", "weight_decay")),
    "adam": (torch.optim.Adam, ("lr", "weight_decay")),
    "sgd": (torch.optim.SGD, ("lr", "weight_decay", "momentum")),
    "rmsprop": (torch.optim.RMSprop, ("lr", "weight_decay", "momentum")),
}
"""The classes of the optimisers, and the settings that they take.

To add an optimiser, add a line here, and its name to ``config.OptimizerName``.
"""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return an optimiser of a model's parameters, without those that are frozen.

    On CUDA, one kernel updates all parameters, where torch has one. Not with fp16: torch calls a fused optimiser even
    if a gradient is not finite, so the scale would have to be read after each step.
    """
    kind, settings = OPTIMIZERS[config.optimizer]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    options: dict[str, Any] = {name: getattr(config, name) for name in settings}
    if (
        "fused" in inspect.signature(kind).parameters
        and config.precision != "fp16"
        and all(weight.is_cuda for weight in weights)
    ):
        options["fused"] = True
    if config.decay_all:
        return kind(weights, **options)
    # Norms and biases have one dimension.
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1]},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **options)
