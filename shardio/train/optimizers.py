"""The optimisers, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardio.train.config import TrainConfig

Parameters = Iterable[nn.Parameter]


def _adamw(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, config.lr, weight_decay=config.weight_decay)


def _adam(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, config.lr, weight_decay=config.weight_decay)


def _sgd(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _rmsprop(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


OPTIMIZERS: dict[str, Callable[[Parameters, TrainConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
}


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimiser of a model's parameters, those left out that are frozen."""
    return OPTIMIZERS[config.optimizer]([weight for weight in model.parameters() if weight.requires_grad], config)
