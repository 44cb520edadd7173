"""Transforms of colours: drawn as torchvision's, a function of the sample, in the loader's own processes."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio import DataLoader, ShardDataset
from shardio.images.kernel.compiled import operation_records as codes
from shardio.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    MultiCrop,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomInvert,
    RandomPosterize,
    RandomResizedCrop,
    RandomSolarize,
    apply_transform,
)

KEYS = np.random.default_rng(0).integers(0, 2**63, 24_000, dtype=np.uint64)
SIZES = np.full((len(KEYS), 2), 8)

RANDOM: dict[str, Any] = {
    "grayscale": RandomGrayscale,
    "invert": RandomInvert,
    "autocontrast": RandomAutocontrast,
    "equalize": RandomEqualize,
    "solarize": lambda p: RandomSolarize(130.5, p),
    "posterize": lambda p: RandomPosterize(3, p),
    "sharpness": lambda p: RandomAdjustSharpness(1.5, p),
}


def test_factors_are_uniform_within_torchvisions_bounds() -> None:
    operations = ColorJitter(0.4, (0.2, 3.0), 1.5, 0.1).draw(SIZES, KEYS)
    bounds = {
        codes.BRIGHTNESS: (0.6, 1.4),
        codes.CONTRAST: (0.2, 3.0),
        codes.SATURATION: (0.0, 2.5),
        codes.HUE: (-25.5, 25.5),
    }
    for code, (low, high) in bounds.items():
        drawn = operations["numbers"][operations["code"] == code, 0]
        assert len(drawn) == len(KEYS)
        shifted = np.where(drawn > 127, drawn - 256, drawn) if code == codes.HUE else drawn
        assert low <= shifted.min() <= shifted.max() <= high
        unit = np.sort((shifted - low) / (high - low))
        step = 1 / 25 if code == codes.HUE else 0.015  # Hues are whole numbers.
        assert np.abs(unit - (np.arange(len(unit)) + 0.5) / len(unit)).max() < step


def test_all_orders_are_equally_frequent() -> None:
    drawn = Counter(map(tuple, ColorJitter(0.4, 0.4, 0.4, 0.1).draw(SIZES, KEYS)["code"].tolist()))
    assert set(drawn) == set(permutations((codes.BRIGHTNESS, codes.CONTRAST, codes.SATURATION, codes.HUE)))
    chi_square = sum((count - 1000) ** 2 / 1000 for count in drawn.values())
    assert chi_square < 60, "23 degrees of freedom"


def test_what_is_not_jittered_is_left_alone() -> None:
    operations = ColorJitter(contrast=0.4, hue=0.0).draw(SIZES, KEYS)
    assert set(np.unique(operations["code"])) == {codes.NONE, codes.CONTRAST}
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    assert (ColorJitter()(image) == image).all()


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_the_probability_is_kept(name: str) -> None:
    for p in (0.0, 0.3, 1.0):
        changed = RANDOM[name](p).draw(SIZES, KEYS)["code"] != codes.NONE
        assert changed.mean() == pytest.approx(p, abs=0.02)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_an_image_is_transformed_and_the_original_kept(name: str) -> None:
    image = np.random.default_rng(1).integers(40, 200, (40, 30, 3), np.uint8)
    kept = image.copy()
    assert (RANDOM[name](1.0)(image) != image).any()
    assert (image == kept).all()
    assert repr(RANDOM[name](0.25)).endswith("p=0.25)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColorJitter(-1), "brightness must be a number that is not negative"),
        (lambda: ColorJitter(hue=0.6), "hue must be from -0.5 to 0.5"),
        (lambda: ColorJitter(contrast=(2, 1)), "contrast must be from 0.0 to inf, the lower bound first"),
        (lambda: RandomGrayscale(1.5), "p must be a probability"),
        (lambda: RandomPosterize(9), "bits must be from 0 to 8"),
        (lambda: RandomAdjustSharpness(-1), "sharpness_factor must not be negative"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


STEPS = [
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomGrayscale(0.3),
    RandomHorizontalFlip(),  # A geometry after operations.
    RandomSolarize(128),
    CenterCrop(30),
    RandomEqualize(),
]


def test_a_pipeline_equals_its_steps_one_by_one() -> None:
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (40, 30 + i, 3), np.uint8) for i in range(12)]
    whole = apply_transform(Compose([RandomResizedCrop(32), *STEPS]), images, KEYS[:12])
    apart = apply_transform(Compose([RandomResizedCrop(32), *(Separately(step) for step in STEPS)]), images, KEYS[:12])
    for one, other in zip(whole, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    for i in range(12):
        (alone,) = apply_transform(Compose([RandomResizedCrop(32), *STEPS]), images[i : i + 1], KEYS[i : i + 1])
        np.testing.assert_array_equal(alone, whole[i])


class Separately(ColorJitter):
    """Applies a transform in Python, one image at a time."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def draw(self, sizes: Any, rng_keys: Any) -> Any:
        return self.transform.draw(sizes, rng_keys)

    def apply(self, image: Any, parameters: Any) -> Any:
        return self.transform.apply(image, parameters)


@pytest.mark.parametrize("multi", [False, True])
def test_the_loader_gives_the_same_with_any_number_of_workers_and_resumed(packed: Path, multi: bool) -> None:
    def make(num_workers: int) -> DataLoader:
        transform: Any = Compose([RandomResizedCrop(32), *STEPS])
        if multi:
            transform = MultiCrop([transform, Compose([RandomResizedCrop(24), RandomInvert(0.5)])])
        dataset = ShardDataset(packed, fields=("image", "key"), transform=transform, shuffle=True)
        return DataLoader(dataset, 4, num_workers=num_workers)

    def images_of(batches: Any) -> dict[str, Any]:
        found = dict[str, Any]()
        for images, keys in batches:
            crops = images if multi else [images]
            for row, key in enumerate(keys):
                found[key] = [crop[row].clone() for crop in crops]
        return found

    loader = make(0)
    assert not loader.calls_dataset, "shardio's own executors make the batches"
    expected = images_of(loader)
    begun = make(2)
    batches = iter(begun)
    first = images_of([next(batches)])
    resumed = make(1)
    resumed.load_state_dict(begun.state_dict())
    found = {**first, **images_of(resumed)}
    assert found.keys() == expected.keys()
    for key, crops in expected.items():
        for one, other in zip(crops, found[key], strict=True):
            assert torch.equal(one, other)
