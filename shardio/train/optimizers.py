"""The optimisers, by name."""

from __future__ import annotations

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
    """Return an optimiser of a model's parameters, without those that are frozen."""
    kind, settings = OPTIMIZERS[config.optimizer]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return kind(weights, **{name: getattr(config, name) for name in settings})
