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
        ({"optimizer": "adam"}, "optimizer must be 'adamw' or 'sgd', got 'adam'"),
        ({"precision": "fp8"}, "precision must be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": -1e-3}, "lr must be positive"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_a_config_does_not_change() -> None:
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.epochs = 3  # type: ignore[misc]  # what is tested
