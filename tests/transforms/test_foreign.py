"""Other libraries' transforms, alone, in a Compose or mixed with shardio's, behave as they do in their libraries."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardio import DataLoader, ImageFolder, ShardDataset, ShardMapDataset
from shardio.transforms import CenterCrop, Compose
from tests.raising import assert_raises
from tests.transforms.by_torchvision import v1, v2

FLOAT = v2.ToDtype(torch.float32, scale=True)
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.2, 0.2]

EACH = """
    CenterCrop(20); ColorJitter(0.5, 0.5, 0.5, 0.2); Compose([RandomHorizontalFlip(1), FLOAT, Normalize(MEAN, STD)])
    ConvertImageDtype(torch.float32); ElasticTransform(); FiveCrop(16); GaussianBlur(3)
    GaussianNoise() after FLOAT; Grayscale(3); Lambda(lambda image: image.flip(-1))
    LinearTransformation(torch.eye(48) * 2, torch.ones(48)) after CenterCrop(4), FLOAT
    Normalize(MEAN, STD) after FLOAT; Pad(3); RandomAdjustSharpness(3, p=1); RandomAffine(30)
    RandomApply([RandomInvert(1), RandomVerticalFlip(1)], p=1); RandomAutocontrast(1); RandomChannelPermutation()
    RandomChoice([RandomInvert(1), RandomVerticalFlip(1)]); RandomCrop(20); RandomEqualize(1); RandomErasing(1)
    RandomGrayscale(1); RandomHorizontalFlip(1); RandomInvert(1); RandomOrder([RandomInvert(1), RandomSolarize(9, p=1)])
    RandomPerspective(p=1); RandomPhotometricDistort(p=1); RandomPosterize(3, p=1); RandomResize(16, 24)
    RandomResizedCrop(20); RandomRotation(30); RandomShortestSize(20); RandomSolarize(100, p=1); RandomVerticalFlip(1)
    RandomZoomOut(p=1); Resize(20); RGB() after Grayscale(); ScaleJitter((40, 40)); TenCrop(16); ToDtype(torch.float32)
    ToImage(); ToPILImage(); TrivialAugmentWide(); AugMix(); AutoAugment(); RandAugment(); Identity()
"""
OTHERS = """
    CutMix MixUp RandomIoUCrop SanitizeBoundingBoxes take labels, boxes or batches
    ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat SetClampingMode are not for images
    SanitizeKeyPoints UniformTemporalSubsample are not for images, either
    PILToTensor ToTensor ToPureTensor JPEG Transform are tested separately
"""


def make(expression: str) -> Any:
    last, _, first = expression.partition(" after ")
    names = {**vars(v2), "torch": torch, "FLOAT": FLOAT, "MEAN": MEAN, "STD": STD}
    return eval(f"Compose([{first}, {last}])" if first else last, names)


EXPRESSIONS = {each.partition("(")[0]: each for each in re.split(r";\s+|\n\s+", EACH.strip())}


def test_every_transform_of_torchvision_is_listed() -> None:
    names = {name for name, kind in vars(v2).items() if inspect.isclass(kind) and issubclass(kind, v2.Transform)}
    assert not names - set(EXPRESSIONS) - set(OTHERS.split()), "add the new transforms to EACH or OTHERS"


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


def transformed(packed: Path, transform: Any, **options: Any) -> Any:
    """Return an image of a dataset that has an epoch and does not seed torch's generator."""
    dataset = ShardMapDataset(packed, fields="image", transform=transform, seed_transforms=False, **options)
    dataset.set_epoch(0)
    return dataset[3]


def image_of(packed: Path, transform: Any = None) -> Any:
    return ShardMapDataset(packed, fields="image", transform=transform)[3]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_each_transform_acts_as_on_a_tensor(packed: Path, name: str) -> None:
    if not hasattr(v2, name):
        pytest.skip(f"this torchvision has no {name}")
    transform, image = make(EXPRESSIONS[name]), image_of(packed)
    expected = as_plain(seeded(lambda: transform(image)))
    assert same(as_plain(seeded(lambda: transformed(packed, transform))), expected)
    expected = as_plain(seeded(lambda: transform(transformed(packed, CenterCrop(30)))))
    assert same(as_plain(seeded(lambda: transformed(packed, Compose([CenterCrop(30), transform])))), expected)


