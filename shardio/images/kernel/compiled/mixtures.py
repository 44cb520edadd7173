"""Mixtures of an image and of what chains of operations make of it, as AugMix computes them: sums of 32-bit floats."""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.scalars import clamp, truncate

_F, _I = np.float32, np.int32


@kernel_function
def begin_mixture(pixels, original, total, weight):
    """Keep an image, uint8 [n], and begin its mixture, float32 [n], with a weight, float32."""
    for i in range(len(pixels)):
        original[i] = pixels[i]
        total[i] = weight * _F(_I(pixels[i]))


@kernel_function
def add_to_mixture(pixels, original, total, weight):
    """Add an image to the mixture with a weight, and return to the original."""
    for i in range(len(pixels)):
        total[i] += weight * _F(_I(pixels[i]))
        pixels[i] = original[i]


@kernel_function
def end_mixture(pixels, total):
    """Replace an image by its mixture, rounded towards 0."""
    for i in range(len(pixels)):
        pixels[i] = clamp(truncate(total[i]))
