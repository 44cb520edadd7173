"""How to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training run.

    Attributes:
        epochs: How many epochs.
        optimizer: ``adamw`` or ``sgd`` (with momentum 0.9).
        lr: The highest learning rate of the OneCycle schedule.
        weight_decay: Of the optimiser.
        precision: ``bf16`` and ``fp16`` compute under autocast, ``fp16`` with a GradScaler and on CUDA alone.
        accumulate: How many microbatches make one step of the optimiser.
        device: Where to train; by default CUDA if there is one, else MPS, else the CPU.
        mean: Of each channel, in units of [0, 1].
        std: Likewise.
    """

    epochs: int = 10
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    precision: Precision = "bf16"
    accumulate: int = 1
    device: str | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.accumulate < 1:
            raise ValueError(f"epochs and accumulate must be at least 1, got {self.epochs} and {self.accumulate}")
        if self.optimizer not in ("adamw", "sgd"):
            raise ValueError(f"optimizer must be 'adamw' or 'sgd', got {self.optimizer!r}")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"precision must be 'fp32', 'bf16' or 'fp16', got {self.precision!r}")
        device = _check_device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.precision == "fp16" and device.type != "cuda":
            raise ValueError(f"precision='fp16' needs CUDA, and the device is {device}: choose 'bf16' or 'fp32'")
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


def _check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, such as 'cuda' or 'cpu', got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} was asked for, and torch sees no CUDA device")
    return device
