"""Indices are integers: a float never selects a sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ImageFolder, ShardMapDataset

NO_INTEGERS: list[Any] = [1.7, 1.0, "3", None, np.float64(2), torch.tensor(1.0), slice(1, 3), [1, 2], np.arange(2)]

INTEGERS: list[Any] = [5, np.int32(5), np.uint8(5), torch.tensor(5), -16, np.int8(-16)]


@pytest.mark.parametrize("index", NO_INTEGERS, ids=repr)
def test_an_index_that_is_not_an_integer_is_refused(packed: Path, images: Path, index: Any) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    takes: list[Callable[[], Any]] = [
        lambda: dataset[index],
        lambda: dataset.__getitems__([0, index]),
        lambda: ImageFolder(images)[index],
        lambda: list(DataLoader(dataset, batch_size=2, sampler=[0, index])),
        lambda: list(DataLoader(dataset, batch_sampler=[[0, index]])),
        lambda: list(DataLoader(Subset(dataset, [0, index]), batch_size=2)),
        lambda: list(DataLoader(Subset(Subset(dataset, [0, index]), [1]), batch_size=2)),
        lambda: list(DataLoader(dataset, batch_size=2, sampler=[0, index], worker_init_fn=print)),
        lambda: list(torch.utils.data.DataLoader(dataset, batch_size=2, sampler=[0, index])),
        lambda: EpochSampler(Subset(dataset, [0, index])),
    ]
    for take in takes:
        with pytest.raises(TypeError, match="index must be an integer, got"):
            take()


@pytest.mark.parametrize("index", INTEGERS, ids=repr)
def test_any_librarys_integer_is_an_index(packed: Path, index: Any) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    key = dataset[5]
    assert dataset[index] == key
    for subject, sampler in ((dataset, [index]), (Subset(dataset, [index]), [0])):
        ((found,),) = DataLoader(subject, sampler=sampler)
        assert found == key


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64, np.int64])
def test_arrays_of_any_width(packed: Path, kind: Any) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    numbers = np.array([4, 20, 0], kind)
    expected = [dataset[number] for number in (4, 20, 0)]
    for indices in (numbers, torch.from_numpy(numbers)):
        assert list(next(iter(DataLoader(dataset, batch_sampler=[indices])))) == expected
        subset = Subset(dataset, indices)  # type: ignore[arg-type]  # users give these
        assert list(next(iter(DataLoader(subset, batch_size=3)))) == expected


def test_huge_integers_are_out_of_range(packed: Path) -> None:
    for index in (2**63, 2**64 + 1, -(2**70)):
        with pytest.raises(IndexError, match="is out of range for a dataset of 21 samples"):
            ShardMapDataset(packed)[index]


def test_truth_values_are_not_indices(packed: Path) -> None:
    dataset = ShardMapDataset(packed)
    for mask in ([True], [True, False], np.array([True, False]), torch.tensor([True, False])):
        with pytest.raises(TypeError, match="an index must be an integer, got"):
            list(DataLoader(dataset, batch_sampler=[mask]))
