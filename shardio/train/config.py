"""How to train."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardio.storage import find_url
from shardio.values import check_choice, check_integer, check_optional_integer, check_plain

Precision = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop"]
ScheduleName = Literal["onecycle", "cosine", "cyclic", "step", "plateau", "constant"]

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

MAY_CHANGE = ("epochs", "steps_per_epoch", "patience", "device", "directory", "resume", "log_every", "checkpoint_every")
"""Settings that may differ when a run is gone on with. With other ``epochs`` its learning rates have another plan from
there on."""

FLOATS = ("lr", "weight_decay", "momentum", "warmup", "period", "clip_norm", "clip_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training run.

    Attributes:
        epochs: How many epochs.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``rmsprop``, as in ``torch.optim``.
        lr: The highest learning rate of the schedule.
        weight_decay: Of the optimiser.
        momentum: Of ``sgd`` and ``rmsprop``.
        schedule: How the learning rate goes: ``onecycle``, ``cosine`` after a linear warm-up, ``cyclic`` (up and
            down again), ``step`` (a tenth, time and again), ``plateau`` (a tenth, when nothing improves any more),
            or ``constant``.
        warmup: The share of all steps in which ``onecycle`` and ``cosine`` rise.
        period: Epochs of one cycle of ``cyclic``, before each cut of ``step``, and without an improvement before
            each of ``plateau``; by default a third of the epochs.
        steps_per_epoch: How many steps the schedule takes an epoch for, where the loader has no length. An epoch is
            what the loader gives, nevertheless, and must be equally long on all ranks.
        precision: ``bf16`` and ``fp16`` compute under autocast, ``fp16`` with a GradScaler and on CUDA alone.
        accumulate: How many microbatches make one step of the optimiser.
        clip_norm: The largest norm of all gradients together; None for any.
        clip_value: The largest magnitude of each; likewise.
        patience: Stop after so many epochs without an improvement of the validation loss, or without validation
            of the training loss; None to stop never.
        seed: Of torch's, numpy's and Python's random numbers.
        deterministic: Whether torch may use only algorithms that always give the same bits.
        channels_last: Whether images and weights lie in channels_last memory.
        device: Where to train; by default CUDA if there is one, else MPS, else the CPU.
        mean: Of each channel, in units of [0, 1]; images are normalised by these, if they are uint8.
        std: Likewise.
        directory: Where checkpoints and the log go; without it nothing is written.
        resume: Whether to resume the run in ``directory`` instead of starting a new one.
        log_every: Steps from one line of the log to the next. So often losses are read from the device and checked.
        checkpoint_every: Steps from one checkpoint to the next within an epoch; by default there is one at its end.
        data: Further numbers and strings, by name, that a resumed run must have in common with its beginning. No name
            may be that of a setting here.
    """

    epochs: int = 10
    optimizer: OptimizerName = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9
    schedule: ScheduleName = "onecycle"
    warmup: float = 0.3
    period: float | None = None
    steps_per_epoch: int | None = None
    precision: Precision = "bf16"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    patience: int | None = None
    seed: int = 0
    deterministic: bool = False
    channels_last: bool = True
    device: str | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    directory: str | os.PathLike[str] | None = None
    resume: bool = True
    log_every: int = 10
    checkpoint_every: int | None = None
    data: Mapping[str, float | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in FLOATS:  # Not numpy's, which a checkpoint would hold, and not be read with.
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(number))
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        for name, allowed in (("optimizer", OptimizerName), ("schedule", ScheduleName), ("precision", Precision)):
            object.__setattr__(self, name, check_choice(name, getattr(self, name), allowed))
        for name in ("epochs", "accumulate", "steps_per_epoch", "patience", "log_every", "checkpoint_every"):
            object.__setattr__(self, name, check_optional_integer(name, getattr(self, name), at_least=1))
        object.__setattr__(self, "seed", check_integer("seed", self.seed, at_least=0))
        object.__setattr__(self, "data", _check_data(self.data))
        for name in ("lr", "period", "clip_norm", "clip_value"):
            if (number := getattr(self, name)) is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} must be positive, got {number}")
        for name in ("weight_decay", "momentum"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share of the steps, at least 0 and below 1, got {self.warmup}")
        device = _check_device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.precision == "fp16" and device.type != "cuda":
            raise ValueError(f"precision='fp16' needs CUDA, and the device is {device}: choose 'bf16' or 'fp32'")
        if self.directory is not None and not os.fspath(self.directory):
            raise ValueError("directory must not be empty: name one, or '.' for the working directory")
        if self.directory is not None and (url := find_url(self.directory)) is not None:
            raise ValueError(f"the directory {url} is a URL, and checkpoints are written to local directories only")
        if self.checkpoint_every is not None and self.directory is None:
            raise ValueError("checkpoint_every needs a directory to write checkpoints into")

    def what_matters(self) -> dict[str, Any]:
        """Return the settings that a run which is gone on with must share with its beginning, by name."""
        named = {name: value for name, value in dataclasses.asdict(self).items() if name not in (*MAY_CHANGE, "data")}
        return {**named, **self.data}

    def find_differing(self, saved: Mapping[str, Any]) -> list[str]:
        """Return what differs from the settings of a checkpoint, each in words. It need not have those of ``data``."""
        return [
            f"{name} was {saved.get(name)!r}, is {value!r}"
            for name, value in self.what_matters().items()
            if saved.get(name) != value and (name in saved or name not in self.data)
        ]


def _check_data(data: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return a copy with Python's own names and values: no others can be read from a checkpoint."""
    settings = {setting.name for setting in dataclasses.fields(TrainConfig)}
    for name in data:
        if not isinstance(name, str):
            raise TypeError(f"a name in data must be a string, got {name!r}")
        if name in settings:
            raise ValueError(f"data must not hold {name!r}, which is a setting of TrainConfig: use another name")
    return {str(name): check_plain(f"data[{str(name)!r}]", value) for name, value in data.items()}


def _check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, such as 'cuda' or 'cpu', got {name!r}") from error
    is_missing = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if is_missing.get(device.type, False):
        raise ValueError(f"device={name!r} was asked for, and torch sees no {device.type.upper()} device")
    return device
