"""Other libraries' transforms do to shardio's images what they do by themselves, alone, in a Compose, and mixed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio import DataLoader, ImageFolder, ShardDataset, ShardMapDataset
from shardio.train.libraries import import_library
from shardio.transforms import CenterCrop, Compose, RandomResizedCrop

albumentations = pytest.importorskip("albumentations")
import_library("torchvision")
v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")

FLOAT = v2.ToDtype(torch.float32, scale=True)
MEAN = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]}

MAKE: dict[str, Callable[[], Any]] = {
    "CenterCrop": lambda: v2.CenterCrop(20),
    "ColorJitter": lambda: v2.ColorJitter(0.5, 0.5, 0.5, 0.2),
    "Compose": lambda: v2.Compose([v2.RandomHorizontalFlip(1), FLOAT, v2.Normalize(**MEAN)]),
    "ConvertImageDtype": lambda: v2.ConvertImageDtype(torch.float32),
    "ElasticTransform": lambda: v2.ElasticTransform(),
    "FiveCrop": lambda: v2.FiveCrop(16),
    "GaussianBlur": lambda: v2.GaussianBlur(3),
    "GaussianNoise": lambda: v2.Compose([FLOAT, v2.GaussianNoise()]),
    "Grayscale": lambda: v2.Grayscale(3),
    "Lambda": lambda: v2.Lambda(lambda image: image.flip(-1)),
    "LinearTransformation": lambda: v2.Compose(
        [v2.CenterCrop(4), FLOAT, v2.LinearTransformation(torch.eye(48) * 2, torch.ones(48))]
    ),
    "Normalize": lambda: v2.Compose([FLOAT, v2.Normalize(**MEAN)]),
    "Pad": lambda: v2.Pad(3),
    "RandomAdjustSharpness": lambda: v2.RandomAdjustSharpness(3, p=1),
    "RandomAffine": lambda: v2.RandomAffine(30),
    "RandomApply": lambda: v2.RandomApply([v2.RandomInvert(1), v2.RandomVerticalFlip(1)], p=1),
    "RandomAutocontrast": lambda: v2.RandomAutocontrast(1),
    "RandomChannelPermutation": lambda: v2.RandomChannelPermutation(),
    "RandomChoice": lambda: v2.RandomChoice([v2.RandomInvert(1), v2.RandomVerticalFlip(1)]),
    "RandomCrop": lambda: v2.RandomCrop(20),
    "RandomEqualize": lambda: v2.RandomEqualize(1),
    "RandomErasing": lambda: v2.RandomErasing(1),
    "RandomGrayscale": lambda: v2.RandomGrayscale(1),
    "RandomHorizontalFlip": lambda: v2.RandomHorizontalFlip(1),
    "RandomInvert": lambda: v2.RandomInvert(1),
    "RandomOrder": lambda: v2.RandomOrder([v2.RandomInvert(1), v2.RandomSolarize(100, p=1)]),
    "RandomPerspective": lambda: v2.RandomPerspective(p=1),
    "RandomPhotometricDistort": lambda: v2.RandomPhotometricDistort(p=1),
    "RandomPosterize": lambda: v2.RandomPosterize(3, p=1),
    "RandomResize": lambda: v2.RandomResize(16, 24),
    "RandomResizedCrop": lambda: v2.RandomResizedCrop(20),
    "RandomRotation": lambda: v2.RandomRotation(30),
    "RandomShortestSize": lambda: v2.RandomShortestSize(20),
    "RandomSolarize": lambda: v2.RandomSolarize(100, p=1),
    "RandomVerticalFlip": lambda: v2.RandomVerticalFlip(1),
    "RandomZoomOut": lambda: v2.RandomZoomOut(p=1),
    "Resize": lambda: v2.Resize(20),
    "RGB": lambda: v2.Compose([v2.Grayscale(), v2.RGB()]),
    "ScaleJitter": lambda: v2.ScaleJitter((40, 40)),
    "TenCrop": lambda: v2.TenCrop(16),
    "ToDtype": lambda: FLOAT,
    "ToImage": lambda: v2.ToImage(),
    "ToPILImage": lambda: v2.ToPILImage(),
    "TrivialAugmentWide": lambda: v2.TrivialAugmentWide(),
    "AugMix": lambda: v2.AugMix(),
    "AutoAugment": lambda: v2.AutoAugment(),
    "RandAugment": lambda: v2.RandAugment(),
    "Identity": lambda: v2.Identity(),
}
OTHERS = {
    "takes labels, boxes or batches": {"CutMix", "MixUp", "RandomIoUCrop", "SanitizeBoundingBoxes"},
    "no image": {
        "ClampBoundingBoxes",
        "ClampKeyPoints",
        "ConvertBoundingBoxFormat",
        "SetClampingMode",
        "SanitizeKeyPoints",
        "UniformTemporalSubsample",
    },
    "shown by itself": {"PILToTensor", "ToTensor", "ToPureTensor", "JPEG", "Transform"},
}


def test_all_of_torchvisions_transforms_are_here() -> None:
    names = {name for name, kind in vars(v2).items() if inspect.isclass(kind) and issubclass(kind, v2.Transform)}
    unknown = names - set(MAKE) - set().union(*OTHERS.values())
    assert not unknown, "new ones: add them"


def as_plain(image: Any) -> Any:
    if isinstance(image, tuple | list):
        return [as_plain(each) for each in image]
    if isinstance(image, torch.Tensor):
        return image.as_subclass(torch.Tensor)
    return torch.from_numpy(np.array(image))


def same(image: Any, other: Any) -> bool:
    if isinstance(image, list):
        return len(image) == len(other) and all(map(same, image, other))
    return image.dtype == other.dtype and torch.equal(image, other)


def seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    np.random.seed(5)
    return function()


def transformed(packed: Path, transform: Any) -> Any:
    """Return an image of a dataset that knows the epoch, and so draws nothing from torch's generator by itself."""
    dataset = ShardMapDataset(packed, fields="image", transform=transform)
    dataset.set_epoch(0)
    return dataset[3]


