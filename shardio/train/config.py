"""The settings of a training run, its learning rates and its optimisers.

A rate depends only on the step, so a run can resume anywhere, and its rates are known in advance. They equal those of
torch's ``OneCycleLR``, ``CyclicLR``, ``StepLR``, and ``CosineAnnealingLR`` after ``LinearLR``. Only ``plateau``, which
is torch's ``ReduceLROnPlateau``, depends on the losses.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from shardio.storage import find_url
from shardio.values import check_choice, check_integer, check_optional_integer, check_plain

Precision = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop"]
ScheduleName = Literal["onecycle", "cosine", "cyclic", "step", "plateau", "constant"]

MAY_CHANGE = ("epochs", "steps_per_epoch", "patience", "device", "directory", "resume", "log_every", "checkpoint_every")
"""Settings that may differ when a run resumes. New ``epochs`` change later learning rates."""

FIRST, LAST = 1 / 25, 1 / 25e4
"""The first and last rates of onecycle, as shares of the highest.

torch's ``OneCycleLR`` sets them by ``div_factor`` and ``final_div_factor``.
"""

LOWEST = 1 / 10
"""The lowest rate of cyclic, as a share of the highest."""

CUT = 1 / 10
"""The factor by which step and plateau cut the rate."""

OPTIMIZERS: dict[OptimizerName, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, ("lr", "weight_decay")),
    "adam": (torch.optim.Adam, ("lr", "weight_decay")),
    "sgd": (torch.optim.SGD, ("lr", "weight_decay", "momentum")),
    "rmsprop": (torch.optim.RMSprop, ("lr", "weight_decay", "momentum")),
}
"""The classes of the optimisers, and the settings that they take.