def test_transforms_that_convert_to_tensors_do_so(packed: Path) -> None:
    image = image_of(packed)
    with pytest.warns(UserWarning, match="deprecated"):
        to_tensor = v2.ToTensor()
    for transform in (v1.ToTensor(), to_tensor, v2.Compose([v2.RandomHorizontalFlip(0), to_tensor])):
        assert torch.equal(image_of(packed, transform), image.float() / 255)
    for transform in (v1.PILToTensor(), v2.PILToTensor(), v2.ToPureTensor(), v1.Compose([v2.ToImage()])):
        assert torch.equal(as_plain(image_of(packed, transform)), image)


def test_older_transforms_and_modules_act_as_on_a_tensor(packed: Path) -> None:
    image = image_of(packed)
    for transform in (
        v1.ColorJitter(0.5),
        v1.RandomApply([v1.GaussianBlur(3)], p=1),
        torch.nn.Sequential(v2.RandomInvert(1), v1.ConvertImageDtype(torch.float32)),
        torch.nn.ZeroPad2d(2),
    ):
        expected = seeded(functools.partial(transform, image))
        assert torch.equal(seeded(functools.partial(transformed, packed, transform)), expected)


def test_shardios_transforms_work_between_torchvisions(packed: Path) -> None:
    image = image_of(packed)
    steps = [v2.RandomInvert(1), CenterCrop(24), v2.RandomSolarize(99, p=1)]
    inverted = 255 - image
    cropped = torch.from_numpy(CenterCrop(24)(np.ascontiguousarray(inverted.permute(1, 2, 0).numpy()))).permute(2, 0, 1)
    expected = v2.functional.solarize(cropped, 99)
    for compose in (Compose, v1.Compose, v2.Compose):
        assert torch.equal(image_of(packed, compose(steps)), expected)


def test_albumentations_get_the_array_by_name(packed: Path) -> None:
    albumentations = pytest.importorskip("albumentations")
    flip = albumentations.Compose([albumentations.HorizontalFlip(p=1), albumentations.InvertImg(p=1)])
    for transform in (flip, Compose([flip]), Compose([v2.Identity(), flip])):
        assert torch.equal(image_of(packed, transform), 255 - image_of(packed).flip(-1))


CALLING: dict[str, Callable[[Any], Any]] = {
    "a class": lambda transform: Wrapped(transform),
    "a function": lambda transform: lambda image: transform(image),
    "a partial": functools.partial,
    "a function that changes the image": lambda transform: lambda image: transform(image[::-1]),
    "a function that composes": lambda transform: lambda image: v2.Compose([transform])(image),
}


class Wrapped:
    def __init__(self, transform: Any) -> None:
        self.inner = {"inner": [transform]}

    def __call__(self, image: Any) -> Any:
        return self.inner["inner"][0](image)


@pytest.mark.parametrize("name", CALLING)
def test_a_callable_that_passes_an_array_to_a_transform_that_ignores_it_is_an_error(packed: Path, name: str) -> None:
    transform = CALLING[name](v2.RandomInvert(1))
    for whole in (transform, Compose([CenterCrop(20), transform])):
        with pytest.raises(TypeError, match="torchvision's RandomInvert, called by "):
            ShardMapDataset(packed, transform=whole)[0]


def test_a_transform_that_does_not_act_on_images_is_an_error(packed: Path) -> None:
    for name, arguments in (("ClampBoundingBoxes", []), ("ConvertBoundingBoxFormat", ["XYXY"])):
        for whole in (getattr(v2, name)(*arguments), v2.RandomChoice([getattr(v2, name)(*arguments)])):
            assert_raises(TypeError, "ignores images of type", next, iter(ShardDataset(packed, transform=whole)))
    with pytest.raises(TypeError, match="Grayscale is a class, not a transform"):
        ShardMapDataset(packed, transform=v2.Grayscale)[0]
    mixed = v2.RandomApply([CenterCrop(20), v2.RandomInvert(1)], p=1)  # The first step returns an array.
    with pytest.raises(TypeError, match="torchvision's RandomInvert, called by RandomApply"):
        ShardMapDataset(packed, transform=mixed)[0]


