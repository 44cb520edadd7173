"""The colours of an image as three planes: what mixes colours is then the same for each of many adjacent bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardio.images.kernel.compiled.memory import elements, kernel_function

LENGTH = 32
"""The number of pixels that are split at once."""


@intrinsic
def _split(_context: Any, pixels: Any, at: Any, red: Any, green: Any, blue: Any, to: Any) -> Any:
    """Split adjacent pixels: write each colour to its plane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pixels, at, *planes, to = arguments
        joined = elements(context, builder, signature.args[0], pixels, at, 3 * LENGTH, _bytes(3 * LENGTH))
        value = builder.load(joined, align=1)
        for colour, plane in enumerate(planes):
            part = builder.shuffle_vector(value, value, _indices(range(colour, 3 * LENGTH, 3)))
            place = elements(context, builder, signature.args[2 + colour], plane, to, LENGTH, _bytes(LENGTH))
            builder.store(part, place, align=1)
        return context.get_dummy_value()

    return types.void(pixels, at, red, green, blue, to), generate


@intrinsic
def _join(_context: Any, red: Any, green: Any, blue: Any, at: Any, pixels: Any, to: Any) -> Any:
    """Join adjacent values of each plane to pixels."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *planes, at, pixels, to = arguments
        parts = []
        for colour, plane in enumerate(planes):
            place = elements(context, builder, signature.args[colour], plane, at, LENGTH, _bytes(LENGTH))
            parts.append(builder.load(place, align=1))
        both = builder.shuffle_vector(parts[0], parts[1], _indices(range(2 * LENGTH)))
        last = builder.shuffle_vector(parts[2], parts[2], _indices(range(2 * LENGTH)))
        order = [i // 3 + i % 3 * LENGTH for i in range(3 * LENGTH)]
        place = elements(context, builder, signature.args[4], pixels, to, 3 * LENGTH, _bytes(3 * LENGTH))
        builder.store(builder.shuffle_vector(both, last, _indices(order)), place, align=1)
        return context.get_dummy_value()

    return types.void(red, green, blue, at, pixels, to), generate


@kernel_function
def split_planes(pixels, red, green, blue):
    """Split pixels, uint8 [3 n], into planes, uint8 [n]."""
    num_pixels = len(red)
    whole = num_pixels // LENGTH * LENGTH
    for i in range(0, whole, LENGTH):
        _split(pixels, np.uint64(3 * i), red, green, blue, np.uint64(i))
    for i in range(whole, num_pixels):
        red[i], green[i], blue[i] = pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2]


@kernel_function
def join_planes(red, green, blue, pixels):
    """Do the opposite of :func:`split_planes`."""
    num_pixels = len(red)
    whole = num_pixels // LENGTH * LENGTH
    for i in range(0, whole, LENGTH):
        _join(red, green, blue, np.uint64(i), pixels, np.uint64(3 * i))
    for i in range(whole, num_pixels):
        pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2] = red[i], green[i], blue[i]


def _bytes(count: int) -> Any:
    return ir.VectorType(ir.IntType(8), count)


def _indices(indices: Any) -> Any:
    order = list(indices)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
