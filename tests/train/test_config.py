from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from shardio.train import TrainConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"epochs": -1}, "epochs"),
        ({"accumulate": 0}, "accumulate"),
        ({"optimizer": "lion"}, "optimizer must be one of 'adamw', 'adam', 'sgd', 'rmsprop', got 'lion'"),
        ({"schedule": "poly"}, "schedule must be one of .* got 'poly'"),
        ({"precision": "fp8"}, "precision must be one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": -1e-3}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"clip_value": float("inf")}, "clip_value must be positive"),
        ({"period": 0}, "period must be positive"),
        ({"warmup": 1.0}, "warmup must be a share"),
        ({"warmup": -0.1}, "warmup must be a share"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"checkpoint_every": 0, "directory": "run"}, "checkpoint_every must be at least 1"),
        ({"checkpoint_every": 5}, "checkpoint_every needs a directory"),
        ({"directory": "s3://bucket/run"}, "directory s3://bucket/run is a URL"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1"),
        ({"device": "toaster"}, "device must be one that torch knows"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_a_config_does_not_change() -> None:
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.epochs = 3  # type: ignore[misc]  # what is tested
