"""Gaussian blur in numpy: the definition that the compiled function follows, step by step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.images.kernel.compiled.operation_records import SMALLEST_WEIGHT
from shardio.images.pixels import Pixels


def blur(image: Pixels, radius_down: float, ratio_down: float, radius_across: float, ratio_across: float) -> Pixels:
    """Return an image after a Gaussian blur, down and then across; GAUSSIAN_BLUR describes the numbers.

    Beyond the border, the image is mirrored at the centre of the border's pixels.
    """
    down = _add_neighbours(image, _weigh(int(radius_down), ratio_down))
    across = _add_neighbours(down.swapaxes(0, 1), _weigh(int(radius_across), ratio_across)).swapaxes(0, 1)
    pixels: Pixels = np.rint(across).astype(np.uint8)
    return pixels


def _add_neighbours(image: NDArray[np.generic], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weighted sums of the pixels above and below each pixel, float32, from the middle outwards."""
    radius, height = len(weights) - 1, len(image)
    padded = np.pad(image.astype(np.float32), ((radius, radius), (0, 0), (0, 0)), mode="reflect")
    total: NDArray[np.float32] = weights[0] * padded[radius : radius + height]
    for i in range(1, radius + 1):
        above, below = padded[radius - i : radius - i + height], padded[radius + i : radius + i + height]
        total = total + weights[i] * (above + below)
    return total


def _weigh(radius: int, ratio: float) -> NDArray[np.float32]:
    """Return the weights of a pixel and of those up to a radius away, without those that are too small to matter."""
    total, weight, step = 1.0, 1.0, ratio
    for _ in range(radius):
        weight, step = weight * step, step * (ratio * ratio)
        total += 2 * weight
    weights, weight, step = list[float](), 1 / total, ratio
    while len(weights) <= radius and weight >= SMALLEST_WEIGHT:
        weights.append(weight)
        weight, step = weight * step, step * (ratio * ratio)
    return np.array(weights, np.float32)
