"""timm's ``create_loader`` over shardio's ImageFolder: it sets the dataset's transform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, ImageFolder
from shardio.models import import_library

import_library("torchvision")
datasets = pytest.importorskip("torchvision.datasets")
v1 = pytest.importorskip("torchvision.transforms")
data = pytest.importorskip("timm.data")


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("use_prefetcher", [False, True])
def test_its_batches_are_those_of_torchvisions_image_folder(
    images: Path, is_training: bool, use_prefetcher: bool
) -> None:
    def load(dataset: Any) -> list[torch.Tensor]:
        loader = data.create_loader(
            dataset,
            input_size=(3, 32, 32),
            batch_size=4,
            is_training=is_training,
            use_prefetcher=use_prefetcher,
            scale=(1.0, 1.0),  # Only the size of the crop is random then,
            ratio=(1.0, 1.0),
            hflip=0.0,
            color_jitter=None,  # and the images are square.
            num_workers=0,
            device=torch.device("cpu"),
        )
        torch.manual_seed(3)
        return [batch.clone() for batch, _ in loader]

    expected, got = load(datasets.ImageFolder(images)), load(ImageFolder(images))
    assert [batch.shape for batch in got] == [batch.shape for batch in expected]
    # torchvision resizes tensors almost as it resizes Pillow images: by one brightness of 255 more or less.
    tolerance = 0 if is_training else 1.01 / 255 / 0.224
    assert all(torch.allclose(one, other, rtol=0, atol=tolerance) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchvisions_transforms_work_as_they_are_when_only_the_dataset_changes(images: Path, num_workers: int) -> None:
    transform = v1.Compose([v1.CenterCrop(32), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)])
    expected = torch.stack([image for image, _ in datasets.ImageFolder(images, transform)])
    got = torch.cat([batch for batch, _ in DataLoader(ImageFolder(images, transform), 4, num_workers=num_workers)])
    assert torch.equal(got, expected)
