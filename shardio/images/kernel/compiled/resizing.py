"""Bilinear resizing with the pixels of OpenCV's INTER_LINEAR (resize.cpp).

OpenCV computes with integers, and weights have 11 bits. Rows are resized first and keep 7 bits more than a pixel has.
Then two of them are mixed.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.products import mix_columns, pack_pixels
from shardio.images.kernel.compiled.vectors import LENGTH, Vector, sixteen_at_once, upper_half_of_product

WEIGHT_BITS = 11
"""resize.cpp, INTER_RESIZE_COEF_BITS."""

_I, _U = np.int32, np.uint64
_ONE = np.float32(1 << WEIGHT_BITS)


@kernel_function
def find_sources(num_before, num_after, first, step, num_pixels, is_clamped, sources, weights):
    """Determine the two pixels of a row that each pixel of the resized row mixes.

    Args:
        num_before: Pixels of the row.
        num_after: Pixels of the whole resized row.
        first: The first pixel of the resized row to compute.
        step: The distance from one computed pixel to the next.
        num_pixels: The number of computed pixels. The last one is repeated.
        is_clamped: Whether the border pixel gets all the weight beyond the border, as in OpenCV's horizontal pass. In
            its vertical pass, both pixels are the border pixel there.
        sources: int64 [n], for the index of the first of the two pixels.
        weights: int32 [2, n], for their weights.
    """
    for i in range(len(sources)):
        position = _position(num_before, num_after, first + min(i, num_pixels - 1) * step)
        source = np.int64(np.floor(position))
        part = np.float32(position - np.float32(source))
        if is_clamped and source < 0:
            source, part = np.int64(0), np.float32(0)
        if is_clamped and source >= num_before - 1:
            source, part = np.int64(num_before - 1), np.float32(0)
        sources[i] = source
        weights[0, i] = _I(np.rint(np.float32(np.float32(1) - part) * _ONE))
        weights[1, i] = _I(np.rint(part * _ONE))


@kernel_function
def find_range(num_before, num_after, start, stop):
    """Return the range of pixels of a row that the pixels [start, stop) of the resized row need."""
    first = np.int64(np.floor(_position(num_before, num_after, start)))
    last = np.int64(np.floor(_position(num_before, num_after, stop - 1))) + 1
    return max(first, 0), min(last + 1, num_before)


@kernel_function
def _position(num_before, num_after, i):
    """Return the position in the row of the centre of a pixel of the resized row."""
    return np.float32((i + 0.5) * (1.0 / (num_after / num_before)) - 0.5)


@kernel_function
def resize_row(pixels, start, sources, weights, out):
    """Resize one row across.

    Args:
        pixels: uint32 [...], in :mod:`colour`'s format.
        start: The index of the row's first pixel.
        sources: int64 [n], the first of the two pixels that each pixel mixes; n is a multiple of 4.
        weights: uint32 [n], the weights of the first in the lower half, of the second in the upper half.
        out: int16 [3 n + 4], for red, green and blue of each pixel, times 128.
    """
    mix_columns(pixels, start, sources, weights, len(sources), out)


def _mix(upper: Vector, lower: Vector, upper_weight: Vector, lower_weight: Vector) -> Vector:
    above, below = upper_half_of_product(upper, upper_weight), upper_half_of_product(lower, lower_weight)
    return (above + below + 2 >> 2).low(8)


_mix_sixteen = sixteen_at_once(_mix)


@kernel_function
def mix_rows(upper, lower, upper_weight, lower_weight, out):
    """Mix two resized rows, int16 [n], by int16 weights, into a row of the result, uint8 [n]."""
    rest = len(out) % LENGTH
    for at in range(0, len(out) - rest, LENGTH):
        _mix_sixteen((upper, lower, upper_weight, lower_weight), (out,), np.uint64(at))
    for i in range(len(out) - rest, len(out)):
        above = _I(_I(_I(upper[i]) * _I(upper_weight)) >> _I(16))
        below = _I(_I(_I(lower[i]) * _I(lower_weight)) >> _I(16))
        out[i] = np.uint8(_I(_I(above + below) + _I(2)) >> _I(2))


@kernel_function
def copy_row(pixels, start, step, out):
    """Copy pixels, uint32 [...] from ``start`` on, to red, green and blue of each, uint8 [3 n]. ``step`` is 1 or -1."""
    n, i = len(out) // 3, 0
    if step == 1:
        for i in range(0, n - 5, 4):  # Four more bytes are overwritten.
            pack_pixels(pixels, _U(start + i), out, _U(3 * i))
        i = max(n - 5 + 3, 0) // 4 * 4
    for at in range(i, n):
        pixel = pixels[start + at * step]
        for colour in range(3):
            out[3 * at + colour] = np.uint8(pixel >> np.uint32(8 * colour))
