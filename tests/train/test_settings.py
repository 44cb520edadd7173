"""The settings of a run: invalid values, optimizers and schedules."""

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shardio.train
from shardio.train import TrainConfig, load_checkpoint, train
from shardio.train.config import OptimizerName, Precision, ScheduleName
from shardio.train.models import FACTORS, OPTIMIZERS, LrSchedule, make_optimizer, plan_rates
from shardio.train.step import DTYPES
from tests.raising import assert_raises
from tests.train.runs import make_batches, make_linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"accumulate": 0}, "accumulate"),
        ({"optimizer": "lion"}, "optimizer must be one of 'adamw', 'adam', 'sgd', 'rmsprop', got 'lion'"),
        ({"schedule": "poly"}, "schedule must be one of .* got 'poly'"),
        ({"precision": "fp8"}, "precision must be one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"clip_value": float("inf")}, "clip_value must be positive"),
        ({"period": 0}, "period must be positive"),
        ({"warmup": 1.0}, "warmup must be a share"),
        ({"warmup": -0.1}, "warmup must be a share"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"mixup": -0.2}, "mixup must be at least 0 and finite, got -0.2"),
        ({"cutmix": float("nan")}, "cutmix must be at least 0 and finite, got nan"),
        ({"label_smoothing": 1.1}, "label_smoothing must be from 0 to 1, got 1.1"),
        ({"random_erasing": -0.1}, "random_erasing must be from 0 to 1, got -0.1"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"checkpoint_every": 0, "directory": "run"}, "checkpoint_every must be at least 1"),
        ({"checkpoint_every": 5}, "checkpoint_every needs a directory"),
        ({"directory": "s3://bucket/run"}, "directory must be local: .* the URL s3://bucket/run"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1"),
        ({"device": "toaster"}, "device must be one that torch supports"),
        ({"precision": "fp16", "device": "cpu"}, "precision 'fp16' needs CUDA, but the device is cpu"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    """The message starts with the setting's name, which the command line replaces with the option's name."""
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**options)
    assert str(error.value).split()[0] == next(iter(options))


def test_every_setting_is_described_and_every_choice_is_implemented() -> None:
    described = re.findall(r"^ {4}(\w+): ", str(inspect.getdoc(TrainConfig)), re.MULTILINE)
    assert described == [setting.name for setting in fields(TrainConfig)]
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert set(FACTORS) == set(get_args(ScheduleName))
    assert set(DTYPES) == set(get_args(Precision))


def test_all_public_names_can_be_loaded_and_the_settings_without_torch() -> None:
    assert all(getattr(shardio.train, name) is not None for name in shardio.train.__all__)
    assert dir(shardio.train) == shardio.train.__all__
    with pytest.raises(AttributeError, match=r"No shardio\.train attribute nothing"):
        shardio.train.nothing  # type: ignore[attr-defined]  # noqa: B018  # looking it up is the test
    code = "import sys; from shardio.train import TrainConfig; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


PLAIN: list[tuple[Any, float | str]] = [
    *((np.int64(3), 3), (np.array(3), 3), (torch.tensor(3), 3), (np.float64(0.5), 0.5), (np.float32(0.5), 0.5)),
    *((torch.tensor(0.5), 0.5), (Fraction(1, 2), 0.5), (np.str_("a"), "a"), (np.True_, True), (7, 7)),
]


def test_settings_and_data_become_pythons_types_which_a_checkpoint_can_be_read_with(tmp_path: Path) -> None:
    data: dict[Any, Any] = {np.str_(f"name {number}"): value for number, (value, _) in enumerate(PLAIN)}
    expected = {f"name {number}": value for number, (_, value) in enumerate(PLAIN)}
    settings: dict[str, Any] = {"epochs": 1, "precision": "fp32", "device": "cpu", "directory": tmp_path}
    settings |= {"lr": np.float64(0.001), "mean": tuple(np.zeros(3))}
    config = TrainConfig(**settings, data=data)
    data["name 9"] = 8
    assert config.data == expected, "the settings are copied"
    assert [type(value) for value in config.data.values()] == [type(value) for value in expected.values()]
    train(make_linear(), make_batches([4]), config)
    saved = load_checkpoint(tmp_path / "last.pt")["config"]
    assert config.find_differences(saved) == []
    assert TrainConfig(**settings, data=data).find_differences(saved) == ["name 9 was 7 and is now 8"]
    del saved["tf32"], saved["decay_all"]  # An earlier version lacked these settings.
    assert config.find_differences(saved) == []
    changed = TrainConfig(**settings, data=config.data, tf32=True)
    assert changed.find_differences(saved) == ["tf32 was False and is now True"]


def test_data_of_other_types_or_names_are_refused() -> None:
    for value in (None, [1], b"a", 1j, np.array([1.0]), torch.ones(2), Path("a")):
        message = r"data\['crop'\] must be a number or a string, got "
        assert_raises(TypeError, message, TrainConfig, data={"crop": value})
    assert_raises(TypeError, "data must have strings as names, got 3", TrainConfig, data={3: 1})
    for name in (each.name for each in fields(TrainConfig)):
        message = f"data must not hold {name!r}, which is a setting of TrainConfig"
        assert_raises(ValueError, message, TrainConfig, data={name: 1})


# Optimizers.


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
    assert_raises(ValueError, "empty parameter list", make_optimizer, nn.Flatten(), TrainConfig(optimizer=name))


@pytest.mark.parametrize(
    ("optimizer", "precision", "is_fused"),
    [("adamw", "bf16", True), ("sgd", "fp32", True), ("rmsprop", "bf16", None), ("adamw", "fp16", None)],
)
def test_optimizers_are_fused_on_a_gpu_where_they_can_be(
    optimizer: Any, precision: str, is_fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, network = TrainConfig(optimizer=optimizer), make_network()
    object.__setattr__(config, "precision", precision)  # fp16 needs CUDA.
    assert not make_optimizer(network, config).defaults.get("fused")
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    assert make_optimizer(network, config).defaults.get("fused") == is_fused


# Schedules.

STEPS_PER_EPOCH, EPOCHS, LR = 13, 6, 0.3
NUM_STEPS = STEPS_PER_EPOCH * EPOCHS
PLANNED = ["onecycle", "cosine", "cyclic", "step", "constant"]


def make_sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], LR)


