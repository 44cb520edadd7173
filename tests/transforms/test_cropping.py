"""Padding and crops of a given size: torchvision's pixels, parameters and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from shardio import DataLoader, ShardDataset
from shardio.errors import SampleError
from shardio.images import DecodeError
from shardio.libraries import import_library
from shardio.transforms import (
    CornerCrop,
    FiveCrop,
    Pad,
    RandomCrop,
    RandomInvert,
    Resize,
    Transform,
    apply_transform,
    is_builtin,
)
from tests.transforms.inputs import make_noise, make_rng_keys, repeat_size

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

MODES = ["constant", "edge", "reflect", "symmetric"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [0, 3, (1, 4), (2, 0, 3, 5)])
@pytest.mark.parametrize("fill", [0, 77, (7, 250, 130)])
def test_padding_gives_torchvisions_pixels(padding: Any, fill: Any, mode: Any) -> None:
    for size in ((8, 9), (6, 20), (30, 6)):
        image = make_noise(*size)
        expected = v2.functional.pad(Image.fromarray(image), padding, fill, mode)
        np.testing.assert_array_equal(Pad(padding, fill, mode)(image), np.array(expected))


@pytest.mark.parametrize("mode", MODES)
def test_a_random_crop_is_a_crop_of_the_padded_image(mode: Any) -> None:
    transform, keys = RandomCrop((10, 8), (2, 5, 4, 1), fill=9, padding_mode=mode), make_rng_keys(50)
    image = make_noise(12, 14)
    padded = Pad((2, 5, 4, 1), 9, mode)(image)
    boxes = transform.draw(repeat_size(12, 14, 50), keys)
    for box, cropped in zip(boxes.tolist(), apply_transform(transform, [image] * 50, keys), strict=True):
        top, left = box[0] + 5, box[1] + 2
        np.testing.assert_array_equal(cropped, padded[top : top + 10, left : left + 8])


@pytest.mark.parametrize(
    ("size", "crop", "padding", "if_needed"),
    [
        ((32, 32), 32, 4, False),
        ((20, 50), (20, 30), None, False),
        ((9, 40), 30, None, True),
        ((9, 9), 30, (1, 2), True),
    ],
)
def test_the_places_of_crops_are_torchvisions_and_uniform(size: Any, crop: Any, padding: Any, if_needed: bool) -> None:
    count = 20_000
    boxes = RandomCrop(crop, padding, if_needed).draw(repeat_size(size[0], size[1], count), make_rng_keys(count))
    theirs, image, seen = v2.RandomCrop(crop, padding, if_needed), Image.new("RGB", size[::-1]), []
    for _ in range(3000):
        drawn = theirs.make_params([image])
        seen.append((drawn["top"] - drawn["padding"][1], drawn["left"] - drawn["padding"][0]))
        assert (drawn["height"], drawn["width"]) == tuple(boxes[0, 2:])
    for side, places in enumerate(zip(*seen, strict=True)):
        ours = boxes[:, side]
        assert {ours.min(), ours.max()} == {min(places), max(places)}, "3,000 draws contain all of at most 60 places"
        frequencies = np.bincount(ours - ours.min())
        expected = count / len(frequencies)
        assert ((frequencies - expected) ** 2 / expected).sum() < len(frequencies) + 5 * (2 * len(frequencies)) ** 0.5


@pytest.mark.parametrize(
    "transform", [RandomCrop(8, 2), RandomCrop((40, 5), pad_if_needed=True), CornerCrop(5, "top left")]
)
def test_an_images_parameters_depend_only_on_its_rng_key_and_size(transform: Transform) -> None:
    sizes, rng_keys = np.random.default_rng(1).integers(8, 60, (100, 2)), make_rng_keys(100)
    one_by_one = [transform.draw(sizes[i : i + 1], rng_keys[i : i + 1]) for i in range(100)]
    np.testing.assert_array_equal(transform.draw(sizes, rng_keys), np.concatenate(one_by_one))


def test_corner_crops_and_the_centre_are_torchvisions_five_crops() -> None:
    image = make_noise(20, 31)
    expected = v2.functional.five_crop(Image.fromarray(image), [7, 12])
    for crop, wanted in zip(FiveCrop((7, 12))(image), expected, strict=True):
        np.testing.assert_array_equal(crop, np.array(wanted))


def test_five_crops_are_made_after_and_before_other_transforms(packed: Path) -> None:
    transform = FiveCrop(24, before=[Resize(40)], after=[RandomInvert(1)])
    assert is_builtin(transform)
    dataset = ShardDataset(packed, fields=("image",), transform=transform)
    (crops,) = next(iter(DataLoader(dataset, 2, num_workers=1)))
    (whole,) = next(iter(ShardDataset(packed, fields=("image",), transform=Resize(40))))
    height, width = whole.shape[1:]
    corners = [(0, 0), (0, width - 24), (height - 24, 0), (height - 24, width - 24)]
    corners.append((round((height - 24) / 2), round((width - 24) / 2)))
    for crop, (top, left) in zip(crops, corners, strict=True):
        assert torch.equal(crop[0], 255 - whole[:, top : top + 24, left : left + 24])


def test_an_image_that_is_too_small_is_named_with_the_remedy(packed: Path) -> None:
    with pytest.raises(
        DecodeError, match=r"needs at least 50×50 pixels, and the image has 20×60: set pad_if_needed=True"
    ):
        apply_transform(RandomCrop(50), [make_noise(60, 60), make_noise(60, 20)], make_rng_keys(2))
    with pytest.raises(DecodeError, match=r"CornerCrop.* needs at least 9×9 pixels"):
        CornerCrop(9, "top left")(make_noise(60, 5))
    dataset = ShardDataset(packed, fields=("image",), transform=RandomCrop(5000))
    with pytest.raises(SampleError, match=r"image of sample .* in .*shard-.*: RandomCrop.* needs at least 5000×5000"):
        next(iter(DataLoader(dataset, 2, num_workers=1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pad((1, 2, 3)), "padding must be one, two or four integers"),
        (lambda: Pad(-1), "padding must be one, two or four integers that are not negative"),
        (lambda: RandomCrop(8, padding_mode=cast(Any, "wrap")), "padding_mode must be"),
        (lambda: RandomCrop(8, fill=300), "fill must be a number from 0 to 255"),
        (lambda: RandomCrop((0, 4)), "size must be a positive integer"),
        (lambda: CornerCrop(3, cast(Any, "left")), "corner must be"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
