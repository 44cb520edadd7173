from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio.train import TrainConfig, load_checkpoint, train
from tests.train.small_data import make_batches, make_linear


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
        ({"device": "toaster"}, "device must be one that torch knows"),
        ({"precision": "fp16", "device": "cpu"}, "precision 'fp16' needs CUDA, but the device is cpu"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    """The message starts with the name of the setting: the command line replaces it with that of the option."""
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**options)
    assert str(error.value).split()[0] == next(iter(options))


def test_each_setting_is_described_once_and_in_order() -> None:
    """The command line takes the help of its options from here."""
    described = re.findall(r"^ {4}(\w+): ", str(inspect.getdoc(TrainConfig)), re.MULTILINE)
    assert described == [setting.name for setting in fields(TrainConfig)]


def test_a_config_cannot_be_changed() -> None:
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.epochs = 3  # type: ignore[misc]  # what is tested


PLAIN: dict[str, tuple[Any, float | str]] = {
    "numpy's integer": (np.int64(3), 3),
    "numpy's array of one": (np.array(3), 3),
    "torch's integer": (torch.tensor(3), 3),
    "numpy's float": (np.float64(0.5), 0.5),
    "numpy's small float": (np.float32(0.5), 0.5),
    "torch's float": (torch.tensor(0.5), 0.5),
    "a fraction": (Fraction(1, 2), 0.5),
    "numpy's text": (np.str_("a"), "a"),
    "numpy's truth value": (np.True_, True),
    "Python's": (7, 7),
}


@pytest.mark.usefixtures("no_report")
def test_data_are_converted_to_pythons_types_which_a_checkpoint_can_be_read_with(tmp_path: Path) -> None:
    data: dict[Any, Any] = {np.str_(name): value for name, (value, _) in PLAIN.items()}
    expected = {name: value for name, (_, value) in PLAIN.items()}
    settings: dict[str, Any] = {"epochs": 1, "precision": "fp32", "device": "cpu", "directory": tmp_path}
    config = TrainConfig(**settings, data=data)
    assert config.data == expected
    assert [type(value) for value in config.data.values()] == [type(value) for value in expected.values()]
    train(make_linear(), make_batches([4]), config)
    assert config.find_differences(load_checkpoint(tmp_path / "last.pt")["config"]) == []
    assert TrainConfig(**settings, data={**expected, "Python's": 8}).find_differences(
        load_checkpoint(tmp_path / "last.pt")["config"]
    ) == ["Python's was 7 and is now 8"]


def test_data_are_copied() -> None:
    data = {"image_size": 32}
    config = TrainConfig(data=data)
    data["image_size"] = 64
    assert config.data == {"image_size": 32}


@pytest.mark.parametrize("value", [None, [1], b"a", 1j, np.array([1.0]), torch.ones(2), Path("a")], ids=repr)
def test_data_of_other_types_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"data\['crop'\] must be a number or a string, got "):
        TrainConfig(data={"crop": value})


def test_a_name_in_data_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="data must have strings as names, got 3"):
        TrainConfig(data={3: 1})  # type: ignore[dict-item]  # what is tested


@pytest.mark.parametrize("name", [field.name for field in fields(TrainConfig)])
def test_data_must_not_replace_a_setting(name: str) -> None:
    with pytest.raises(ValueError, match=f"data must not hold {name!r}, which is a setting of TrainConfig"):
        TrainConfig(data={name: 1})


def test_settings_that_an_earlier_version_lacked_had_their_defaults() -> None:
    saved = TrainConfig().shared_settings()
    del saved["tf32"], saved["decay_all"]
    assert TrainConfig().find_differences(saved) == []
    assert TrainConfig(tf32=True).find_differences(saved) == ["tf32 was False and is now True"]