To add an optimiser, add a line here, and its name to ``config.OptimizerName``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training run. ``shardio train`` takes options and help texts from here.

    Attributes:
        epochs: Number of epochs.
        accumulate: Batches to accumulate for each optimiser step.
        lr: The highest learning rate.
        optimizer: The optimiser, from torch.optim.
        weight_decay: Weight decay of the optimiser.
        decay_all: Apply weight decay to all weights, also to those of norms and to biases.
        momentum: Momentum of sgd and rmsprop.
        schedule: How the learning rate changes: onecycle, cosine (after a linear warm-up),
            cyclic (up and down), step (divided by 10 after each period), plateau (divided by 10 after a
            period without improvement), or constant.
        warmup: The share of all steps in which onecycle and cosine raise the learning rate.
        period: A number of epochs: the length of a cycle (cyclic), the interval between cuts (step), or
            the time without improvement before a cut (plateau) (default: a third of the epochs).
        steps_per_epoch: Steps per epoch that the schedule assumes, for loaders without a length.
            It does not limit the epochs, which must be equally long on all ranks.
        precision: bf16 and fp16 compute under autocast. fp16 needs CUDA and uses a GradScaler.
        tf32: Let GPUs round the float32 inputs of matrix products to TF32, which is faster. In convolutions, torch does
            this by default.
        clip_norm: Clip the gradients to this total norm (default: no clipping).
        clip_value: Clip each gradient element to this magnitude (default: no clipping).
        label_smoothing: The share of each training label that is spread evenly over all classes. Validation has none.
        mixup: The alpha of MixUp, which blends the images of a training batch and their labels; 0 disables it. If
            both mixup and cutmix are set, one of them is chosen at random for each batch.
        cutmix: The alpha of CutMix, which replaces boxes of images and blends their labels; 0 disables it.
        random_erasing: The probability that a random box of a training image is filled with 0, after normalisation.
        num_classes: The number of classes, which mixup and cutmix need (default: that of the loader's dataset).
        patience: Stop after this many epochs without improvement of the validation loss, or of the training loss if
            there is no validation (default: never).
        channels_last: Use the channels_last memory format for images and weights.
        mean: The mean of each channel, for pixels scaled to [0, 1]. Only uint8 images are normalised.
        std: The standard deviation of each channel, for pixels scaled to [0, 1].
        checkpoint_every: Steps between checkpoints within an epoch (default: only at the end of each epoch).
        log_every: Steps between lines of the log. Losses are read from the device, and checked for
            NaN and infinity, this often.
        seed: The seed of torch's, numpy's and Python's random numbers.
        deterministic: Use only deterministic algorithms. On a CPU, results are then bitwise reproducible,
            even if a run is interrupted and resumed.
        device: The device to train on, such as cuda or cpu (default: CUDA if available, else MPS,
            else the CPU).
        directory: The directory for checkpoints, log and report. Without it, nothing is written.
        resume: Resume the run in the directory. If false, replace it.
        data: Other settings that must not change when the run resumes: a mapping of names to
            numbers or strings. The names must differ from those above.
    """

    epochs: int = 10
    accumulate: int = 1
    lr: float = 1e-3
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.05
    decay_all: bool = True
    momentum: float = 0.9
    schedule: ScheduleName = "onecycle"
    warmup: float = 0.3
    period: float | None = None
    steps_per_epoch: int | None = None
    precision: Precision = "bf16"
    tf32: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    random_erasing: float = 0.0
    num_classes: int | None = None
    patience: int | None = None
    channels_last: bool = True
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    checkpoint_every: int | None = None
    log_every: int = 10
    seed: int = 0
    deterministic: bool = False
    device: str | None = None
    directory: str | os.PathLike[str] | None = None
    resume: bool = True
    data: Mapping[str, float | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check the settings, and convert them to built-in types, which checkpoints can hold."""
        for name in (
            *("lr", "weight_decay", "momentum", "warmup", "period", "clip_norm", "clip_value"),
            *("label_smoothing", "mixup", "cutmix", "random_erasing"),
        ):
            self._set(name, None if (value := getattr(self, name)) is None else float(value))
        for name in ("mean", "std"):
            self._set(name, tuple(map(float, getattr(self, name))))
        for name, allowed in (("optimizer", OptimizerName), ("schedule", ScheduleName), ("precision", Precision)):
            self._set(name, check_choice(name, getattr(self, name), allowed))
        for name in ("epochs", "accumulate", "log_every"):
            self._set(name, check_integer(name, getattr(self, name), at_least=1))
        for name in ("steps_per_epoch", "patience", "checkpoint_every", "num_classes"):
            self._set(name, check_optional_integer(name, getattr(self, name), at_least=1))
        self._set("seed", check_integer("seed", self.seed, at_least=0))
        self._set("data", _check_data(self.data))
        for name in ("lr", "period", "clip_norm", "clip_value"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        for name in ("label_smoothing", "random_erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        for name in ("weight_decay", "momentum"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share of the steps, at least 0 and below 1, got {self.warmup}")
        from shardio.device import choose_device  # Loads torch.

        device = choose_device(self.device)
        if self.precision == "fp16" and device.type != "cuda":
            raise ValueError(f"precision 'fp16' needs CUDA, but the device is {device}: use 'bf16' or 'fp32'")
        if self.directory is not None and not os.fspath(self.directory):
            raise ValueError("directory must not be empty: use '.' for the current directory")
        if self.directory is not None and (url := find_url(self.directory)) is not None:
            raise ValueError(f"directory must be local: checkpoints cannot be written to the URL {url}")
        if self.checkpoint_every is not None and self.directory is None:
            raise ValueError("checkpoint_every needs a directory to write checkpoints to: set directory (--out)")

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that must not change when the run resumes, by name."""
        named = {name: value for name, value in dataclasses.asdict(self).items() if name not in (*MAY_CHANGE, "data")}
        return {**named, **self.data}

    def find_differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Describe settings that differ from a checkpoint's, which may lack some of ``data``.

        A setting that an earlier version did not have had the effect of its default.
        """
        saved = {**{one.name: one.default for one in dataclasses.fields(self)}, **saved}
        return [
            f"{name} was {saved.get(name)!r} and is now {value!r}"
            for name, value in self.shared_settings().items()
            if saved.get(name) != value and (name in saved or name not in self.data)
        ]

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _check_data(data: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return a copy with built-in types, which checkpoints can hold."""
    settings = {one.name for one in dataclasses.fields(TrainConfig)}
    for name in data:
        if not isinstance(name, str):
            raise TypeError(f"data must have strings as names, got {name!r}")
        if name in settings:
            raise ValueError(f"data must not hold {name!r}, which is a setting of TrainConfig: use another name")
    return {str(name): check_plain(f"data[{str(name)!r}]", value) for name, value in data.items()}


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
