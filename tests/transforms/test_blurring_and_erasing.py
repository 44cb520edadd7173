"""GaussianBlur and RandomErasing: torchvision's parameters, and operations that do what these say."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from shardio.images.kernel.compiled import operation_records as codes
from shardio.libraries import import_library
from shardio.transforms import GaussianBlur, RandomErasing
from tests.transforms.inputs import make_noise, make_rng_keys, repeat_size
from tests.transforms.test_distribution import THRESHOLD, ks_distance

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

COUNT = 20_000
KEYS = make_rng_keys(COUNT)


def test_deviations_are_uniform_and_the_same_in_both_directions() -> None:
    numbers = GaussianBlur((23, 5), (0.1, 2.0)).draw(repeat_size(8, 8, COUNT), KEYS)["numbers"][:, 0]
    assert set(numbers[:, 0]) == {2}, "the radius down"
    assert set(numbers[:, 2]) == {11}, "the radius across"
    np.testing.assert_array_equal(numbers[:, 1], numbers[:, 3])
    deviations = np.sqrt(-0.5 / np.log(numbers[:, 1]))
    assert np.abs(np.sort((deviations - 0.1) / 1.9) - np.arange(COUNT) / COUNT).max() < THRESHOLD


def test_arguments_are_torchvisions() -> None:
    for arguments in [(3,), ([3, 5],), (5, 1.5), ((7, 1), (0.5, 3.0))]:
        ours, theirs = GaussianBlur(*arguments), v2.GaussianBlur(*arguments)  # type: ignore[arg-type]
        assert (list(ours.kernel_size), list(ours.sigma)) == (list(theirs.kernel_size), list(theirs.sigma))


@pytest.mark.parametrize("size", [(224, 224), (30, 90), (4, 3), (1, 1)])
def test_parts_are_drawn_as_torchvision_draws_them(size: tuple[int, int]) -> None:
    count = 4000
    torch.manual_seed(0)
    theirs, image = v2.RandomErasing(1.0), torch.zeros(3, *size)
    drawn = [theirs.make_params([image]) for _ in range(count)]
    expected = np.array([[one["i"], one["j"], one["h"], one["w"]] for one in drawn if one["v"] is not None])
    operations = RandomErasing(1.0).draw(repeat_size(*size, COUNT), KEYS)[:, 0]
    parts = operations["numbers"][operations["code"] == codes.ERASE, :4]
    assert len(parts) / COUNT == pytest.approx(len(expected) / count, abs=0.03)
    if len(expected):
        limit = 1.95 * (1 / len(expected) + 1 / len(parts)) ** 0.5
        for column in range(4):
            assert ks_distance(parts[:, column], expected[:, column]) < limit


def test_a_part_within_the_image_becomes_the_colour() -> None:
    image, transform = make_noise(40, 60), RandomErasing(1.0, value=(1, 2, 3))
    for key in make_rng_keys(20):
        (operation,) = transform.draw(repeat_size(40, 60, 1), np.array([key]))
        top, left, height, width = map(int, operation["numbers"][0, :4])
        expected = image.copy()
        expected[top : top + height, left : left + width] = (1, 2, 3)
        assert expected[top : top + height, left : left + width].shape == (height, width, 3)
        np.testing.assert_array_equal(transform.apply(image, operation), expected)


def test_images_are_erased_with_probability_p() -> None:
    for p in (0.0, 0.1, 1.0):
        operations = RandomErasing(p).draw(repeat_size(50, 50, COUNT), KEYS)
        assert (operations["code"] == codes.ERASE).mean() == pytest.approx(p, abs=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianBlur(4), "kernel_size must be an odd number or two"),
        (lambda: GaussianBlur((3, 5, 7)), "kernel_size must be an odd number or two"),
        (lambda: GaussianBlur(3, (2.0, 1.0)), "sigma must be a positive number"),
        (lambda: GaussianBlur(3, 0), "sigma must be a positive number"),
        (lambda: GaussianBlur(3, math.inf), "sigma must be a positive number"),
        (lambda: RandomErasing(2), "p must be a probability"),
        (lambda: RandomErasing(scale=(0.5, 1.5)), "scale must be"),
        (lambda: RandomErasing(ratio=(2, 1)), "ratio must be"),
        (lambda: RandomErasing(value=cast(Any, "random")), "shardio.BatchRandomErasing has random values"),
        (lambda: RandomErasing(value=(1, 2)), "value must be a number from 0 to 255"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
