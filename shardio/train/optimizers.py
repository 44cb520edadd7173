"""The optimisers and the learning rate schedules, by name.

A rate depends only on the step, so a run can resume anywhere, and its rates are known in advance.
They equal those of torch's ``OneCycleLR``, ``CyclicLR``, ``StepLR``, and ``CosineAnnealingLR``
after ``LinearLR``. Only ``plateau``, which is torch's ``ReduceLROnPlateau``, depends on the
losses.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardio.train.config import OptimizerName, ScheduleName, TrainConfig

FIRST, LAST = 1 / 25, 1 / 25e4
"""The first and last rates of onecycle, as shares of the highest.

torch's ``OneCycleLR`` sets them by ``div_factor`` and ``final_div_factor``.
"""

LOWEST = 1 / 10
"""The lowest rate of cyclic, as a share of the highest."""

CUT = 1 / 10
"""The factor by which step and plateau cut the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrPlan:
    """The lengths that the learning rates of a run depend on.

    Attributes:
        num_steps: Steps in all epochs.
        steps_per_epoch: Steps in a full epoch.
        warmup: The share of all steps in which the rate rises.
        period: Steps per cycle, or between two cuts.
    """

    num_steps: int
    steps_per_epoch: int
    warmup: float
    period: int


def make_plan(config: TrainConfig, steps_per_epoch: int) -> LrPlan:
    """Return the plan of a run, given the steps in a full epoch."""
    period = config.period if config.period is not None else config.epochs / 3
    return LrPlan(
        num_steps=config.epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        warmup=config.warmup,
        period=max(round(period * steps_per_epoch), 1),
    )


def _one_cycle(step: int, plan: LrPlan) -> float:
    """Rise, then fall to almost 0, along cosines: Smith and Topin, "Super-convergence", 2018."""
    top, last = plan.warmup * plan.num_steps - 1, plan.num_steps - 1
    if step < top:
        return _along_cosine(FIRST, 1.0, step / top)
    return _along_cosine(1.0, LAST, (step - max(top, 0)) / max(last - max(top, 0), 1))


def _cosine(step: int, plan: LrPlan) -> float:
    """Rise linearly, then fall along a cosine: Loshchilov and Hutter, "SGDR", 2016, one period."""
    num_warm = round(plan.warmup * plan.num_steps)
    if step < num_warm:
        return (step + 1) / (num_warm + 1)
    return _along_cosine(1.0, 0.0, (step - num_warm) / max(plan.num_steps - num_warm, 1))


def _cyclic(step: int, plan: LrPlan) -> float:
    """Rise and fall linearly in each period: Smith, "Cyclical learning rates", 2015."""
    share = step / plan.period % 1
    return LOWEST + (1 - LOWEST) * (1 - abs(2 * share - 1))


def _step(step: int, plan: LrPlan) -> float:
    return CUT ** (step // plan.period)


def _constant(step: int, plan: LrPlan) -> float:
    return 1.0


def _along_cosine(start: float, stop: float, share: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


FACTORS: dict[ScheduleName, Callable[[int, LrPlan], float]] = {
    "onecycle": _one_cycle,
    "cosine": _cosine,
    "cyclic": _cyclic,
    "step": _step,
    "plateau": _constant,
    "constant": _constant,
}
"""Functions of a step, counted from 0, that return the rate as a share of the highest."""


def plan_rates(config: TrainConfig, steps_per_epoch: int, max_points: int = 2000) -> list[tuple[int, float]]:
    """Return the planned learning rates as at most ``max_points`` points (step, rate)."""
    plan, factor = make_plan(config, steps_per_epoch), FACTORS[config.schedule]
    stride = -(-plan.num_steps // max_points)
    return [(step, config.lr * factor(step, plan)) for step in range(0, plan.num_steps, stride)]


class LrSchedule:
    """The learning rates of an optimiser, updated after each step and each epoch.

    Args:
        optimizer: The optimiser. The initial rate of each parameter group is its highest rate.
        config: The schedule and its settings.
        steps_per_epoch: Steps in a full epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig, steps_per_epoch: int) -> None:
        self.plan = make_plan(config, steps_per_epoch)
        self._optimizer, self._factor = optimizer, FACTORS[config.schedule]
        self._is_plateau = config.schedule == "plateau"
        self._scheduler: Any  # Torch's.
        if self._is_plateau:
            patience = max(round(self.plan.period / steps_per_epoch), 1) - 1
            self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=CUT, patience=patience)
        else:
            self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._factor(step, self.plan))

    def step(self) -> None:
        """Set the rates for the next step."""
        if not self._is_plateau:
            self._scheduler.step()

    def end_epoch(self, loss: float) -> None:
        """Set the rates for the next epoch, given this epoch's validation or training loss."""
        if self._is_plateau:
            self._scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`."""
        return {
            "steps_per_epoch": self.plan.steps_per_epoch,
            "period": self.plan.period,
            "torch": self._scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the same share of training. More ranks take fewer steps."""
        saved, share = dict(state["torch"]), self.plan.steps_per_epoch / state["steps_per_epoch"]
        # The period stays as saved even if the run now has more epochs: a rate that was cut must not rise again.
        self.plan = dataclasses.replace(self.plan, period=max(round(state["period"] * share), 1))
        if self._is_plateau:
            self._scheduler.load_state_dict(saved)
            return
        saved["last_epoch"] = round(saved["last_epoch"] * share)
        self._scheduler.load_state_dict(saved)
        for group, highest in zip(self._optimizer.param_groups, saved["base_lrs"], strict=True):
            group["lr"] = highest * self._factor(saved["last_epoch"], self.plan)


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
