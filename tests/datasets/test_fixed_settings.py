"""Settings that are fixed when a dataset or sampler is created cannot be set later: it would have no effect."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset

OF_ORDERS = {"seed": 7, "shuffle": True, "lanes": 2, "window": 5, "rank": 1, "world_size": 3}

OF_DATASETS: dict[str, Any] = {
    "fields": ("image", "key"),
    "decode": "pil",
    "orientation": "apply",
    "max_pixels": 5000,
    "trusted": True,
}


def make_all(packed: Path, images: Path) -> list[tuple[Any, dict[str, Any]]]:
    """Return objects, and the settings with which each was created."""
    of_folder = {name: OF_DATASETS[name] for name in ("decode", "orientation", "max_pixels")}
    of_map = {name: value for name, value in OF_DATASETS.items() if name != "max_pixels"}
    dataset = ShardMapDataset(packed)
    order: dict[str, Any] = {**OF_ORDERS}
    return [
        (ShardDataset(packed, verify="off", **order, **OF_DATASETS), {"verify": "off", **order, **OF_DATASETS}),
        (ShardMapDataset(packed, **of_map), of_map),
        (ImageFolder(images, **of_folder), of_folder),
        (EpochSampler(dataset, **order), order),
    ]


def test_they_can_be_read_and_not_set(packed: Path, images: Path) -> None:
    for subject, settings in make_all(packed, images):
        for name, value in settings.items():
            assert getattr(subject, name) == value
            with pytest.raises(AttributeError, match=r"no setter|can't set"):
                setattr(subject, name, value)
    datasets: list[Any] = [ShardDataset(packed), ShardMapDataset(packed), ImageFolder(images)]
    for dataset in datasets:
        with pytest.raises(AttributeError, match=r"no setter|can't set"):
            dataset.target_transform = int


def test_copies_keep_them(packed: Path, images: Path) -> None:
    for subject, settings in make_all(packed, images):
        for other in (copy.copy(subject), pickle.loads(pickle.dumps(subject))):
            assert {name: getattr(other, name) for name in settings} == settings


@pytest.mark.parametrize("flag", ["False", "", 2, None, 0.0, [], np.array([True, False])], ids=repr)
def test_a_flag_is_not_a_string(packed: Path, flag: Any) -> None:
    dataset = ShardMapDataset(packed)
    no_flag: Any = [] if flag is None else flag  # In loaders None leaves it open.
    for name, make in (
        ("shuffle", lambda: ShardDataset(packed, shuffle=flag)),
        ("shuffle", lambda: EpochSampler(dataset, shuffle=flag)),
        ("shuffle", lambda: DataLoader(dataset, shuffle=no_flag)),
        ("drop_last", lambda: DataLoader(dataset, drop_last=flag)),
        ("trusted", lambda: ShardDataset(packed, trusted=flag)),
    ):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
            make()


@pytest.mark.parametrize("flag", [True, 1, np.True_, torch.tensor(True)], ids=repr)
def test_any_librarys_truth_value_becomes_a_bool(packed: Path, flag: Any) -> None:
    assert ShardDataset(packed, shuffle=flag).shuffle is True
    assert EpochSampler(range(3), shuffle=flag).state_dict()["order"]["shuffle"] is True
