"""timm's ``create_loader``, which sets the dataset's transform, over shardio's ImageFolder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, ImageFolder
from shardio.libraries import import_library

import_library("torchvision")
datasets = pytest.importorskip("torchvision.datasets")
v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")
data = pytest.importorskip("timm.data")


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("use_prefetcher", [False, True])
def test_batches_are_those_of_torchvisions_folder(images: Path, is_training: bool, use_prefetcher: bool) -> None:
    # With these settings and square images, the only random value is the crop's size.
    options: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0, "color_jitter": None}
    options |= {"is_training": is_training, "use_prefetcher": use_prefetcher, "input_size": (3, 32, 32)}

    def load(dataset: Any) -> list[torch.Tensor]:
        device = torch.device("cpu")
        loader = data.create_loader(dataset, batch_size=4, num_workers=0, device=device, **options)
        torch.manual_seed(3)
        return [batch.clone() for batch, _ in loader]

    expected, got = load(datasets.ImageFolder(images)), load(ImageFolder(images))
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def as_gray(image: Any) -> Any:
    return image.convert("L").convert("RGB")  # A method of Pillow images.


PIPELINES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "evaluation": (
        lambda: v1.Compose([v1.Resize(36), v1.CenterCrop(32), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)]),
        ("Resize(size=36, antialias=True)", "CenterCrop(size=(32, 32))"),
    ),
    "v2": (lambda: v2.Compose([v2.Resize((24, 20)), v2.PILToTensor()]), ("Resize(size=(24, 20), antialias=True)",)),
    "v2 of images": (
        lambda: v2.Compose([v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
        ("CenterCrop(size=(32, 32))",),
    ),
    "own code for Pillow images": (lambda: v1.Compose([as_gray, v1.Resize((9, 9)), v1.ToTensor()]), ()),
    "a conversion first": (lambda: v1.Compose([v1.ToTensor(), v1.CenterCrop(24)]), ()),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [*((name, 0) for name in PIPELINES), pytest.param("own code for Pillow images", 1, marks=pytest.mark.slow)],
)
def test_torchvisions_transforms_work_when_only_the_dataset_changes(images: Path, name: str, num_workers: int) -> None:
    make, recognized = PIPELINES[name]
    expected = torch.stack([torch.as_tensor(image) for image, _ in datasets.ImageFolder(images, make())])
    loader = DataLoader(ImageFolder(images, make()), 4, num_workers=num_workers)
    assert torch.equal(torch.cat([batch for batch, _ in loader]), expected)
    assert loader.stats().recognized == recognized
