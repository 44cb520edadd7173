"""A loader's attributes may change between epochs: it gets another executor exactly when one of them did."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.loader.arguments import OwnArguments
from shardio.loader.executors.choice import find_settings
from shardio.transforms import CenterCrop


@dataclass
class Mixing:
    """A collate_fn that cannot be compared by value: a tensor of several elements is neither true nor false."""

    weights: torch.Tensor

    def __call__(self, samples: list[Any]) -> float:
        return float(self.weights.sum())


class Incomparable:
    """Indices, and a collate_fn, that cannot be compared or printed."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __call__(self, samples: list[int]) -> list[int]:
        return samples

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]  # as for every class that defines __eq__ alone


@dataclass
class Cropping:
    """A transform of a user's, which is equal to others of its size."""

    size: int

    def __call__(self, image: Any) -> Any:
        return np.asarray(image)[: self.size, : self.size]


class Collating:
    """A collate_fn is created at each access to the method."""

    def collate(self, samples: list[Any]) -> list[torch.Tensor]:
        return [torch.tensor(os.getpid())]


def worker_ids(loader: DataLoader) -> set[int]:
    return {int(worker_id) for (worker_id,) in loader}


@pytest.mark.parametrize("kind", ["shards", "sampler", "torch"])
def test_a_collate_fn_that_cannot_be_compared_can_be_replaced(packed: Path, kind: str) -> None:
    dataset: Any = ShardDataset(packed, fields="key") if kind == "shards" else ShardMapDataset(packed, fields="key")
    sampler = EpochSampler(dataset) if kind == "sampler" else None
    loader = DataLoader(dataset, batch_size=7, sampler=sampler, collate_fn=Mixing(torch.zeros(3)))
    for value in (1, 1, 2):
        loader.collate_fn = Mixing(torch.full((3,), float(value)))
        assert list(loader) == [3.0 * value] * 3


def test_a_dataset_that_cannot_be_compared_can_be_iterated_again() -> None:
    dataset = Incomparable()
    loader = DataLoader(dataset, batch_size=2, collate_fn=dataset)
    for _ in range(3):
        assert list(loader) == [[0, 1], [2, 3]]
        settings = find_settings(loader, OwnArguments())
        other = replace(settings, datasets=(Incomparable(),))
        assert settings.is_same(find_settings(loader, OwnArguments()))
        assert not settings.is_same(other)
        loader.collate_fn = Incomparable()


def test_a_transform_that_equals_the_one_before_is_used_by_persistent_workers(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="image", transform=Cropping(16))
    loader = DataLoader(dataset, batch_size=7, sampler=EpochSampler(dataset), num_workers=1, persistent_workers=True)
    for _ in range(2):
        assert {batch.shape for batch in loader} == {(7, 3, 16, 16)}
        dataset.transform = Cropping(16)


def test_persistent_workers_stay_while_the_settings_are_the_same(packed: Path) -> None:
    dataset, transform, collating = ShardMapDataset(packed), Cropping(16), Collating()
    dataset.transform = transform
    loader = DataLoader(
        dataset,
        batch_size=7,
        sampler=EpochSampler(dataset),
        num_workers=1,
        persistent_workers=True,
        collate_fn=collating.collate,
    )
    first = worker_ids(loader)
    transform.size = 8  # An error message that names the transform changes with it.
    loader.collate_fn = collating.collate
    assert worker_ids(loader) == first
    loader.collate_fn = Collating().collate
    assert worker_ids(loader).isdisjoint(first)


def test_any_setting_that_changes_makes_a_difference(packed: Path) -> None:
    inner = ShardMapDataset(packed, transform=CenterCrop(16))
    subset = Subset(inner, range(9))
    settings = find_settings(DataLoader(Subset(subset, range(5)), batch_size=2, num_workers=1), OwnArguments())
    objects: dict[str, Any] = {
        "datasets": (*settings.datasets[:1], Subset(inner, range(9)), inner),
        "decoder": replace(inner.decoder),
        "batch_sampler": [[0]],
        "collate_fn": list,
        "worker_init_fn": print,
        "multiprocessing_context": torch.multiprocessing.get_context("spawn"),
        "generator": torch.Generator(),
        "pin_memory_device": "cuda",
        "worker_method": "thread",
    }
    numbers: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 2,
        "timeout_s": 1.5,
        "prefetch_factor": 2,
        "snapshot_every_n_steps": 9,
    }
    flags = {
        name: not getattr(settings, name)
        for name in ("is_ours", "persistent_workers", "in_order", "pin_memory", "pins")
    }
    assert objects.keys() | numbers.keys() | flags.keys() == {field.name for field in fields(settings)}
    for name, value in {**objects, **numbers, **flags}.items():
        assert not replace(settings, **{name: value}).is_same(settings), name
    assert settings.is_same(replace(settings))
    assert settings.prefetch_factor == 2, "the default differs from the same number of the user's"
