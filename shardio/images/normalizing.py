"""Convert pixels to normalised floating-point numbers, by the compiled function or, without it, by numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.images.kernel import find_functions
from shardio.images.pixels import Pixels

Floats = NDArray[np.float32]


def normalize_image(pixels: Pixels, means: Floats, deviations: Floats) -> Floats:
    """Return (pixels / 255 - mean) / deviation, rounded to 32 bits after each step, float32 [3, height, width].

    Args:
        pixels: uint8 [height, width, 3].
        means: float32 [3], of red, green and blue.
        deviations: float32 [3].
    """
    functions = find_functions()
    if functions is not None:
        return functions.normalize_image(np.ascontiguousarray(pixels), means, deviations)
    scaled = pixels.transpose(2, 0, 1).astype(np.float32, order="C")
    scaled *= np.float32(1 / 255)
    return normalize_floats(scaled, means, deviations)


def normalize_floats(image: Floats, means: Floats, deviations: Floats) -> Floats:
    """Return (image - mean) / deviation, float32 [3, height, width], of an image of that form."""
    normalized: Floats = image - means[:, None, None]
    normalized /= deviations[:, None, None]
    return normalized
