"""The settings of a training run."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardio.storage import find_url
from shardio.values import check_choice, check_integer, check_optional_integer, check_plain

Precision = Literal["fp32", "bf16", "fp16"]

OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop"]

ScheduleName = Literal["onecycle", "cosine", "cyclic", "step", "plateau", "constant"]

MAY_CHANGE = ("epochs", "steps_per_epoch", "patience", "device", "directory", "resume", "log_every", "checkpoint_every")
"""Settings that may differ when a run resumes. A new value of ``epochs`` changes later learning rates."""

RANGES: dict[tuple[str, ...], tuple[str, Callable[[float], bool]]] = {
    ("lr", "period", "clip_norm", "clip_value"): ("positive and finite", lambda value: 0 < value < math.inf),
    ("mixup", "cutmix"): ("at least 0 and finite", lambda value: 0 <= value < math.inf),
    ("label_smoothing", "random_erasing"): ("from 0 to 1", lambda value: 0 <= value <= 1),
    ("weight_decay", "momentum"): ("at least 0", lambda value: value >= 0),
    ("warmup",): ("a share of the steps, at least 0 and below 1", lambda value: 0 <= value < 1),
}
"""The numeric settings, each with a description of its range and a function that tests it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training run. ``shardio train`` gets its options and help texts from here.

    Attributes:
        epochs: Number of epochs.
        accumulate: Batches to accumulate for each optimizer step.
        lr: The highest learning rate.
        optimizer: The optimizer, from torch.optim.
        weight_decay: Weight decay of the optimizer.
        decay_all: Apply weight decay to all weights, including norms and biases.
        momentum: Momentum of sgd and rmsprop.
        schedule: The learning rate schedule: onecycle, cosine (after a linear warm-up),
            cyclic (up and down), step (divided by 10 after each period), plateau (divided by 10 after a
            period without improvement), or constant.
        warmup: The share of all steps in which onecycle and cosine raise the learning rate.
        period: A number of epochs: the length of a cycle (cyclic), the interval between cuts (step), or
            the time without improvement before a cut (plateau) (default: a third of the epochs).
        steps_per_epoch: Steps per epoch that the schedule assumes, for loaders without a length.
            This number does not limit the epochs, which must be equally long on all ranks.
        precision: bf16 and fp16 use autocast. fp16 needs CUDA and uses a GradScaler.
        tf32: Round the float32 inputs of matrix products to TF32 on GPUs, to save time. In convolutions, torch uses
            TF32 by default.
        clip_norm: Clip the gradients to this total norm (default: no clipping).
        clip_value: Clip each gradient element to this magnitude (default: no clipping).
        label_smoothing: The share of each training label that is spread evenly over all classes. Validation labels are
            not smoothed.
        mixup: The alpha of MixUp, which blends the images of a training batch and their labels; 0 disables it. If
            both mixup and cutmix are set, one of them is chosen at random for each batch.
        cutmix: The alpha of CutMix, which replaces boxes of images and blends their labels; 0 disables it.
        random_erasing: The probability that a random box of a training image is filled with 0, after normalization.
        num_classes: The number of classes, which mixup and cutmix need (default: that of the loader's dataset).
        patience: Stop after this many epochs without improvement in the validation loss, or in the training loss if
            there is no validation (default: never).
        channels_last: Use the channels_last memory format for images and weights.
        mean: The mean of each channel, for pixels scaled to [0, 1]. Only uint8 images are normalized.
        std: The standard deviation of each channel, for pixels scaled to [0, 1].
        checkpoint_every: Steps between checkpoints within an epoch (default: only at the end of each epoch).
        log_every: Steps between lines of the log. Losses are read from the device, and checked for NaN and infinity, at
            the same interval.
        seed: The seed of torch's, numpy's and Python's random numbers.
        deterministic: Use only deterministic algorithms. On a CPU, results are then bitwise reproducible,
            even if a run is interrupted and resumed.
        device: The device to train on, such as cuda or cpu (default: CUDA if available, else MPS,
            else the CPU).
        directory: The directory for checkpoints, log and report. Without a directory, nothing is written.
        resume: Resume the run in the directory. If false, replace it.
        data: Other settings that must not change when the run resumes: a mapping of names to
            numbers or strings. The names must differ from those of the other settings.
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
        for names, (range_text, is_within) in RANGES.items():
            for name in names:
                self._set(name, value := None if getattr(self, name) is None else float(getattr(self, name)))
                if value is not None and not is_within(value):
                    raise ValueError(f"{name} must be {range_text}, got {value}")
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
        """Describe the settings that differ from those of a checkpoint.

        The checkpoint may lack some entries of ``data``, which are then not compared. If a checkpoint from an earlier
        version lacks any other setting, that setting's default is compared instead.
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
    settings = {one.name for one in dataclasses.fields(TrainConfig)}
    for name in data:
        if not isinstance(name, str):
            raise TypeError(f"data must have strings as names, got {name!r}")
        if name in settings:
            raise ValueError(f"data must not hold {name!r}, which is a setting of TrainConfig: use another name")
    return {str(name): check_plain(f"data[{str(name)!r}]", value) for name, value in data.items()}
