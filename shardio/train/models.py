"""The models, the optimizers and the learning-rate schedules, by name.

A rate depends only on the step, so a run can resume at any step, and its rates are known in advance. The rates equal
those of torch's ``OneCycleLR``, ``CyclicLR``, ``StepLR``, and ``CosineAnnealingLR`` after ``LinearLR``. Only
``plateau``, which is torch's ``ReduceLROnPlateau``, depends on the losses.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from shardio.libraries import import_library
from shardio.train.config import OptimizerName, ScheduleName, TrainConfig
from shardio.values import load_function

KINDS = "small, torchvision:NAME, timm:NAME, package.module:function or path/to/file.py:function"

SEVERAL_OUTPUTS = ("googlenet", "inception_v3")
"""torchvision classifiers that return several outputs in training mode."""


def make_model(name: str, *, num_classes: int, image_size: int, pretrained: bool = False) -> nn.Module:
    """Make a model by name.

    ======================================  ======================================================================
    ``small``                               :func:`small_resnet`
    ``torchvision:resnet18``                a torchvision classifier
    ``timm:resnet18``                       a timm model; ``timm:resnet18.a1_in1k`` and ``timm:hf-hub:…`` also work
    ``package.module:function``,            the return value of that function or class
    ``path/to/file.py:function``
    ======================================  ======================================================================

    A pretrained model keeps its head if the head has ``num_classes`` outputs, and gets a new one otherwise. Models from
    timm and torchvision with a fixed image size are built for ``image_size``. With pretrained weights, torchvision's
    fixed-size models accept only the size that they were trained on.

    Your own function receives each of the keyword arguments ``num_classes``, ``image_size`` and ``pretrained`` for
    which it has a parameter. A function that accepts ``**kwargs`` always receives ``num_classes``. The function
    may return a scripted or a compiled model.

    Args:
        name: A name from the table.
        num_classes: The number of outputs.
        image_size: The side of the square images, in pixels.
        pretrained: Whether to start with the library's weights, which are downloaded if they are not cached.

    Returns:
        A model that maps images, float [N, 3, ``image_size``, ``image_size``], to outputs [N, ``num_classes``].

    Raises:
        ValueError: If the model does not exist, its library is not installed, or ``pretrained`` is set and the model
            has no pretrained weights.
        TypeError: If your function does not return a model.
        OSError: If pretrained weights cannot be downloaded, or the files of a model cannot be read.
    """
    prefix, _, rest = name.partition(":")
    if make := _FACTORIES.get(prefix):
        return make(rest, num_classes, image_size, pretrained)
    return _make_own(name, num_classes, image_size, pretrained)


def small_resnet(num_classes: int, image_size: int, width: int = 32) -> nn.Sequential:
    """Return a small residual network (He et al., "Deep residual learning for image recognition", 2016).

    The network has a stem and, depending on ``image_size``, one to five blocks.

    Args:
        num_classes: The number of outputs.
        image_size: The side of the square images, in pixels. The stem and each block halve the side: sides of 16 to 512
            pixels shrink to 4 to 8 pixels.
        width: The number of channels after the stem. Each block doubles the number of channels, up to 8 times
            ``width``.
    """
    num_blocks = min(max(image_size.bit_length() - 4, 1), 5)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    channels = [min(width * 2**i, 8 * width) for i in range(num_blocks + 1)]
    blocks = [ResidualBlock(channels[i], channels[i + 1], stride=2) for i in range(num_blocks)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. A ``stride`` of 2 halves the image's sides."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def _make_small(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    if name:
        raise ValueError(f"there is only one small model, got 'small:{name}': use 'small'")
    if pretrained:
        raise ValueError("there are no pretrained weights for 'small': train it from scratch, or use another model")
    return small_resnet(num_classes, image_size)


def _make_torchvision(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    models = import_library("torchvision").models
    _check_known(name, models.list_models(module=models), "torchvision")
    if name in SEVERAL_OUTPUTS:
        raise ValueError(
            f"torchvision:{name} returns several outputs in training, but train() needs one: use another model"
        )
    # Vision transformers learn an embedding for each position in the image.
    size = {"image_size": image_size} if name.startswith("vit_") else {}
    with _errors_name_the_model(f"torchvision:{name}", image_size, pretrained):
        if not pretrained:
            model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **size)
            return model
        model = models.get_model(name, weights="DEFAULT", **size)
    _fit_head(model, num_classes)
    return model


def _fit_head(model: nn.Module, num_classes: int) -> None:
    """Replace the head of a torchvision classifier, unless it already has this number of outputs.

    Model families name their heads differently, but all add the head last. The head is the last Linear, or the last
    convolution in SqueezeNet, which has no Linear.
    """
    path, head = [(path, m) for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1]
    if head.weight.shape[0] == num_classes:
        return
    has_bias = head.bias is not None
    if isinstance(head, nn.Linear):
        model.set_submodule(path, nn.Linear(head.in_features, num_classes, bias=has_bias))
    else:
        model.set_submodule(path, nn.Conv2d(head.in_channels, num_classes, kernel_size=1, bias=has_bias))


def _make_timm(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    timm = import_library("timm")
    is_listed = ":" not in name  # Models such as hf-hub:… and local-dir:… have their own settings.
    if is_listed:
        _check_known(name.partition(".")[0], timm.list_models(), "timm")
    with _errors_name_the_model(f"timm:{name}", image_size, pretrained):
        is_fixed = is_listed and getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
        size = {"img_size": image_size} if is_fixed else {}
        model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **size)
    return model


def _make_own(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    try:
        function = load_function(name)
    except ValueError as error:
        raise ValueError(f"there is no model {name!r} ({error}): pass {KINDS}") from error
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if pretrained and "pretrained" not in parameters:
        raise ValueError(f"{name} has no pretrained weights: add a parameter 'pretrained' to the function")
    offered = {"num_classes": num_classes, "image_size": image_size, "pretrained": pretrained}
    wanted = {key for key in offered if key in parameters} | ({"num_classes"} if takes_any else set())
    model = function(**{key: value for key, value in offered.items() if key in wanted})
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


_FACTORIES: dict[str, Callable[[str, int, int, bool], nn.Module]] = {
    "small": _make_small,
    "torchvision": _make_torchvision,
    "timm": _make_timm,
}
"""The functions that make models, by prefix. All other names refer to the user's own functions."""


