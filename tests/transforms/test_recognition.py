"""Crops, resizes and flips from torchvision and Albumentations become crop plans that give the same pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import albumentations
import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image

from shardio import DataLoader, ShardMapDataset, transforms
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardio.transforms.geometry import PlainRandomResizedCrop, PlainResize
from shardio.transforms.recognition import recognize, replace_leading
from tests.transforms.by_torchvision import tv_tensors, v1, v2
from tests.transforms.inputs import make_rng_keys, repeat_size

BICUBIC = v2.InterpolationMode.BICUBIC


class Subclass(v2.RandomHorizontalFlip):  # type: ignore[misc]  # torchvision has no types.
    """A subclass, whose behavior is unknown."""


RECOGNIZED = """
    RandomResizedCrop((20, 30), scale=(0.2, 0.9), ratio=(0.5, 1.5), antialias=True)
    RandomResizedCrop(24, interpolation=BICUBIC, antialias=True)
    Resize(25, antialias=True)
    Resize((25, 31), antialias=True)
    Resize(25, max_size=40, antialias=True)
    CenterCrop(70)
    RandomHorizontalFlip(0.3)
    RandomVerticalFlip(0.3)
    RandomCrop(20, (1, 2, 3, 4), True, 9)
    RandomCrop(20, (1, 2))
    Pad((1, 2, 3, 4), padding_mode="edge")
    RandomRotation(15, BICUBIC, fill=7)
    RandomAffine(9, (0.1, 0.2), shear=5)
    ColorJitter(0.4, (0.2, 3), hue=0.1)
    RandomGrayscale(0.2)
    RandomInvert(0.2)
    RandomAutocontrast(0.2)
    RandomEqualize(0.2)
    RandomSolarize(99, 0.2)
    RandomPosterize(3, 0.2)
    RandomAdjustSharpness(3, 0.2)
    RandAugment(3, 7, 11, BICUBIC, [1, 2, 3])
    TrivialAugmentWide()
    AutoAugment(SVHN)
    RandomApply([ColorJitter(0.4), Compose([RandomInvert()])], 0.8)
    RandomChoice([RandomInvert(), RandomGrayscale()], [3, 1])
    RandomOrder([RandomInvert(), RandomGrayscale()])
"""
"""Transforms from both versions of torchvision, with the same arguments as shardio's."""


def make(expression: str, library: Any) -> Any:
    return eval(expression, {**vars(library), "BICUBIC": BICUBIC, "SVHN": v2.AutoAugmentPolicy.SVHN})


OTHERS: list[Any] = [
    Subclass(),
    v2.Resize(25, interpolation=v2.InterpolationMode.NEAREST),
    v2.GaussianBlur(3),  # Blurred pixels may differ.
    v2.RandomRotation(9, expand=True),
    v2.RandomAffine(9, fill={Image.Image: 7}),
    v2.RandomApply([v2.RandomInvert(), v2.GaussianBlur(3)]),
    np.asarray,
]


@pytest.mark.parametrize("expression", RECOGNIZED.strip().splitlines())
def test_transforms_are_replaced_with_all_their_settings(expression: str) -> None:
    ours = make(expression.strip(), transforms)
    for library in (v1, v2):
        assert repr(recognize(make(expression.strip(), library), "pil")) == repr(ours)


@pytest.mark.parametrize("transform", OTHERS, ids=repr)
def test_what_may_do_something_else_is_not_replaced(transform: Any) -> None:
    assert recognize(transform, "pil") is None
    assert replace_leading(v2.Compose([transform, v2.CenterCrop(20)]), "pil") is None


def images_of(packed: Path, transform: Any, **options: Any) -> Iterator[NDArray[np.uint8]]:
    """Yield the images of a dataset whose transform returns Pillow images or tensors [3, height, width]."""
    dataset = ShardMapDataset(packed, fields="image", transform=transform, **options)
    dataset.set_epoch(0)
    for index in range(len(dataset)):
        image: Any = dataset[index]
        yield image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) else np.asarray(image)


def pixels_of(packed: Path, transform: Any) -> list[NDArray[np.uint8]]:
    return list(images_of(packed, transform, decode="pil"))


def assert_same_images(packed: Path, transform: Any, plain: Any, **options: Any) -> None:
    for image, expected in zip(images_of(packed, transform, **options), images_of(packed, plain), strict=True):
        np.testing.assert_array_equal(image, expected)


def test_the_rest_of_a_pipeline_gets_pillow_images(packed: Path) -> None:
    seen = set[type]()

    def look(image: Any) -> Any:
        seen.add(type(image))
        return image

    theirs = v2.Compose([v2.RandomResizedCrop(24), v2.Compose([v2.RandomHorizontalFlip()]), v2.Lambda(look)])
    plain = Compose([RandomResizedCrop(24, antialias=True), RandomHorizontalFlip()])
    assert_same_images(packed, theirs, plain, decode="pil")
    assert seen == {Image.Image}


def test_the_rest_of_albumentations_gets_the_crop(packed: Path) -> None:
    class Look(albumentations.ImageOnlyTransform):  # type: ignore[misc]  # Albumentations has no types.
        def apply(self, img: Any, **_: Any) -> Any:
            shapes.add(img.shape)
            return img

    shapes = set[tuple[int, ...]]()
    pipeline = albumentations.Compose([albumentations.RandomResizedCrop((24, 20)), Look(p=1)])
    assert_same_images(packed, pipeline, Compose([PlainRandomResizedCrop((24, 20))]))
    assert shapes == {(24, 20, 3)}