@pytest.mark.parametrize("name", MAKE)
def test_each_acts_as_on_the_tensor_by_itself(packed: Path, name: str) -> None:
    if not hasattr(v2, name):
        pytest.skip(f"this torchvision has no {name}")
    transform = MAKE[name]()
    image: torch.Tensor = ShardMapDataset(packed, fields="image")[3]
    expected = as_plain(seeded(lambda: transform(image)))
    assert same(as_plain(seeded(lambda: transformed(packed, transform))), expected)
    expected = as_plain(seeded(lambda: transform(transformed(packed, CenterCrop(30)))))
    assert same(as_plain(seeded(lambda: transformed(packed, Compose([CenterCrop(30), transform])))), expected)


def test_those_that_turn_pillow_images_or_arrays_into_tensors_do_that(packed: Path) -> None:
    image: torch.Tensor = ShardMapDataset(packed, fields="image")[3]
    with pytest.warns(UserWarning, match="deprecated"):
        to_tensor = v2.ToTensor()
    for transform in (v1.ToTensor(), to_tensor, v2.Compose([v2.RandomHorizontalFlip(0), to_tensor])):
        found = ShardMapDataset(packed, fields="image", transform=transform)[3]
        assert torch.equal(found, image.float() / 255)
    for transform in (v1.PILToTensor(), v2.PILToTensor(), v2.ToPureTensor(), v1.Compose([v2.ToImage()])):
        found = ShardMapDataset(packed, fields="image", transform=transform)[3]
        assert torch.equal(as_plain(found), image)


def test_the_older_transforms_and_modules_act_as_on_the_tensor(packed: Path) -> None:
    image: torch.Tensor = ShardMapDataset(packed, fields="image")[3]
    for transform in (
        v1.ColorJitter(0.5),
        v1.RandomApply([v1.GaussianBlur(3)], p=1),
        torch.nn.Sequential(v2.RandomInvert(1), v1.ConvertImageDtype(torch.float32)),
        torch.nn.ZeroPad2d(2),
    ):
        expected = seeded(functools.partial(transform, image))
        assert torch.equal(seeded(functools.partial(transformed, packed, transform)), expected)


def test_shardios_transforms_behind_torchvisions_and_between_them(packed: Path) -> None:
    image: torch.Tensor = ShardMapDataset(packed, fields="image")[3]
    steps = [v2.RandomInvert(1), CenterCrop(24), v2.RandomSolarize(99, p=1)]
    inverted = 255 - image
    cropped = torch.from_numpy(CenterCrop(24)(np.ascontiguousarray(inverted.permute(1, 2, 0).numpy()))).permute(2, 0, 1)
    expected = v2.functional.solarize(cropped, 99)
    for compose in (Compose, v1.Compose, v2.Compose):
        assert torch.equal(ShardMapDataset(packed, fields="image", transform=compose(steps))[3], expected)


