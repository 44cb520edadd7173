"""Resizing has OpenCV's pixels."""

from __future__ import annotations

import numpy as np
import pytest

from shardio.images import resize
from tests.images import naive
from tests.images.pictures import make_picture

SIZES = [(1, 1), (224, 224), (7, 90), (90, 7), (200, 300)]


@pytest.mark.parametrize("before", [(1, 1), (37, 53), (224, 100), (375, 500)])
@pytest.mark.parametrize("after", SIZES)
def test_resizing_is_opencvs_bilinear(before: tuple[int, int], after: tuple[int, int]) -> None:
    image = make_picture(*before)
    resized = resize(image, *after)
    assert resized.dtype == np.uint8
    np.testing.assert_array_equal(resized, naive.resize_bilinear(image, *after))


@pytest.mark.parametrize("size", SIZES)
def test_the_same_size_gives_the_same_pixels(size: tuple[int, int]) -> None:
    image = make_picture(*size)
    np.testing.assert_array_equal(resize(image, *size), image)


@pytest.mark.parametrize("after", SIZES)
def test_a_view_is_resized_like_its_copy_and_not_changed(after: tuple[int, int]) -> None:
    whole = make_picture(120, 150)
    before = whole.copy()
    view = whole[11:90, 21:140]
    np.testing.assert_array_equal(resize(view, *after), resize(view.copy(), *after))
    np.testing.assert_array_equal(whole, before)


def test_bilinear_interpolation_weighs_by_distance_between_pixel_centres() -> None:
    """At twice the width, new centres lie a quarter and three quarters of the way between old ones."""
    image = np.array([[[0] * 3, [100] * 3, [200] * 3]], dtype=np.uint8)
    assert resize(image, 1, 6)[0, :, 0].tolist() == [0, 25, 75, 125, 175, 200]


@pytest.mark.parametrize("value", [0, 1, 127, 255])
def test_a_plain_image_stays_plain(value: int) -> None:
    image = np.full((30, 40, 3), value, dtype=np.uint8)
    assert (resize(image, 67, 13) == value).all()