def test_pixels_are_those_of_pillow(packed: Path) -> None:
    originals = [Image.fromarray(image) for image in pixels_of(packed, None)]
    for resample, interpolation in ((Image.Resampling.BILINEAR, v2.InterpolationMode.BILINEAR), (3, BICUBIC)):
        made = pixels_of(packed, v2.Compose([v2.Resize((25, 31), interpolation), v2.PILToTensor()]))
        for image, original in zip(made, originals, strict=True):
            # All versions of Pillow before 13 resize horizontally first.
            across = original.resize((31, original.height), resample)
            assert np.array_equal(image, np.asarray(across.resize((31, 25), resample)))
    evaluated = v2.Compose([v2.CenterCrop(70), v2.RandomHorizontalFlip(1.0)])
    for image, original in zip(pixels_of(packed, evaluated), originals, strict=True):
        assert np.array_equal(image, np.asarray(evaluated(original)))


@pytest.mark.parametrize("library", [v1, v2], ids=["v1", "v2"])
def test_pixels_of_operations_are_torchvisions(packed: Path, library: Any) -> None:
    # With these settings, no parameter is random.
    originals = [Image.fromarray(image) for image in pixels_of(packed, None)]
    pipeline = library.Compose(
        [
            library.Pad((2, 3), fill=50),
            library.RandomVerticalFlip(1.0),
            library.RandomRotation((20, 20), library.InterpolationMode.BILINEAR, fill=9),
            library.ColorJitter((1.3, 1.3)),
            library.ColorJitter(hue=(0.2, 0.2)),
            library.RandomApply([library.RandomPosterize(3, 1.0), library.RandomEqualize(1.0)], 1.0),
            library.RandomAffine((5, 5), shear=(3, 3)),
        ]
    )
    replaced = replace_leading(pipeline, "pil")
    assert replaced is not None
    assert not [step for step in replaced.transforms if type(step).__module__.startswith("torchvision")]
    for image, original in zip(pixels_of(packed, pipeline), originals, strict=True):
        assert np.array_equal(image, np.asarray(pipeline(original)))


def test_only_the_crop_is_decoded_and_the_log_says_so(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardio")
    transform = v2.Compose([v2.RandomResizedCrop(24), v2.PILToTensor()])
    dataset = ShardMapDataset(packed, fields="image", transform=transform, decode="pil")
    loader = DataLoader(dataset, 8)
    assert sum(len(batch) for batch in loader) == len(dataset)
    assert loader.stats().num_images_by_decoder["kernel"] > 0
    (said,) = [record.getMessage() for record in caplog.records]
    replaced = "shardio's transforms replace the first steps of this dataset's transform: "
    assert said.startswith(f"{replaced}RandomResizedCrop(")


SETTINGS: dict[str, Any] = {"scale": (0.2, 0.9), "ratio": (0.5, 1.5)}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (albumentations.RandomResizedCrop((20, 30), **SETTINGS), PlainRandomResizedCrop((20, 30), **SETTINGS)),
        (albumentations.Resize(25, 31), PlainResize((25, 31))),
        (albumentations.HorizontalFlip(p=0.3), RandomHorizontalFlip(0.3)),
    ],
)
def test_albumentations_are_replaced_with_all_their_settings(theirs: Any, ours: Any) -> None:
    found = recognize(theirs, "array")
    assert type(found) is type(ours)
    assert vars(found) == vars(ours)
    assert recognize(theirs, "pil") is None


@pytest.mark.parametrize(
    "transform",
    [
        albumentations.RandomResizedCrop((20, 20), interpolation=cv2.INTER_CUBIC),
        albumentations.Resize(20, 20, area_for_downscale="image"),
        albumentations.RandomResizedCrop((20, 20), p=0.5),
        albumentations.CenterCrop(20, 20),  # CenterCrop rejects small images.
        albumentations.OneOf([albumentations.HorizontalFlip(p=1)]),
        albumentations.Compose([albumentations.HorizontalFlip()], p=0.5),
    ],
)
def test_other_albumentations_are_not_replaced(transform: Any) -> None:
    assert replace_leading(transform, "array") is None


@pytest.mark.parametrize("side", [7, 20, 32, 50, 120])
def test_pixels_are_those_of_opencv_also_where_sides_are_halved(packed: Path, side: int) -> None:
    pipeline = albumentations.Compose([albumentations.Resize(side, 31), albumentations.HorizontalFlip(p=1)])
    for image, original in zip(images_of(packed, pipeline), images_of(packed, None), strict=True):
        np.testing.assert_array_equal(image, pipeline(image=original)["image"])


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    size=st.one_of(st.none(), st.integers(1, 500)),
    more=st.integers(1, 500),
)
def test_a_longest_side_is_torchvisions(height: int, width: int, size: int | None, more: int) -> None:
    max_size = (size or 0) + more
    box = tv_tensors.BoundingBoxes([[0, 0, 1, 1]], format="XYXY", canvas_size=(height, width))
    expected = v2.Resize(size, max_size=max_size)(box).canvas_size
    found = Resize(size, max_size=max_size).draw(repeat_size(height, width, 1), make_rng_keys(1))[0].tolist()
    assert tuple(found) == tuple(max(side, 1) for side in expected), "torchvision's sides may be 0"
    assert max(found) <= max_size
