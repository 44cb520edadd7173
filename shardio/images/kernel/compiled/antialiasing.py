"""Antialiased resizing with the pixels of Pillow (Resample.c): each new pixel is a weighted sum of all near ones.

Pillow computes weights with floating-point numbers, rounds them to 22 bits, and sums with integers. Rows are resized
first, and rounded to bytes.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.products import LOW_BITS, WEIGHT_BITS, sum_columns, sum_rows
from shardio.images.kernel.compiled.records import PILLOW_BICUBIC
from shardio.images.kernel.compiled.vectors import LENGTH

_I, _W = np.int64, np.uint32
_LOW, _16_BITS = (1 << LOW_BITS) - 1, 0xFFFF
_SHARPNESS = -0.5
"""The bicubic filter's parameter (Resample.c, bicubic_filter)."""


@kernel_function
def find_taps(num_before, num_after, first, step, num_pixels, resampling, starts, taps, repeats):
    """Determine the pixels of a row that pixels of the resized row sum, and their weights (precompute_coeffs).

    Args:
        num_before: Pixels of the row.
        num_after: Pixels of the whole resized row.
        first: The first pixel of the resized row to compute.
        step: The distance from one computed pixel to the next.
        num_pixels: The number of computed pixels. The last one is repeated.
        resampling: PILLOW_BILINEAR or PILLOW_BICUBIC.
        starts: int64 [n], for the index of the first pixel that each pixel sums.
        taps: uint32 [2, …], for the upper and the lower parts of the weights, two in each number: [pairs, n, repeats].
        repeats: How many times to write each of them.

    Returns:
        The number of pairs. It is the same for all pixels, so some of the weights are 0.
    """
    n, num_taps, scale = len(starts), _I(0), num_before / num_after
    for i in range(n):
        index = first + min(i, num_pixels - 1) * step
        start, stop = _find_reach(num_before, num_after, index, resampling)
        starts[i] = start
        num_taps = max(num_taps, stop - start)
    num_pairs = (num_taps + 1) // 2
    for i in range(n):
        index = first + min(i, num_pixels - 1) * step
        start, stop = _find_reach(num_before, num_after, index, resampling)
        centre, shrinking = (index + 0.5) * scale, 1.0 / max(scale, 1.0)
        total = 0.0
        for tap in range(start, stop):
            total += _weigh((tap - centre + 0.5) * shrinking, resampling)
        for pair in range(num_pairs):
            upper = lower = _I(0)
            for j in range(2):
                tap = start + 2 * pair + j
                if tap < stop:
                    weight = _weigh((tap - centre + 0.5) * shrinking, resampling)
                    if total != 0.0:
                        weight /= total
                    weight *= 1 << WEIGHT_BITS
                    whole = _I(weight - 0.5) if weight < 0 else _I(weight + 0.5)
                    upper |= (whole >> LOW_BITS & _16_BITS) << 16 * j
                    lower |= (whole & _LOW) << 16 * j
            at = (pair * n + i) * repeats
            for j in range(at, at + repeats):
                taps[0, j], taps[1, j] = _W(upper), _W(lower)
    return num_pairs


@kernel_function
def find_antialiased_range(num_before, num_after, start, stop, resampling):
    """Return the range of pixels of a row that the pixels [start, stop) of the resized row need."""
    first, _ = _find_reach(num_before, num_after, start, resampling)
    _, end = _find_reach(num_before, num_after, stop - 1, resampling)
    return first, end


@kernel_function
def count_pairs(num_before, num_after, resampling):
    """Return the largest number of pairs that :func:`find_taps` returns."""
    return _I(_find_support(num_before / num_after, resampling)) + 2


@kernel_function
def _find_reach(num_before, num_after, i, resampling):
    """Return the range of pixels that a pixel of the resized row sums."""
    scale = num_before / num_after
    centre, support = (i + 0.5) * scale, _find_support(scale, resampling)
    return max(_I(centre - support + 0.5), 0), min(_I(centre + support + 0.5), num_before)


@kernel_function
def _find_support(scale, resampling):
    return (2.0 if resampling == PILLOW_BICUBIC else 1.0) * max(scale, 1.0)


@kernel_function
def _weigh(x, resampling):
    """Return the weight of a pixel at a distance from the centre (bilinear_filter and bicubic_filter)."""
    x = abs(x)
    if resampling != PILLOW_BICUBIC:
        return 1.0 - x if x < 1.0 else 0.0
    if x < 1.0:
        return ((_SHARPNESS + 2.0) * x - (_SHARPNESS + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * _SHARPNESS
    return 0.0


@kernel_function
def resize_row_antialiased(pixels, start, starts, taps, num_pairs, out, to):
    """Resize one row across.

    Args:
        pixels: uint32 [...], in :mod:`colour`'s format.
        start: The index of the row's first pixel.
        starts: int64 [n], see :func:`find_taps`; n is a multiple of 4.
        taps: uint32 [2, …], see there; each four times in a row.
        num_pairs: See there.
        out: uint8 [...], for red, green and blue of each pixel. Four more are overwritten.
        to: The index of the first one.
    """
    lower = taps.shape[1]
    sum_columns(pixels, start, starts, shaped(taps, 0, taps.size), lower, num_pairs, len(starts), out, to)


@kernel_function
def sum_resized_rows(rows, start, row_step, taps, index, num_rows, num_pairs, out):
    """Sum resized rows.

    Args:
        rows: uint8 [...].
        start: The index of the first row that is added.
        row_step: The distance from one row to the next.
        taps: uint32 [2, …], see :func:`find_taps`.
        index: The index of the sum, among ``num_rows``.
        num_rows: The number of sums that ``taps`` has weights for.
        num_pairs: See there.
        out: uint8 [n], for the sums.
    """
    n, lower, at = len(out), taps.shape[1], _I(0)
    weights = shaped(taps, 0, taps.size)
    while at < n and n >= LENGTH:
        at = min(at, n - LENGTH)
        sum_rows(rows, start + at, row_step, weights, index, lower, num_rows, num_pairs, out, at)
        at += LENGTH
    for i in range(at, n):  # Of a row that is shorter than a vector.
        total = _I(1 << WEIGHT_BITS - 1)
        for pair in range(num_pairs):
            for j in range(2):
                shift = _W(16 * j)
                high = np.int16(taps[0, pair * num_rows + index] >> shift)
                weight = (_I(high) << LOW_BITS) + _I(np.int16(taps[1, pair * num_rows + index] >> shift))
                total += weight * _I(rows[start + (2 * pair + j) * row_step + i])
        out[i] = np.uint8(min(max(total >> WEIGHT_BITS, 0), 255))
