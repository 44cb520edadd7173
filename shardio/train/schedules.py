"""Learning rates: each schedule is a function of how much of the training is done.

A rate depends on nothing but the step, so that a run can be gone on with anywhere, and its plan drawn beforehand. They
are torch's ``OneCycleLR``, ``CyclicLR``, ``StepLR`` and ``CosineAnnealingLR`` behind ``LinearLR``; ``plateau`` alone is
no plan: it is torch's ``ReduceLROnPlateau``, which goes by the losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardio.train.config import TrainConfig

FIRST, LAST = 1 / 25, 1 / 25e4
"""Of OneCycle: the first rate and the last one, as shares of the highest; torch's ``div_factor`` and
``final_div_factor``."""

LOWEST = 1 / 10
"""Of Cyclic: the lowest rate, as a share of the highest."""

CUT = 1 / 10
"""By how much Step and Plateau cut the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long the training is to be.

    Attributes:
        num_steps: The steps of all epochs.
        steps_per_epoch: Those of a full one.
        warmup: The share of all steps in which the rate rises.
        period: Steps of one cycle, or between two cuts.
    """

    num_steps: int
    steps_per_epoch: int
    warmup: float
    period: int


def make_plan(config: TrainConfig, steps_per_epoch: int) -> Plan:
    """Return the plan for epochs of so many steps."""
    period = config.period if config.period is not None else config.epochs / 3
    return Plan(
        num_steps=config.epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        warmup=config.warmup,
        period=max(round(period * steps_per_epoch), 1),
    )


def _one_cycle(step: int, plan: Plan) -> float:
    """Smith and Topin, "Super-convergence", 2018: up along a cosine, and down to almost nothing."""
    top, last = plan.warmup * plan.num_steps - 1, plan.num_steps - 1
    if step < top:
        return _along_cosine(FIRST, 1.0, step / top)
    return _along_cosine(1.0, LAST, (step - max(top, 0)) / max(last - max(top, 0), 1))


def _cosine(step: int, plan: Plan) -> float:
    """Loshchilov and Hutter, "SGDR", 2016, with a single period, after a linear warm-up."""
    num_warm = round(plan.warmup * plan.num_steps)
    if step < num_warm:
        return (step + 1) / (num_warm + 1)
    return _along_cosine(1.0, 0.0, (step - num_warm) / max(plan.num_steps - num_warm, 1))


def _cyclic(step: int, plan: Plan) -> float:
    """Smith, "Cyclical learning rates", 2015: a triangle, up in the first half of each period."""
    place = step / plan.period % 1
    return LOWEST + (1 - LOWEST) * (1 - abs(2 * place - 1))


def _step(step: int, plan: Plan) -> float:
    return CUT ** (step // plan.period)


def _constant(step: int, plan: Plan) -> float:
    return 1.0


def _along_cosine(start: float, stop: float, share: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


FACTORS: dict[str, Callable[[int, Plan], float]] = {
    "onecycle": _one_cycle,
    "cosine": _cosine,
    "cyclic": _cyclic,
    "step": _step,
    "plateau": _constant,
    "constant": _constant,
}
"""What the rate of a step is multiplied by; steps count from 0."""


def plan_rates(config: TrainConfig, steps_per_epoch: int, max_points: int = 2000) -> list[tuple[int, float]]:
    """Return the planned learning rates as points (step, rate), not more than asked for."""
    plan, factor = make_plan(config, steps_per_epoch), FACTORS[config.schedule]
    stride = -(-plan.num_steps // max_points)
    return [(step, config.lr * factor(step, plan)) for step in range(0, plan.num_steps, stride)]


class Schedule:
    """Sets the learning rates of an optimiser, step by step and after each epoch.

    Args:
        optimizer: Each group of its parameters keeps its own highest rate, with which it comes.
        config: Which schedule.
        steps_per_epoch: Of a full epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig, steps_per_epoch: int) -> None:
        self.plan = make_plan(config, steps_per_epoch)
        self._optimizer = optimizer
        self._factor = FACTORS[config.schedule]
        self._by_step: Any = None
        self._by_epoch: Any = None
        if config.schedule == "plateau":
            patience = max(round(self.plan.period / steps_per_epoch), 1) - 1
            self._by_epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=CUT, patience=patience)
        else:
            self._by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._factor(step, self.plan))

    def step(self) -> None:
        """Go on to the next step's rates."""
        if self._by_step is not None:
            self._by_step.step()

    def end_epoch(self, loss: float) -> None:
        """Hear of the loss after an epoch: of validation, if there is any."""
        if self._by_epoch is not None:
            self._by_epoch.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` goes on from."""
        return {
            "steps_per_epoch": self.plan.steps_per_epoch,
            "period": self.plan.period,
            "torch": (self._by_step or self._by_epoch).state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, at the same part of the way: epochs have fewer steps on more ranks."""
        saved, share = dict(state["torch"]), self.plan.steps_per_epoch / state["steps_per_epoch"]
        # That of then, if more epochs were asked for since: a rate that was cut is not to rise again.
        self.plan = dataclasses.replace(self.plan, period=max(round(state["period"] * share), 1))
        if self._by_epoch is not None:
            self._by_epoch.load_state_dict(saved)
            return
        saved["last_epoch"] = round(saved["last_epoch"] * share)
        self._by_step.load_state_dict(saved)
        for group, highest in zip(self._optimizer.param_groups, saved["base_lrs"], strict=True):
            group["lr"] = highest * self._factor(saved["last_epoch"], self.plan)