def make_config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": EPOCHS, "lr": LR, "device": "cpu", **options})


def take(optimizer: torch.optim.Optimizer, schedule: Any, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


def make_cosine(optimizer: Any, warmup: float) -> Any:
    num_warm = round(warmup * NUM_STEPS)
    rise = lr_scheduler.LinearLR(optimizer, 1 / (num_warm + 1), total_iters=num_warm)
    return lr_scheduler.SequentialLR(
        optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS - num_warm)], [num_warm]
    )


def steps_of(period: float) -> int:
    return round(period * STEPS_PER_EPOCH)


FIXED: dict[str, Any] = {"cycle_momentum": False}
WARMUPS, PERIODS = ("warmup", (0.05, 0.3, 0.5)), ("period", (2, 2.5, 4))
ORACLES: dict[str, tuple[Callable[[Any, float], Any], tuple[str, tuple[float, ...]]]] = {
    "onecycle": (
        lambda own, warmup: lr_scheduler.OneCycleLR(own, LR, total_steps=NUM_STEPS, pct_start=warmup, **FIXED),
        WARMUPS,
    ),
    "cosine": (make_cosine, WARMUPS),
    "step": (lambda own, period: lr_scheduler.StepLR(own, steps_of(period), 0.1), PERIODS),
    "cyclic": (lambda own, period: lr_scheduler.CyclicLR(own, LR / 10, LR, steps_of(period) // 2, **FIXED), PERIODS),
    "plateau": (
        lambda own, period: lr_scheduler.ReduceLROnPlateau(own, patience=int(period) - 1),
        ("period", (1, 2, 3)),
    ),
}
LOSSES = [3.0, 2.0, 2.0, 2.1, 2.2, 1.9, 2.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch 2.6's SequentialLR passes `epoch`.
@pytest.mark.parametrize("name", ORACLES)
def test_rates_equal_those_of_torchs_schedulers(name: str) -> None:
    make, (setting, values) = ORACLES[name]
    for value in values:
        optimizer, other = make_sgd(), make_sgd()
        schedule = LrSchedule(optimizer, make_config(schedule=name, **{setting: value}), STEPS_PER_EPOCH)
        oracle = make(other, value)
        if name != "plateau":
            expected = take(other, oracle, NUM_STEPS)
            assert take(optimizer, schedule, NUM_STEPS) == pytest.approx(expected, rel=1e-9)
            continue
        for loss in LOSSES:
            take(optimizer, schedule, 3)
            schedule.end_epoch(loss)
            oracle.step(loss)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(other.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["lr"] < LR / 5


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_predicts_the_actual_rates_also_of_the_shortest_runs(name: str) -> None:
    """No step of the plan has a rate of 0. Steps after the plan's end, as in a longer epoch, cause no error."""
    for epochs, steps_per_epoch in ((1, 1), (1, 2), (2, 1), (3, 1), (EPOCHS, STEPS_PER_EPOCH)):
        optimizer, config = make_sgd(), make_config(epochs=epochs, schedule=name)
        rates = take(optimizer, LrSchedule(optimizer, config, steps_per_epoch), epochs * steps_per_epoch + 2)
        planned = list(enumerate(rates[:-2]))
        assert plan_rates(config, steps_per_epoch) == planned
        assert all(0 < rate <= LR for rate in rates[:-2])
        assert all(0 <= rate <= LR for rate in rates)
    assert (set(rates[:-2]) == {LR}) == (name == "constant")
    sparse = plan_rates(config, STEPS_PER_EPOCH, max_points=10)
    assert len(sparse) <= 10
    assert set(sparse) <= set(planned)


@pytest.mark.parametrize("name", ["onecycle", "cosine", "cyclic", "step"])
def test_on_another_number_of_ranks_the_same_share_of_the_plan_remains(name: str) -> None:
    """Half the ranks need twice the steps, so step k of 78 becomes step 2 k of 156."""
    config, num_before, optimizer = make_config(schedule=name), 31, make_sgd()
    schedule = LrSchedule(optimizer, config, STEPS_PER_EPOCH)
    take(optimizer, schedule, num_before)
    state, optimizer = copy.deepcopy(schedule.state_dict()), make_sgd()
    schedule = LrSchedule(optimizer, config, 2 * STEPS_PER_EPOCH)
    schedule.load_state_dict(state)
    planned = [rate for _, rate in plan_rates(config, 2 * STEPS_PER_EPOCH)]
    assert take(optimizer, schedule, 2 * (NUM_STEPS - num_before)) == planned[2 * num_before :]


def test_parameter_groups_keep_their_own_highest_rates() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.01)]
    optimizer = torch.optim.SGD(groups)
    schedule = LrSchedule(optimizer, make_config(schedule="cosine"), STEPS_PER_EPOCH)
    for _ in range(20):
        take(optimizer, schedule, 1)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(100 * optimizer.param_groups[1]["lr"])
