"""Conversion of images to normalised floating-point numbers, one plane for each colour."""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.planes import split_planes

_F, _I = np.float32, np.int32
_SCALE = _F(1 / 255)


@kernel_function
def normalize_image(pixels, planes, means, deviations, result):
    """Convert an image to (value / 255 - mean) / deviation, rounded to 32 bits after each step, as torchvision does.

    Args:
        pixels: uint8 [3 n], the image.
        planes: uint8 [3 n], temporary memory.
        means: float32 [3], of red, green and blue.
        deviations: float32 [3].
        result: float32 [3 n], the planes of red, green and blue.
    """
    num_pixels = len(pixels) // 3
    red = shaped(planes, 0, (num_pixels,))
    green = shaped(planes, num_pixels, (num_pixels,))
    blue = shaped(planes, 2 * num_pixels, (num_pixels,))
    split_planes(pixels, red, green, blue)
    for colour in range(3):
        values = shaped(planes, colour * num_pixels, (num_pixels,))
        plane = shaped(result, colour * num_pixels, (num_pixels,))
        _normalize(values, means[colour], deviations[colour], plane)


@kernel_function
def _normalize(values, mean, deviation, result):
    for i in range(len(result)):
        result[i] = (_F(_I(values[i])) * _SCALE - mean) / deviation
