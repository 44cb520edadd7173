from __future__ import annotations

import enum
import re
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from shardio.transforms import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize, Transform, apply_transform
from tests.images import naive
from tests.transforms.inputs import make_noise, make_rng_keys, repeat_size
from tests.transforms.reference import center_crop, resized_size

SIDES = st.integers(1, 40)


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), size=st.integers(1, 1000))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_one_number_is_the_shorter_side_and_the_longer_keeps_the_proportions_rounded_down(
    height: int, width: int, size: int
) -> None:
    new_size = Resize(size).draw(repeat_size(height, width, 1), make_rng_keys(1))[0]
    assert tuple(new_size.tolist()) == resized_size(height, width, size)


@pytest.mark.parametrize(
    ("before", "size", "after"),
    [
        ((375, 500), 256, (256, 341)),
        ((500, 375), 256, (341, 256)),
        ((64, 64), 33, (33, 33)),
        ((10, 1000), 20, (20, 2000)),
        ((375, 500), (200, 30), (200, 30)),
        ((3, 5), [7, 2], (7, 2)),
    ],
)
def test_resizing_gives_opencvs_pixels_of_torchvisions_size(
    before: tuple[int, int], size: int | tuple[int, int], after: tuple[int, int]
) -> None:
    image = make_noise(*before)
    result = Resize(size)(image)
    assert result.shape == (*after, 3)
    np.testing.assert_array_equal(result, naive.resize_bilinear(image, *after))


@pytest.mark.parametrize(("before", "after"), [((64, 64), (10, 10)), ((64, 64), (32, 32)), ((375, 500), (100, 30))])
def test_halving_both_sides_averages(before: tuple[int, int], after: tuple[int, int]) -> None:
    """The nearest four pixels, which OpenCV interpolates between, would be too few."""
    image = make_noise(*before)
    np.testing.assert_array_equal(Resize(after)(image), Resize(after, antialias=True)(image))
    np.testing.assert_array_equal(Resize(after)(image), naive.resize(image, *after, resampling="antialiased bilinear"))


class InterpolationMode(enum.Enum):
    """As torchvision's."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


@pytest.mark.parametrize("mode", InterpolationMode)
@pytest.mark.parametrize("kind", [Resize, RandomResizedCrop])
def test_an_antialiased_resize_has_pillows_pixels(
    kind: type[Resize | RandomResizedCrop], mode: InterpolationMode
) -> None:
    """No crop here shrinks its height more than its width, so all versions of Pillow agree."""
    image, size = make_noise(60, 90), (40, 51)
    whole: dict[str, Any] = {"scale": (1, 1), "ratio": (1.5, 1.5)} if kind is RandomResizedCrop else {}
    for interpolation in (mode, mode.value):
        transform = kind(size, interpolation=interpolation, antialias=True, **whole)
        expected = Image.fromarray(image).resize(size[::-1], Image.Resampling[mode.name])
        np.testing.assert_array_equal(transform(image), np.asarray(expected))


@pytest.mark.parametrize("kind", [Resize, RandomResizedCrop])
def test_an_interpolation_must_be_known_and_bicubic_needs_antialiasing(kind: Any) -> None:
    with pytest.raises(ValueError, match="'bilinear' or 'bicubic', got 'nearest'"):
        kind(8, interpolation="nearest")
    with pytest.raises(ValueError, match="interpolation='bicubic' requires antialias=True"):
        kind(8, interpolation=InterpolationMode.BICUBIC)


@given(height=SIDES, width=SIDES, rows=SIDES, columns=SIDES)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_center_crop_is_torchvisions_pad_and_crop(height: int, width: int, rows: int, columns: int) -> None:
    image = make_noise(height, width)
    (left, top, right, bottom), box = center_crop(height, width, (rows, columns))
    padded = np.pad(image, ((top, bottom), (left, right), (0, 0)))
    expected = padded[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
    result = CenterCrop((rows, columns))(image)
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("length", "size", "corner"), [(10, 4, 3), (10, 5, 2), (11, 4, 4), (12, 5, 4), (9, 9, 0), (10, 9, 0), (12, 9, 2)]
)
def test_half_of_an_odd_difference_is_rounded_to_even(length: int, size: int, corner: int) -> None:
    """2.5 becomes 2, 3.5 becomes 4, 0.5 becomes 0, 1.5 becomes 2."""
    boxes = CenterCrop(size).draw(repeat_size(length, length, 1), make_rng_keys(1))
    assert boxes.tolist() == [[corner, corner, size, size]]


def test_a_smaller_image_is_padded_with_black_and_an_odd_pixel_comes_last() -> None:
    image = np.full((2, 3, 3), 255, dtype=np.uint8)
    result = CenterCrop((5, 6))(image)
    white = np.zeros((5, 6, 3), dtype=np.uint8)
    white[1:3, 1:4] = 255
    np.testing.assert_array_equal(result, white)


def test_a_probability_of_one_always_mirrors_and_zero_never_does() -> None:
    images = [make_noise(5, 7, seed) for seed in range(200)]
    mirrored = apply_transform(RandomHorizontalFlip(1.0), images, make_rng_keys(200))
    left_alone = apply_transform(RandomHorizontalFlip(0.0), images, make_rng_keys(200))
    for image, flipped, same in zip(images, mirrored, left_alone, strict=True):
        np.testing.assert_array_equal(flipped, cv2.flip(image, 1))
        np.testing.assert_array_equal(same, image)


@pytest.mark.parametrize("transform", [CenterCrop((9, 30)), RandomHorizontalFlip(0.5), Resize(12), Resize((3, 4))])
def test_an_images_parameters_depend_only_on_its_rng_key_and_size(transform: Transform) -> None:
    sizes, rng_keys = np.random.default_rng(1).integers(1, 60, (100, 2)), make_rng_keys(100)
    one_by_one = [transform.draw(sizes[i : i + 1], rng_keys[i : i + 1]) for i in range(100)]
    np.testing.assert_array_equal(transform.draw(sizes, rng_keys), np.concatenate(one_by_one))


@pytest.mark.parametrize("transform", [CenterCrop(8), CenterCrop(50), RandomHorizontalFlip(1), Resize(12)])
def test_the_input_image_is_not_changed(transform: Transform) -> None:
    image = make_noise(20, 30)
    before = image.copy()
    transform(image)
    np.testing.assert_array_equal(image, before)


def test_a_size_may_consist_of_numpy_integers() -> None:
    assert Resize(np.int64(20)).size == 20  # type: ignore[arg-type]  # It works at run time.
    assert Resize([np.int64(8), 9]).size == (8, 9)  # type: ignore[list-item]  # It works at run time.


@pytest.mark.parametrize("p", [-0.01, 1.01, float("nan")])
def test_p_must_be_a_probability(p: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        RandomHorizontalFlip(p)


@pytest.mark.parametrize("transform", [CenterCrop, Resize])
@pytest.mark.parametrize("size", [0, -3, (0, 4), (4, -1), (4, 4, 4), (), "16", 1.5])
def test_a_size_must_be_one_or_two_numbers_of_pixels(transform: type[CenterCrop | Resize], size: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape("size must be a positive integer") + f".*, got {re.escape(repr(size))}$"
    ):
        transform(size)
