"""Bilinear resizing gives the same pixels as OpenCV, even if a build of OpenCV rounds differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st

from shardio.images import resize
from shardio.images.crop_plan import is_opencv_equal, resize_bilinear
from tests.images.pictures import make_picture

sides = st.integers(1, 90)

needs_usual_opencv = pytest.mark.skipif(not is_opencv_equal(), reason="this build of OpenCV rounds differently")


@pytest.fixture
def other_opencv(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a build of OpenCV that rounds differently if both sides shrink."""
    usual = cv2.resize

    def resize_differently(image: Any, size: tuple[int, int], **options: Any) -> Any:
        resized = usual(image, size, **options)
        return resized ^ 1 if image.shape[1] > size[0] and image.shape[0] > size[1] else resized

    monkeypatch.setattr(cv2, "resize", resize_differently)
    is_opencv_equal.cache_clear()
    yield
    is_opencv_equal.cache_clear()


@needs_usual_opencv
@given(before=st.tuples(sides, sides), after=st.tuples(sides, sides), seed=st.integers(0, 1000))
def test_resizing_and_its_definition_have_the_pixels_of_opencv(
    before: tuple[int, int], after: tuple[int, int], seed: int
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (before[0] + 2, before[1] + 3, 3), np.uint8)
    view, unchanged = image[1:-1, 2:-1], image.copy()
    expected = cv2.resize(view, after[::-1], interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(resize_bilinear(view, *after), expected)
    np.testing.assert_array_equal(resize(view, *after), expected)
    np.testing.assert_array_equal(image, unchanged)


@pytest.mark.usefixtures("other_opencv")
@pytest.mark.parametrize("after", [(50, 60), (224, 224), (120, 40)])
def test_an_opencv_that_rounds_differently_is_not_used(after: tuple[int, int]) -> None:
    image, out = make_picture(100, 130), np.zeros((*after, 3), np.uint8)
    assert not is_opencv_equal()
    expected = resize_bilinear(image, *after)
    np.testing.assert_array_equal(resize(image, *after), expected)
    assert resize(image, *after, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_pixels_are_the_same_on_every_machine() -> None:
    image = np.random.default_rng(0).integers(0, 256, (123, 211, 3), np.uint8)
    digests = {(64, 100): "db68bdc57610e726", (224, 224): "c1566088ef3988c1", (200, 90): "0bc4f449d5eb8662"}
    for size, digest in digests.items():
        assert xxhash.xxh3_64_hexdigest(resize(image, *size).tobytes()) == digest