def _check_known(name: str, known: list[str], library: str) -> None:
    if name not in known:
        near = get_close_matches(name, known)
        remedy = f"did you mean {', '.join(near)}?" if near else f"see its documentation for its {len(known)} models"
        raise ValueError(f"{library} has no classifier {name!r}: {remedy}")


@contextmanager
def _errors_name_the_model(name: str, image_size: int, pretrained: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not pretrained or name.startswith("timm:local-dir:"):
            raise OSError(
                f"{name} cannot be loaded ({error}): check the name and, if the model comes from a hub, the connection"
            ) from error
        raise OSError(
            f"could not download pretrained weights for {name} ({error}): check the connection, put the file into the "
            "library's cache ($TORCH_HOME, or $HF_HOME for timm), or train from scratch"
        ) from error
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be made with {image_size=} and {pretrained=}: {error}") from error


START, END = 1 / 25, 1 / 25e4
"""The first and last rates of the ``onecycle`` schedule, as shares of its highest rate.

``div_factor`` and ``final_div_factor`` of torch's ``OneCycleLR`` define the same shares.
"""

LOWEST = 1 / 10
"""The lowest rate of the ``cyclic`` schedule, as a share of its highest rate."""

CUT = 1 / 10
"""The factor by which the ``step`` and ``plateau`` schedules cut the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrPlan:
    """The numbers of steps and the share of warm-up steps, which define a run's learning-rate schedule.

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
    """Rise, then fall to almost 0, along cosines (Smith and Topin, "Super-convergence", 2018)."""
    top, last = plan.warmup * plan.num_steps - 1, plan.num_steps - 1
    if step < top:
        return _along_cosine(START, 1.0, step / top)
    return _along_cosine(1.0, END, (step - max(top, 0)) / max(last - max(top, 0), 1))


def _cosine(step: int, plan: LrPlan) -> float:
    """Rise linearly, then fall along a cosine (one period of Loshchilov and Hutter, "SGDR", 2016)."""
    num_warm = round(plan.warmup * plan.num_steps)
    if step < num_warm:
        return (step + 1) / (num_warm + 1)
    return _along_cosine(1.0, 0.0, (step - num_warm) / max(plan.num_steps - num_warm, 1))


def _cyclic(step: int, plan: LrPlan) -> float:
    """Rise and fall linearly in each period (Smith, "Cyclical learning rates", 2015)."""
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
"""Functions of a step, counted from 0, that return the rate as a share of the highest rate."""


def plan_rates(config: TrainConfig, steps_per_epoch: int, max_points: int = 2000) -> list[tuple[int, float]]:
    """Return the planned learning rates as at most ``max_points`` points (step, rate)."""
    plan, factor = make_plan(config, steps_per_epoch), FACTORS[config.schedule]
    stride = -(-plan.num_steps // max_points)
    return [(step, config.lr * factor(step, plan)) for step in range(0, plan.num_steps, stride)]


class LrSchedule:
    """The learning rates of an optimizer, updated after each step and each epoch.

    Args:
        optimizer: The optimizer. The initial rate of each parameter group is its highest rate.
        config: The schedule and its settings.
        steps_per_epoch: Steps in a full epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig, steps_per_epoch: int) -> None:
        self.plan = make_plan(config, steps_per_epoch)
        self._optimizer, self._factor = optimizer, FACTORS[config.schedule]
        self._is_plateau = config.schedule == "plateau"
        self._scheduler: Any  # From torch.
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
        """Continue from a state, at the same share of the run, even if the number of steps per epoch has changed."""
        saved, share = dict(state["torch"]), self.plan.steps_per_epoch / state["steps_per_epoch"]
        # The period stays as saved even if the run now has more epochs: a lowered rate must not rise again.
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
"""The classes of the optimizers, and the settings that they accept.

To add an optimizer, add a line here, and its name to ``config.OptimizerName``.
"""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return an optimizer for a model's parameters, except frozen ones.

    On CUDA, the optimizer is fused if torch supports that: one kernel updates all parameters. With fp16, the optimizer
    is not fused. torch calls a fused optimizer even if a gradient is not finite, so the scale would have to be read
    after each step.
    """
    kind, settings = OPTIMIZERS[config.optimizer]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    options: dict[str, Any] = {name: getattr(config, name) for name in settings}
    can_fuse = "fused" in inspect.signature(kind).parameters and config.precision != "fp16"
    if can_fuse and all(weight.is_cuda for weight in weights):
        options["fused"] = True
    if config.decay_all:
        return kind(weights, **options)
    # Normalization weights and biases have one dimension.
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1]},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **options)