def test_a_transform_that_leaves_the_image_unchanged_by_chance_is_not_an_error(packed: Path) -> None:
    image, inverting = image_of(packed), v2.RandomInvert(1)
    for transform in (
        lambda image: inverting(torch.from_numpy(image)) if torch.rand(1) > 1 else image,
        v2.RandomInvert(0),
        v2.RandomApply([inverting], p=0),
        lambda image: v2.Identity()(image),
    ):
        assert torch.equal(image_of(packed, transform), image)


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomHorizontalFlip(1),
        v2.RandomApply([v2.PILToTensor(), FLOAT], p=1),
        v2.RandomChoice([v1.Compose([v1.Resize(20), v1.ToTensor()]), v2.PILToTensor()]),
        v1.Compose([v1.Resize(20), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
        v2.Lambda(lambda image: image.rotate(90), Image.Image),
        lambda image: image.rotate(90),
        lambda image: v2.RandomInvert(1)(image),
    ],
)
def test_with_pillow_images_each_transform_acts_as_on_its_own(packed: Path, transform: Any) -> None:
    image: Any = ShardMapDataset(packed, fields="image", decode="pil")[3]
    expected = as_plain(seeded(lambda: transform(image)))
    assert same(as_plain(seeded(lambda: transformed(packed, transform, decode="pil"))), expected)


@pytest.mark.parametrize("kind", [ShardDataset, ShardMapDataset, ImageFolder])
def test_the_transform_can_be_set_until_samples_are_loaded(packed: Path, images: Path, kind: Any) -> None:
    first, second = CenterCrop(32), CenterCrop(20)
    dataset = kind(images if kind is ImageFolder else packed)
    other = copy.copy(dataset)
    assert dataset.transform is None
    dataset.transform = first
    assert (dataset.transform, other.transform) == (first, None)
    loader: Any = DataLoader(dataset, batch_size=2)
    batches = iter(loader)
    assert next(batches)[0].shape == (2, 3, 32, 32)
    for size in (9, 8):
        other.transform = CenterCrop(size)  # Only the copy's.
    assert next(batches)[0].shape == (2, 3, 32, 32)
    assert next(iter(other))[0].shape == (3, 8, 8)
    dataset.transform = second
    assert_raises(RuntimeError, r"dataset\.transform was set during an iteration", list, batches)
    assert next(iter(loader))[0].shape == (2, 3, 20, 20)


@pytest.mark.parametrize("is_ours", [True, False])
def test_persistent_workers_refuse_a_transform_that_is_set_later(packed: Path, is_ours: bool) -> None:
    first, second = CenterCrop(32), CenterCrop(20)
    dataset = ShardMapDataset(packed, transform=first)
    subset: Any = torch.utils.data.Subset(dataset, range(8))
    make_loader: Any = DataLoader if is_ours else torch.utils.data.DataLoader
    loader = make_loader(subset, batch_size=2, num_workers=1, persistent_workers=True)
    assert next(iter(loader))[0].shape == (2, 3, 32, 32)
    dataset.transform = second
    batches = iter(loader)
    if is_ours:  # shardio's workers receive the dataset before each epoch.
        assert next(batches)[0].shape == (2, 3, 20, 20)
        dataset.transform = first
    assert_raises(RuntimeError, r"dataset\.transform was set", list, batches)


def test_a_transform_without_an_image_field_is_refused(packed: Path) -> None:
    for kind in (ShardDataset, ShardMapDataset):
        with pytest.raises(ValueError, match="transform= is applied to the field 'image', but fields="):
            kind(packed, fields=("label", "key"), transform=CenterCrop(8))
