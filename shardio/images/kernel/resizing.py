"""Bilinear resizing with the pixels of OpenCV's INTER_LINEAR (resize.cpp), read from wherever a pixel lies.

OpenCV weighs in whole numbers: weights are 11 bits, rows are resized first and kept with 7 bits more than a pixel has,
and then two of them are mixed. Here, rows of the source are not in order in memory, which costs nothing: a table says
where a column's pixels are.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.memory import compiled, mix_pixels
from shardio.images.kernel.vectors import LENGTH, Vector, sixteen_at_once, upper_half_of_product

WEIGHT_BITS = 11
"""resize.cpp, INTER_RESIZE_COEF_BITS."""

_I, _U = np.int32, np.uint64
_ONE = np.float32(1 << WEIGHT_BITS)


@compiled
def find_sources(num_before, num_after, first, step, is_clamped, sources, weights):
    """Say which two pixels of a row some pixels of the resized row are mixed of.

    Args:
        num_before: Pixels of the row.
        num_after: Pixels of the whole resized row.
        first: The first of those that are wanted,
        step: and from one to the next.
        is_clamped: As OpenCV does across: beyond the border, all weight is the last pixel's. Down, both are that pixel.
        sources: int64 [n], for the first of the two.
        weights: int32 [2, n], for their weights.
    """
    for i in range(len(sources)):
        place = _place(num_before, num_after, first + i * step)
        source = np.int64(np.floor(place))
        part = np.float32(place - np.float32(source))
        if is_clamped and source < 0:
            source, part = np.int64(0), np.float32(0)
        if is_clamped and source >= num_before - 1:
            source, part = np.int64(num_before - 1), np.float32(0)
        sources[i] = source
        weights[0, i] = _I(np.rint(np.float32(np.float32(1) - part) * _ONE))
        weights[1, i] = _I(np.rint(part * _ONE))


@compiled
def find_range(num_before, num_after, start, stop):
    """Return the first and behind the last pixel of a row that the pixels [start, stop) of the resized row need."""
    first = np.int64(np.floor(_place(num_before, num_after, start)))
    last = np.int64(np.floor(_place(num_before, num_after, stop - 1))) + 1
    return max(first, 0), min(last + 1, num_before)


@compiled
def _place(num_before, num_after, i):
    """Return where the centre of a pixel of the resized row lies in the row."""
    return np.float32((i + 0.5) * (1.0 / (num_after / num_before)) - 0.5)


@compiled
def resize_row(pixels, places, next_places, weights, out):
    """Resize one row across.

    Args:
        pixels: uint32 [...], as :mod:`colour` makes them, from the lane on in which the row begins.
        places: int64 [n], where the first pixel of each two lies.
        next_places: int64 [n], and the second one.
        weights: uint32 [n], of the first in the lower half, of the second in the upper one.
        out: int16 [3 n + 1], for red, green and blue of each, times 128.
    """
    for i in range(len(places)):
        mix_pixels(pixels, _U(places[i]), _U(next_places[i]), weights[i], out, _U(3 * i))


def _mix(upper: Vector, lower: Vector, upper_weight: Vector, lower_weight: Vector) -> Vector:
    above, below = upper_half_of_product(upper, upper_weight), upper_half_of_product(lower, lower_weight)
    return (above + below + 2 >> 2).low(8)


_mix_sixteen = sixteen_at_once(_mix)


@compiled
def mix_rows(upper, lower, upper_weight, lower_weight, out):
    """Mix two resized rows, int16 [n], by int16 weights, into one of pixels, uint8 [n]."""
    rest = len(out) % LENGTH
    for at in range(0, len(out) - rest, LENGTH):
        _mix_sixteen((upper, lower, upper_weight, lower_weight), (out,), np.uint64(at))
    for i in range(len(out) - rest, len(out)):
        above = _I(_I(_I(upper[i]) * _I(upper_weight)) >> _I(16))
        below = _I(_I(_I(lower[i]) * _I(lower_weight)) >> _I(16))
        out[i] = np.uint8(_I(_I(above + below) + _I(2)) >> _I(2))
