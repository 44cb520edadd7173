"""Colours, blurs and floating-point images: drawn as torchvision's, and its pixels."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from shardio.images.kernel.compiled import operation_records as codes
from shardio.transforms import (
    ColorJitter,
    Compose,
    GaussianBlur,
    Normalize,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomInvert,
    RandomPerspective,
    RandomPosterize,
    RandomSolarize,
    RandomVerticalFlip,
    ToDtype,
)
from tests.transforms.by_torchvision import v2
from tests.transforms.inputs import NUM_DRAWS, THRESHOLD, assert_uniform, make_noise, make_rng_keys, repeat_size

KEYS, SIZES = make_rng_keys(NUM_DRAWS), repeat_size(50, 50, NUM_DRAWS)


def test_factors_are_uniform_within_torchvisions_bounds() -> None:
    operations = ColorJitter(0.4, (0.2, 3.0), 1.5, 0.1).draw(SIZES, KEYS)
    bounds = {codes.BRIGHTNESS: (0.6, 1.4), codes.CONTRAST: (0.2, 3.0), codes.SATURATION: (0.0, 2.5)}
    for code, (low, high) in bounds.items():
        drawn = operations["numbers"][operations["code"] == code, 0]
        assert len(drawn) == NUM_DRAWS
        assert_uniform(drawn, low, high)
    hues = operations["numbers"][operations["code"] == codes.HUE, 0]
    assert_uniform(np.where(hues > 127, hues - 256, hues), -25.5, 25.5, 1 / 25)  # They are whole numbers.


def test_all_orders_are_equally_frequent() -> None:
    drawn = Counter(map(tuple, ColorJitter(0.4, 0.4, 0.4, 0.1).draw(SIZES, KEYS)["code"].tolist()))
    assert set(drawn) == set(permutations((codes.BRIGHTNESS, codes.CONTRAST, codes.SATURATION, codes.HUE)))
    each = NUM_DRAWS / 24
    assert sum((count - each) ** 2 / each for count in drawn.values()) < 60, "23 degrees of freedom"


def test_what_is_not_jittered_is_left_alone() -> None:
    operations = ColorJitter(contrast=0.4, hue=0.0).draw(SIZES, KEYS)
    assert set(np.unique(operations["code"])) == {codes.NONE, codes.CONTRAST}
    np.testing.assert_array_equal(ColorJitter()(make_noise(9, 7)), make_noise(9, 7))


RANDOM: dict[str, Any] = {
    "grayscale": RandomGrayscale,
    "invert": RandomInvert,
    "autocontrast": RandomAutocontrast,
    "equalize": RandomEqualize,
    "solarize": lambda p: RandomSolarize(130.5, p),
    "posterize": lambda p: RandomPosterize(3, p),
    "sharpness": lambda p: RandomAdjustSharpness(1.5, p),
    "perspective": lambda p: RandomPerspective(p=p),
    "erasing": RandomErasing,
    "mirrored": RandomHorizontalFlip,
    "upside down": RandomVerticalFlip,
}


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_the_probability_is_kept(name: str) -> None:
    image = 40 + make_noise(40, 30) // 2
    for p in (0.0, 0.3, 1.0):
        drawn = RANDOM[name](p).draw(SIZES, KEYS)
        changed = drawn["code"] != codes.NONE if drawn.dtype.names else drawn
        assert changed.mean() == pytest.approx(p, abs=4 * (p * (1 - p) / NUM_DRAWS) ** 0.5)
        assert p == 0.3 or (RANDOM[name](p)(image) != image).any() == bool(p)
    assert "p=0.25" in repr(RANDOM[name](0.25))


def test_blurs_are_torchvisions_with_uniform_deviations_that_are_the_same_in_both_directions() -> None:
    numbers = GaussianBlur((23, 5), (0.1, 2.0)).draw(SIZES, KEYS)["numbers"][:, 0]
    assert set(numbers[:, 0]) == {2}, "the radius down"
    assert set(numbers[:, 2]) == {11}, "the radius across"
    np.testing.assert_array_equal(numbers[:, 1], numbers[:, 3])
    assert_uniform(np.sqrt(-0.5 / np.log(numbers[:, 1])), 0.1, 2.0, THRESHOLD)
    for arguments in [(3,), ([3, 5],), (5, 1.5), ((7, 1), (0.5, 3.0))]:
        ours, theirs = GaussianBlur(*arguments), v2.GaussianBlur(*arguments)  # type: ignore[arg-type]
        assert (list(ours.kernel_size), list(ours.sigma)) == (list(theirs.kernel_size), list(theirs.sigma))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_floating_point_images_are_torchvisions_to_the_last_bit(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr("shardio.images.rendering.find_functions", lambda: None)
    to_floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for size in [(1, 1), (3, 3), (7, 33), (64, 50)]:
        image = make_noise(*size)
        expected = v2.Compose([*to_floats, v2.Normalize(MEAN, STD)])(image).numpy()
        for begin in ([ToDtype("float32", scale=True)], []):
            normalized = Compose([*begin, Normalize(MEAN, STD)])(image)
            np.testing.assert_array_equal(normalized, expected, strict=True)
        for dtype in (torch.float32, np.float32, "float32"):
            scaled = ToDtype(dtype, scale=True)(image)
            np.testing.assert_array_equal(scaled, v2.Compose(to_floats)(image).numpy(), strict=True)


def test_other_images_are_not_normalised() -> None:
    with pytest.raises(TypeError, match=r"Normalize.* takes uint8 \[height, width, 3\]"):
        Normalize(MEAN, STD)(np.zeros((4, 5, 3)))
