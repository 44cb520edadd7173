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
def _split(_context: Any, pixels: Any, at: Any, planes: Any, distance: Any, to: Any) -> Any:
    """Split adjacent pixels: write each colour to its plane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pixels, at, planes, distance, to = arguments
        joined = elements(context, builder, signature.args[0], pixels, at, 3 * LENGTH, _bytes(3 * LENGTH))
        value = builder.load(joined, align=1)
        for colour in range(3):
            part = builder.shuffle_vector(value, value, _indices(range(colour, 3 * LENGTH, 3)))
            place = elements(context, builder, signature.args[2], planes, to, LENGTH, _bytes(LENGTH))
            builder.store(part, place, align=1)
            to = builder.add(to, distance)
        return context.get_dummy_value()

    return types.void(pixels, at, planes, distance, to), generate


@intrinsic
def _join(_context: Any, planes: Any, distance: Any, at: Any, pixels: Any, to: Any) -> Any:
    """Join adjacent values of each plane to pixels."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes, distance, at, pixels, to = arguments
        parts = []
        for _ in range(3):
            place = elements(context, builder, signature.args[0], planes, at, LENGTH, _bytes(LENGTH))
            parts.append(builder.load(place, align=1))
            at = builder.add(at, distance)
        both = builder.shuffle_vector(parts[0], parts[1], _indices(range(2 * LENGTH)))
        last = builder.shuffle_vector(parts[2], parts[2], _indices(range(2 * LENGTH)))
        order = [i // 3 + i % 3 * LENGTH for i in range(3 * LENGTH)]
        place = elements(context, builder, signature.args[3], pixels, to, 3 * LENGTH, _bytes(3 * LENGTH))
        builder.store(builder.shuffle_vector(both, last, _indices(order)), place, align=1)
        return context.get_dummy_value()

    return types.void(planes, distance, at, pixels, to), generate


@kernel_function
def split_planes(pixels, num_pixels, planes):
    """Split pixels, uint8 [3 num_pixels], into planes, uint8 [3 num_pixels]."""
    distance, whole = np.uint64(num_pixels), num_pixels // LENGTH * LENGTH
    for i in range(0, whole, LENGTH):
        _split(pixels, np.uint64(3 * i), planes, distance, np.uint64(i))
    for i in range(whole, num_pixels):
        for colour in range(3):
            planes[colour * num_pixels + i] = pixels[3 * i + colour]


@kernel_function
def join_planes(planes, num_pixels, pixels):
    """Do the opposite of :func:`split_planes`."""
    distance, whole = np.uint64(num_pixels), num_pixels // LENGTH * LENGTH
    for i in range(0, whole, LENGTH):
        _join(planes, distance, np.uint64(i), pixels, np.uint64(3 * i))
    for i in range(whole, num_pixels):
        for colour in range(3):
            pixels[3 * i + colour] = planes[colour * num_pixels + i]


def _bytes(count: int) -> Any:
    return ir.VectorType(ir.IntType(8), count)


def _indices(indices: Any) -> Any:
    order = list(indices)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