def test_albumentations_get_the_array_by_name(packed: Path) -> None:
    image: torch.Tensor = ShardMapDataset(packed, fields="image")[3]
    flip = albumentations.Compose([albumentations.HorizontalFlip(p=1), albumentations.InvertImg(p=1)])
    for transform in (flip, Compose([flip]), Compose([v2.Identity(), flip])):
        found = ShardMapDataset(packed, fields="image", transform=transform)[3]
        assert torch.equal(found, 255 - image.flip(-1))


def test_what_would_do_nothing_is_an_error(packed: Path) -> None:
    inverting = v2.RandomInvert(1)

    class Wrapped:
        def __init__(self) -> None:
            self.inner = {"inner": [inverting]}

        def __call__(self, image: Any) -> Any:
            return self.inner["inner"][0](image)

    def closure(image: Any) -> Any:
        return inverting(image)

    partial = functools.partial(lambda transform, image: transform(image), inverting)
    for transform in (Wrapped(), closure, partial, lambda image: FLOAT(image)):
        for whole in (transform, Compose([CenterCrop(20), transform])):
            with pytest.raises(TypeError, match="returned the arrays that it got: torchvision's"):
                ShardMapDataset(packed, transform=whole)[0]
    for name in ("ClampBoundingBoxes", "ConvertBoundingBoxFormat"):
        transform = getattr(v2, name)(*["XYXY"] * (name == "ConvertBoundingBoxFormat"))
        with pytest.raises(TypeError, match="does nothing to an image"):
            next(iter(ShardDataset(packed, transform=transform)))
    assert ShardMapDataset(packed, transform=lambda image: image)[0][0].shape == (3, 32, 48)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_deliver_what_they_return(packed: Path, num_workers: int) -> None:
    mixed = Compose([RandomResizedCrop(16), v2.ToImage(), FLOAT, v2.Normalize(**MEAN)])
    images, _ = next(iter(DataLoader(ShardDataset(packed, transform=mixed), batch_size=4, num_workers=num_workers)))
    cropped, _ = next(iter(DataLoader(ShardDataset(packed, transform=Compose([RandomResizedCrop(16)])), batch_size=4)))
    expected = (cropped.float() / 255 - torch.tensor(MEAN["mean"]).view(3, 1, 1)) / 0.2
    torch.testing.assert_close(images.as_subclass(torch.Tensor), expected)


def datasets(packed: Path, images: Path) -> list[Any]:
    return [ShardDataset(packed), ShardMapDataset(packed), ImageFolder(images)]


@pytest.mark.parametrize("place", range(3))
def test_the_transform_can_be_set_until_samples_are_loaded(packed: Path, images: Path, place: int) -> None:
    first, second = CenterCrop(32), CenterCrop(20)
    for options in (
        {"num_workers": 0},
        {"num_workers": 1, "prefetch_factor": 1, "persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": 1, "persistent_workers": True, "worker_init_fn": id},
    ):
        dataset = datasets(packed, images)[place]
        assert dataset.transform is None
        dataset.transform = first
        assert dataset.transform is first
        loader: Any = DataLoader(dataset, batch_size=2, **options)
        assert next(iter(loader))[0].shape == (2, 3, 32, 32)
        batches = iter(loader)
        next(batches)
        dataset.transform = second
        with pytest.raises(RuntimeError, match=r"dataset\.transform was set while samples were being loaded"):
            for _ in batches:
                pass
        if "worker_init_fn" not in options:
            assert next(iter(loader))[0].shape == (2, 3, 20, 20)
    torchs: Any = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    assert next(iter(torchs))[0].shape == (2, 3, 20, 20)
    dataset.transform = first
    with pytest.raises(RuntimeError, match=r"dataset\.transform was set"):
        next(iter(torchs))


def test_a_transform_without_an_image_to_apply_it_to_is_refused(packed: Path) -> None:
    for make in (ShardDataset, ShardMapDataset):
        with pytest.raises(ValueError, match="transform= is applied to the field 'image', and fields="):
            make(packed, fields=("label", "key"), transform=CenterCrop(8))
