"""Datasets and samplers that are not shardio's, in shardio's loader: torch's batches, and a bad sample is found."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Sampler, Subset

from shardio import DataLoader, EpochSampler, ImageFolder
from shardio.check.coverage import resumes
from shardio.transforms import RandomResizedCrop
from tests.faults.damage import warns_of_bad_samples


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Unmeasured(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2, 0, 4])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}], ids=str
)
def test_a_stream_is_delivered_as_by_torchs_loader(num_workers: int, options: dict[str, Any]) -> None:
    ours, torchs = DataLoader(Stream(), num_workers=num_workers, **options), torch.utils.data.DataLoader
    assert [batch.tolist() if hasattr(batch, "tolist") else batch for batch in ours] == [
        batch.tolist() if hasattr(batch, "tolist") else batch for batch in torchs(Stream(), **options)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_needs_no_length(images: Path, drop_last: bool) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(8))
    for dataset in (range(5), folder):
        batches = list(DataLoader(dataset, batch_size=2, sampler=Unmeasured(), drop_last=drop_last))
        assert len(batches) == 3 - drop_last


class Wrapper(Dataset[Any]):
    """A user's dataset that reads single samples from one of shardio's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def wrap_subset(dataset: ImageFolder) -> Any:
    """Return a dataset whose ``__getitems__`` reads one sample after another."""
    return Subset(ConcatDataset([dataset]), range(len(dataset)))


@pytest.mark.parametrize("wrap", [Wrapper, wrap_subset])
@pytest.mark.parametrize(("on_error", "num_left"), [("skip", 20), ("replace", 21)])
def test_only_the_bad_sample_is_left_out(images: Path, tmp_path: Path, wrap: Any, on_error: Any, num_left: int) -> None:
    folder = ImageFolder(shutil.copytree(images, tmp_path / "images"), transform=RandomResizedCrop(8))
    path, _ = folder.samples[13]
    Path(path).write_bytes(b"no image")
    dataset, quarantine = wrap(folder), tmp_path / "quarantine"
    sampler = EpochSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=21, sampler=sampler, on_error=on_error, quarantine=quarantine)
    with warns_of_bad_samples(1):
        assert sum(len(labels) for _, labels in loader) == num_left
    (entry,) = map(json.loads, quarantine.read_text().splitlines())
    assert (entry["sample"], entry["key"]) == (13, path)


class Reversed(EpochSampler):
    """A sampler that overrides the order has no state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_all_samples - 1, -1, -1))


def test_whether_an_epoch_continues_is_known_without_a_state(images: Path) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(8))
    loader = DataLoader(folder, batch_size=7, sampler=Reversed(folder))
    assert resumes(loader, 2) is True
    assert resumes(loader, 3) is None


def test_two_labels_of_one_sample_are_not_compared(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "weather").joinpath("class-0").rename(tmp_path / "weather/fog")
    pair = torch.utils.data.StackDataset(ImageFolder(images), ImageFolder(tmp_path / "weather"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader(pair)
    assert caught == []
