from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardio.transforms import RandomResizedCrop, apply_transform
from tests.images import naive
from tests.transforms.inputs import make_noise, make_rng_keys, repeat_size
from tests.transforms.reference import central_crop

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 5000))


@st.composite
def _bounds(draw: st.DrawFn, low: float, high: float) -> tuple[float, float]:
    first, second = sorted(draw(st.tuples(st.floats(low, high), st.floats(low, high))))
    return first, second


@given(
    height=SIDES,
    width=SIDES,
    scale=_bounds(0.001, 1),
    ratio=_bounds(0.05, 20),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, derandomize=True, max_examples=400)
def test_boxes_lie_inside_the_image_and_keep_the_bounds_or_are_the_central_fallback(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], seed: int
) -> None:
    crop = RandomResizedCrop(8, scale, ratio)
    boxes = crop.draw(repeat_size(height, width, 20), make_rng_keys(20, seed)).tolist()
    for top, left, rows, columns in boxes:
        assert 0 <= top <= top + rows <= height
        assert 0 <= left <= left + columns <= width
        assert rows >= 1
        assert columns >= 1
        if (top, left, rows, columns) == central_crop(height, width, ratio):
            continue
        # Both sides are rounded to whole pixels.
        slack = 1 + 1e-9
        assert (rows - 0.5) * (columns - 0.5) <= scale[1] * height * width * slack
        assert (rows + 0.5) * (columns + 0.5) * slack >= scale[0] * height * width
        assert (columns - 0.5) / (rows + 0.5) <= ratio[1] * slack
        assert (columns + 0.5) / (rows - 0.5) * slack >= ratio[0]


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 9), (1, 1000), (1000, 1), (3, 1000), (1000, 3), (7, 100), (100, 7), (11, 301), (301, 11)]
)
@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.9, 1.1), (1.0, 1.0), (2.0, 3.0)])
def test_if_no_box_fits_the_crop_is_torchvisions_central_one(size: tuple[int, int], ratio: tuple[float, float]) -> None:
    """No box of these ratios and of the whole area fits into such long images."""
    crop = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=ratio)
    boxes = crop.draw(repeat_size(*size, 50), make_rng_keys(50))
    np.testing.assert_array_equal(boxes, np.tile(central_crop(*size, ratio), (50, 1)))


@pytest.mark.parametrize("size", [(100, 100), (120, 100), (100, 125)])
@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.5, 2.0)])
def test_the_fallback_is_the_whole_image_if_its_ratio_is_allowed(
    size: tuple[int, int], ratio: tuple[float, float]
) -> None:
    """The only box of the whole area is the image itself."""
    crop = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=ratio)
    np.testing.assert_array_equal(crop.draw(repeat_size(*size, 10), make_rng_keys(10)), np.tile((0, 0, *size), (10, 1)))


def test_an_images_parameters_depend_only_on_its_rng_key_and_size() -> None:
    random = np.random.default_rng(1)
    sizes, rng_keys = random.integers(1, 700, (200, 2)), make_rng_keys(200)
    crop = RandomResizedCrop(8)
    together = crop.draw(sizes, rng_keys)
    one_by_one = np.concatenate([crop.draw(sizes[i : i + 1], rng_keys[i : i + 1]) for i in range(200)])
    np.testing.assert_array_equal(together, one_by_one)
    order = random.permutation(200)
    np.testing.assert_array_equal(crop.draw(sizes[order], rng_keys[order]), together[order])
    np.testing.assert_array_equal(crop.draw(sizes, rng_keys), together)


def test_different_rng_keys_draw_different_boxes() -> None:
    boxes = RandomResizedCrop(8).draw(repeat_size(375, 500, 1000), np.arange(1000, dtype=np.uint64))
    assert len(np.unique(boxes, axis=0)) > 990


@pytest.mark.parametrize(("size", "expected"), [(16, (16, 16)), ((5, 9), (5, 9)), ([9, 5], (9, 5))])
@pytest.mark.parametrize("before", [(1, 1), (1, 30), (30, 1), (5, 9), (64, 80)])
def test_the_result_is_the_box_resized(
    before: tuple[int, int], size: int | tuple[int, int], expected: tuple[int, int]
) -> None:
    crop, images = RandomResizedCrop(size), [make_noise(*before, seed) for seed in range(8)]
    originals = [image.copy() for image in images]
    boxes = crop.draw(repeat_size(*before, 8), make_rng_keys(8)).tolist()
    results = apply_transform(crop, images, make_rng_keys(8))
    for image, original, (top, left, rows, columns), result in zip(images, originals, boxes, results, strict=True):
        assert result.dtype == np.uint8
        assert result.shape == (*expected, 3)
        box = original[top : top + rows, left : left + columns].copy()
        np.testing.assert_array_equal(result, naive.resize(box, *expected, resampling="bilinear"))
        np.testing.assert_array_equal(image, original)


@pytest.mark.parametrize("size", [0, -1, (0, 5), (5, 0), (0,), (5, 5, 5), (), "224", None, np.zeros((40, 60, 3))])
def test_a_size_must_be_one_or_two_numbers_of_pixels(size: Any) -> None:
    with pytest.raises(ValueError, match="size must be a positive integer") as caught:
        RandomResizedCrop(size)
    assert len(str(caught.value)) < 140


def test_a_size_may_consist_of_numpy_integers() -> None:
    assert RandomResizedCrop(np.int64(8)).size == (8, 8)  # type: ignore[arg-type]  # It works at run time.
    assert RandomResizedCrop([np.int64(8), 9]).size == (8, 9)  # type: ignore[list-item]  # It works at run time.


@pytest.mark.parametrize("scale", [(0, 1), (-0.1, 1), (0.5, 0.4), (0.5, 1.1), (float("nan"), 1), (0.08,), 0.5, "12"])
def test_scale_must_be_two_shares_in_order(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale"):
        RandomResizedCrop(8, scale=scale)


@pytest.mark.parametrize("ratio", [(0, 1), (-1, 1), (2, 1), (float("nan"), 1), (1, 2, 3), None])
def test_ratio_must_be_two_positive_numbers_in_order(ratio: Any) -> None:
    with pytest.raises(ValueError, match="ratio"):
        RandomResizedCrop(8, ratio=ratio)
