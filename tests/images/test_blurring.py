"""Gaussian blur: the compiled function follows its definition in numpy to the bit, and torchvision to within 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shardio.images import make_operations
from shardio.images.editing_by_pillow import blur, edit_by_pillow
from shardio.images.kernel.compiled import operation_records as codes
from tests.images.test_editing import Pixels, edit_compiled, functional, make_image, needs_torchvision


def make_blur(radii: tuple[int, int], sigmas: tuple[float, float]) -> NDArray[np.void]:
    """Return the operation of radii and deviations down and across, OPERATION [1]."""
    down, across = (math.exp(-0.5 / sigma**2) for sigma in sigmas)
    operation: NDArray[np.void] = make_operations(1, codes.GAUSSIAN_BLUR, radii[0], down, radii[1], across)[0]
    return operation


def test_compiled_blur_gives_the_pixels_of_its_definition() -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        pixels, radii = make_image(random), (int(random.integers(0, 40)), int(random.integers(0, 40)))
        operation = make_blur(radii, (float(random.uniform(0.01, 9)), float(random.uniform(0.01, 9))))
        np.testing.assert_array_equal(edit_compiled(pixels, operation), edit_by_pillow(pixels, operation))


@needs_torchvision
def test_blurred_pixels_are_torchvisions_or_rarely_differ_by_1() -> None:
    random, num_different, num_values = np.random.default_rng(1), 0, 0
    for _ in range(150):
        pixels = make_image(random)
        radii = [int(random.integers(0, min(side, 12))) for side in pixels.shape[:2]]
        sigmas = (float(random.uniform(0.1, 4)), float(random.uniform(0.1, 4)))
        size = [2 * radii[1] + 1, 2 * radii[0] + 1]
        expected = np.array(functional.gaussian_blur(Image.fromarray(pixels), size, list(sigmas[::-1])))
        blurred = edit_compiled(pixels, make_blur((radii[0], radii[1]), sigmas))
        difference = np.abs(blurred.astype(int) - expected)
        assert difference.max() <= 1, f"{pixels.shape}, {radii}, {sigmas}"
        num_different, num_values = num_different + int(difference.sum()), num_values + difference.size
    assert num_different < num_values / 10_000


@pytest.mark.parametrize("value", [0, 1, 128, 255])
def test_a_single_colour_stays(value: int) -> None:
    image: Pixels = np.full((20, 31, 3), value, np.uint8)
    assert (edit_compiled(image, make_blur((11, 7), (3.0, 2.0))) == value).all()


def test_a_blur_is_symmetric_and_keeps_the_sum() -> None:
    image = np.zeros((31, 31, 3), np.uint8)
    image[15, 15] = 255
    image[12:19, 12:19] |= 64
    blurred = blur(image, 5, math.exp(-0.5 / 1.5**2), 5, math.exp(-0.5 / 1.5**2))
    np.testing.assert_array_equal(blurred, blurred[::-1, ::-1])
    np.testing.assert_array_equal(blurred, blurred.swapaxes(0, 1))
    assert blurred.sum() == pytest.approx(image.sum(), rel=0.02), "each pixel is rounded"


def test_weights_are_a_gaussian() -> None:
    line = np.zeros((1, 61, 3), np.uint8)
    line[0, 30] = 255
    blurred = blur(line, 0, 0.5, 15, math.exp(-0.5 / 4.0**2))[0, :, 0]
    gaussian = np.exp(-0.5 * (np.arange(-15, 16) / 4) ** 2)
    np.testing.assert_array_equal(blurred[15:46], np.rint(255 * gaussian / gaussian.sum()))
    assert not blurred[:15].any()
    assert not blurred[46:].any()
