"""A subclass's overrides are used, however the samples are read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.damage import warns_of_bad_samples


class Marked(ShardMapDataset):
    """Overrides how one sample is made."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + "!"


class MarkedInBatches(ShardMapDataset):
    """Overrides how a batch of samples is made."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [key + "!" for key in super().__getitems__(indices)]


class MarkedBothWays(ShardMapDataset):
    """Overrides both, and calls the base's method in each."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + "!"

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [key + "!" for key in super().__getitems__(indices)]


class MarkedOneByOne(ShardMapDataset):
    """Overrides both, and calls one in the other."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + "!"

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class MarkedAbove(Marked):
    """Has one method from its base, and overrides the other."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(super().__getitems__(indices))


@pytest.mark.parametrize("kind", [Marked, MarkedInBatches, MarkedBothWays, MarkedOneByOne, MarkedAbove])
def test_an_overridden_method_makes_the_samples_however_they_are_read(
    packed: Path, kind: type[ShardMapDataset]
) -> None:
    plain = ShardMapDataset(packed, fields="key")
    expected = [plain[number] + "!" for number in range(4)]
    dataset = kind(packed, fields="key")
    assert [dataset[number] for number in range(4)] == dataset.__getitems__(range(4)) == expected
    for subject in (dataset, Subset(dataset, range(21))):
        loaders: list[Any] = [
            DataLoader(subject, batch_size=4),
            DataLoader(subject, batch_size=4, sampler=EpochSampler(subject, shuffle=False)),
            torch.utils.data.DataLoader(subject, batch_size=4),
        ]
        for loader in loaders:
            assert list(next(iter(loader))) == expected


class Inverted(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return 255 - image, label


def test_in_worker_processes_with_the_crops_of_the_order(images: Path) -> None:
    crops = []
    for kind in (ImageFolder, Inverted):
        dataset = kind(images, transform=RandomResizedCrop(16))
        loader = DataLoader(dataset, batch_size=21, sampler=EpochSampler(dataset), num_workers=1)
        ((cropped, _),) = loader
        assert loader.calls_dataset == (kind is Inverted)
        crops.append(cropped)
    assert torch.equal(crops[1], 255 - crops[0])


def test_a_bad_sample_is_still_found_among_those_made_one_by_one(images: Path, tmp_path: Path) -> None:
    root = shutil.copytree(images, tmp_path / "images")
    dataset = Inverted(root)
    Path(dataset.samples[3][0]).unlink()
    with pytest.raises(SampleError) as raised:
        dataset.__getitems__(range(5))
    assert raised.value.row == 3
    loader = DataLoader(
        dataset, batch_size=7, sampler=EpochSampler(dataset), on_error="skip", quarantine=tmp_path / "quarantine"
    )
    with warns_of_bad_samples(1):
        assert sum(len(labels) for _, labels in loader) == 20


class Darkened(RandomHorizontalFlip):
    """Overrides what is done to an image."""

    def apply(self, image: Any, parameters: Any) -> Any:
        return super().apply(image, parameters) // 2


class Unmirrored(RandomHorizontalFlip):
    """Overrides what is drawn."""

    def draw(self, sizes: Any, keys: Any) -> Any:
        return np.zeros(len(sizes), np.bool_)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_transforms_that_override_how_they_draw_and_apply(packed: Path, num_workers: int) -> None:
    def load(transform: Any) -> torch.Tensor:
        dataset = ShardDataset(packed, fields="image", transform=transform)
        (images,) = DataLoader(dataset, batch_size=21, num_workers=num_workers)
        return torch.as_tensor(images)

    plain = load(None)
    assert torch.equal(load(Compose([Darkened(p=1)])), plain.flip(-1) // 2)
    assert torch.equal(load(Unmirrored(p=1)), plain)


def test_transforms_cannot_override_what_nothing_calls() -> None:
    message = r"overrides __call__, but datasets and loaders do not call it.*Override apply\(image, parameters\)"
    with pytest.raises(TypeError, match=f"Called {message}"):

        class Called(RandomHorizontalFlip):
            def __call__(self, image: Any) -> Any:
                return super().__call__(image) // 2

    with pytest.raises(TypeError, match=f"Mixed {message}"):
        type("Mixed", (torch.nn.Module, RandomHorizontalFlip), {})

    with pytest.raises(TypeError, match=r"Composed overrides __call__.* Move its code to a function in the list"):

        class Composed(Compose):
            def __call__(self, image: Any) -> Any:
                return super().__call__(image) // 2
