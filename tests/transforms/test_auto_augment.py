"""Automatic augmentation: torchvision's operations, magnitudes and frequencies, and its pixels of Pillow images."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from shardio.images import edit_images
from shardio.libraries import import_library
from shardio.transforms import AutoAugment, RandAugment, TrivialAugmentWide
from shardio.transforms.automatic import POLICIES, space_evenly
from shardio.transforms.transform import PixelTransform

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

KEYS = np.random.default_rng(0).integers(0, 2**63, 14_000, dtype=np.uint64)


def make_image(random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    height, width = random.integers(1, 60, 2).tolist()
    if random.random() < 0.3:
        width = height  # Pillow turns squares by 90 degrees in another way.
    return random.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("kind", "num_bins", "interpolation"),
    [
        *product(["RandAugment", "TrivialAugmentWide"], [2, 5, 13, 31], ["nearest"]),
        *product(["RandAugment", "TrivialAugmentWide", "AutoAugment"], [10], ["nearest", "bilinear", "bicubic"]),
    ],
)
def test_every_operation_at_every_strength_gives_torchvisions_pixels(
    kind: str, num_bins: int, interpolation: str
) -> None:
    random, settings = np.random.default_rng(num_bins), dict[str, Any](fill=[7, 250, 130], interpolation=interpolation)
    theirs, ours = v2.AutoAugment(**settings), cast(Any, AutoAugment(**settings))
    if kind == "RandAugment":
        theirs = v2.RandAugment(num_magnitude_bins=num_bins, **settings)
        ours = RandAugment(magnitude=0, num_magnitude_bins=num_bins, **settings)
    if kind == "TrivialAugmentWide":
        theirs = v2.TrivialAugmentWide(num_magnitude_bins=num_bins, **settings)
        ours = TrivialAugmentWide(num_bins, **settings)
    assert list(ours._space) == list(theirs._AUGMENTATION_SPACE)
    for number, (name, (find_magnitudes, is_signed)) in enumerate(theirs._AUGMENTATION_SPACE.items()):
        for index in range(num_bins):
            for sign in (1.0, -1.0) if is_signed else (1.0,):
                pixels = make_image(random)
                magnitudes = find_magnitudes(num_bins, *pixels.shape[:2])
                magnitude = 0.0 if magnitudes is None else sign * float(magnitudes[index])
                expected = theirs._apply_image_or_video_transform(
                    Image.fromarray(pixels), name, magnitude, theirs.interpolation, theirs._fill
                )
                sizes = np.array([pixels.shape[:2]])
                operations = ours._make(np.array([[number]]), np.array([[index]]), np.array([[sign]]), sizes)
                edit_images([pixels], operations)
                np.testing.assert_array_equal(pixels, np.array(expected), f"{name} {magnitude} {pixels.shape}")


@pytest.mark.parametrize("num_numbers", [2, 3, 10, 11, 31, 64])
@pytest.mark.parametrize("ends", [(0.0, 0.3), (1.0, 0.0), (0.0, 135.0), (0.0, 150 / 331 * 224), (0.0, 150 / 331 * 31)])
def test_numbers_are_those_of_torchs_linspace(num_numbers: int, ends: tuple[float, float]) -> None:
    expected = torch.linspace(*ends, num_numbers).tolist()
    assert (
        space_evenly(ends[0], np.full(num_numbers, ends[1]), num_numbers, np.arange(num_numbers)).tolist() == expected
    )


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_policies_are_torchvisions(policy: str) -> None:
    constant = v2.AutoAugmentPolicy(policy)
    assert list(map(tuple, POLICIES[policy])) == v2.AutoAugment(constant)._policies
    assert AutoAugment(constant).policy == policy


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_auto_augment_draws_pairs_with_their_probabilities(policy: str) -> None:
    transform = AutoAugment(policy)
    names, pairs = list(transform._space), POLICIES[policy]
    expected: dict[Any, float] = defaultdict(float)
    for pair in pairs:
        for is_applied in np.ndindex(2, 2):
            weight, what = len(KEYS) / len(pairs), []
            for (name, chance, strength), applied in zip(pair, is_applied, strict=True):
                weight *= chance if applied else 1 - chance
                what.append((name, strength or 0) if applied else None)
            expected[tuple(what)] += weight
    chosen, bins, signs = record(transform)
    assert abs(signs.mean()) < 0.03
    applied = AutoAugment(policy).draw(np.full((len(KEYS), 2), 60), KEYS)["code"] != 0
    drawn = Counter[Any](
        tuple((names[name], strength) if was else None for name, strength, was in zip(*row, strict=True))
        for row in zip(chosen.tolist(), bins.tolist(), applied.tolist(), strict=True)
    )
    assert sum((drawn[what] - count) ** 2 / count for what, count in expected.items() if count > 9) < 150


def record(transform: Any) -> tuple[Any, Any, Any]:
    """Draw for 14,000 images; return the operations, strengths and signs that are made, [n, k] each."""
    made = list[Any]()
    original = transform._make

    def note(*given: Any) -> Any:
        made.extend(given[:3])
        return original(*given)

    transform._make = note
    transform.draw(np.full((len(KEYS), 2), 8), KEYS)
    chosen, bins, signs = made
    return chosen, bins, signs


def chi_square(values: Any, count: int) -> float:
    """Return how much the frequencies of integers below ``count`` differ from equal ones."""
    frequencies, expected = np.bincount(values.reshape(-1), minlength=count), values.size / count
    return float(((frequencies - expected) ** 2 / expected).sum())


def test_trivial_augments_choices_are_uniform_and_independent() -> None:
    chosen, bins, signs = record(TrivialAugmentWide())
    assert chosen.shape == (len(KEYS), 1)
    assert chi_square(chosen, 14) < 40, "13 degrees of freedom"
    assert chi_square(bins, 31) < 65, "30 degrees of freedom"
    assert chi_square(chosen * 2 + (signs > 0), 28) < 62, "27 degrees of freedom"


def test_rand_augments_choices_are_uniform_and_independent() -> None:
    chosen, bins, signs = record(RandAugment(2, 9))
    assert chosen.shape == (len(KEYS), 2)
    assert set(bins.reshape(-1)) == {9}
    assert chi_square(chosen[:, 0] * 14 + chosen[:, 1], 196) < 265, "195 degrees of freedom"
    assert Counter((signs > 0).sum(axis=1).tolist())[1] == pytest.approx(len(KEYS) / 2, rel=0.05)


@pytest.mark.parametrize(
    "transform", [TrivialAugmentWide(), RandAugment(0), RandAugment(3, 30), AutoAugment("svhn")], ids=repr
)
def test_an_image_keeps_its_size(transform: PixelTransform) -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 14, 3), np.uint8)
    results = {transform(image).tobytes() for _ in range(30)}
    assert transform(image).shape == image.shape
    assert (len(results) > 3) == (repr(transform) != repr(RandAugment(0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrivialAugmentWide(interpolation="box"), "interpolation must be 'nearest', 'bilinear' or 'bicubic'"),
        (lambda: AutoAugment("mnist"), "policy must be one of 'imagenet', 'cifar10', 'svhn', got 'mnist'"),
        (lambda: RandAugment(magnitude=31), "magnitude must be below num_magnitude_bins=31"),
        (lambda: RandAugment(fill=[1, 2]), "fill must be a number from 0 to 255 or three"),
        (lambda: TrivialAugmentWide(1), "num_magnitude_bins"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_torchvisions_constant_is_accepted() -> None:
    sizes = np.full((len(KEYS), 2), 8)
    drawn = TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR).draw(sizes, KEYS)
    assert (drawn == TrivialAugmentWide(interpolation="bilinear").draw(sizes, KEYS)).all()
