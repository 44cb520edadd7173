"""Optimisers have the settings of the run; weight decay spares norms and biases by choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardio.train import TrainConfig
from shardio.train.optimizers import make_optimizer


def make_network() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    network[3].bias.requires_grad = False
    return network


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "rmsprop"])
def test_weight_decay_spares_norms_and_biases_if_asked(name: Any) -> None:
    network = make_network()
    (every,) = make_optimizer(network, TrainConfig(optimizer=name, weight_decay=0.1)).param_groups
    assert (len(every["params"]), every["weight_decay"]) == (5, 0.1)
    optimizer = make_optimizer(network, TrainConfig(optimizer=name, weight_decay=0.1, decay_all=False))
    decayed, spared = optimizer.param_groups
    assert [weight.shape for weight in decayed["params"]] == [(4, 3, 3, 3), (2, 4)]
    assert [weight.shape for weight in spared["params"]] == [(4,)] * 3
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert decayed["lr"] == spared["lr"]


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({"optimizer": "adamw"}, True),
        ({"optimizer": "sgd", "precision": "fp32"}, True),
        ({"optimizer": "rmsprop"}, None),
        ({"optimizer": "adamw", "precision": "fp16"}, None),
    ],
)
def test_optimisers_are_fused_on_a_gpu_where_they_can_be(
    options: dict[str, Any], is_fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(**{**options, "precision": "bf16"})
    object.__setattr__(config, "precision", options.get("precision", "bf16"))  # fp16 needs CUDA.
    network = make_network()
    assert not make_optimizer(network, config).defaults.get("fused")
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    assert make_optimizer(network, config).defaults.get("fused") == is_fused


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        make_optimizer(torch.nn.Flatten(), TrainConfig())
