"""Gaussian blur: each pixel becomes a weighted mean of its neighbours, down first and then across, with 32-bit floats.

The sum is added up from the middle outwards, so a computation with the same steps gives the same pixels: see
:mod:`shardio.images.editing_by_pillow`. torchvision adds up in another order, so its pixels may differ by 1.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.operation_records import BLURRED_AT_ONCE, SMALLEST_WEIGHT
from shardio.images.kernel.compiled.scalars import clamp, truncate

_F, _I = np.float32, np.int32
_ROUND = _F(12582912)
"""1.5 × 2^23. Adding it rounds a number to an integer, half to even."""


@kernel_function
def blur(before, pixels, height, width, numbers, memory):
    """Blur an image.

    Beyond the border, the image is mirrored at the centre of the border's pixels.

    Args:
        before: uint8 [3 height * width], the image.
        pixels: uint8 [3 height * width], for the result.
        height: The image's height.
        width: The image's width.
        numbers: float64 [9]: the radius and the ratio down, then across; see GAUSSIAN_BLUR.
        memory: float32 [...], for temporary numbers; see count_blur_bytes.
    """
    length = 3 * width
    down, across = np.int64(numbers[0]), np.int64(numbers[2])
    weights_down = shaped(memory, 0, (_rounded_up(down) + 1,))
    weights_across = shaped(memory, len(weights_down), (_rounded_up(across) + 1,))
    num_down = _weigh(weights_down, down, numbers[1])
    num_across = _weigh(weights_across, across, numbers[3])
    margin = 3 * num_across
    row = shaped(memory, len(weights_down) + len(weights_across), (length + 2 * margin,))
    middle = shaped(row, margin, (length,))
    total = shaped(row, len(row), (length,))
    for y in range(height):
        _scale_bytes(shaped(before, y * length, (length,)), middle, weights_down[0])
        for i in range(1, num_down + 1, BLURRED_AT_ONCE):
            _add_rows(before, height, length, y, i, weights_down, middle)
        for x in range(num_across):
            left, right = mirrored(-1 - x, width), mirrored(width + x, width)
            for colour in range(3):
                row[margin - 3 * (x + 1) + colour] = row[margin + 3 * left + colour]
                row[margin + length + 3 * x + colour] = row[margin + 3 * right + colour]
        _scale(middle, total, weights_across[0])
        for i in range(1, num_across + 1, BLURRED_AT_ONCE):
            _add_columns(row, margin, i, weights_across, total)
        _write(total, shaped(pixels, y * length, (length,)))


@kernel_function
def mirrored(place, length):
    """Return the pixel of a side that is seen at a place beyond its border."""
    if length == 1:
        return np.int64(0)
    period = 2 * (length - 1)
    place = abs(place) % period
    return min(place, period - place)


@kernel_function
def _rounded_up(radius):
    return (radius + BLURRED_AT_ONCE - 1) // BLURRED_AT_ONCE * BLURRED_AT_ONCE


@kernel_function
def _weigh(weights, radius, ratio):
    """Set the weights of a pixel and of those up to a radius away, which are 0 where they are too small to matter.

    Returns:
        How many of them count, apart from the first; a multiple of BLURRED_AT_ONCE.
    """
    total, weight, step = 1.0, 1.0, ratio
    for _ in range(radius):
        weight *= step
        step *= ratio * ratio
        total += 2 * weight
    weights[:] = 0
    weight, step, count = 1 / total, ratio, np.int64(0)
    for i in range(radius + 1):
        if weight < SMALLEST_WEIGHT:
            break
        weights[i], count = weight, i
        weight *= step
        step *= ratio * ratio
    return _rounded_up(count)


@kernel_function
def _scale_bytes(values, total, weight):
    for i in range(len(total)):
        total[i] = weight * _F(_I(values[i]))


@kernel_function
def _scale(values, total, weight):
    for i in range(len(total)):
        total[i] = weight * values[i]


@kernel_function
def _add_rows(before, height, length, y, first, weights, total):
    """Add the rows at the next distances above and below a row, from a distance of ``first`` on."""
    above0, below0 = _row(before, y - first, height, length), _row(before, y + first, height, length)
    above1, below1 = _row(before, y - first - 1, height, length), _row(before, y + first + 1, height, length)
    above2, below2 = _row(before, y - first - 2, height, length), _row(before, y + first + 2, height, length)
    above3, below3 = _row(before, y - first - 3, height, length), _row(before, y + first + 3, height, length)
    w0, w1, w2, w3 = weights[first], weights[first + 1], weights[first + 2], weights[first + 3]
    for i in range(length):
        sum_ = total[i] + w0 * _F(_I(_I(above0[i]) + _I(below0[i])))
        sum_ = sum_ + w1 * _F(_I(_I(above1[i]) + _I(below1[i])))
        sum_ = sum_ + w2 * _F(_I(_I(above2[i]) + _I(below2[i])))
        total[i] = sum_ + w3 * _F(_I(_I(above3[i]) + _I(below3[i])))


@kernel_function
def _row(before, y, height, length):
    return shaped(before, mirrored(y, height) * length, (length,))


@kernel_function
def _add_columns(row, margin, first, weights, total):
    """Add the columns at the next distances to the left and right, from a distance of ``first`` on."""
    length = len(total)
    left0, right0 = shaped(row, margin - 3 * first, (length,)), shaped(row, margin + 3 * first, (length,))
    left1, right1 = shaped(row, margin - 3 * first - 3, (length,)), shaped(row, margin + 3 * first + 3, (length,))
    left2, right2 = shaped(row, margin - 3 * first - 6, (length,)), shaped(row, margin + 3 * first + 6, (length,))
    left3, right3 = shaped(row, margin - 3 * first - 9, (length,)), shaped(row, margin + 3 * first + 9, (length,))
    w0, w1, w2, w3 = weights[first], weights[first + 1], weights[first + 2], weights[first + 3]
    for i in range(length):
        sum_ = total[i] + w0 * (left0[i] + right0[i])
        sum_ = sum_ + w1 * (left1[i] + right1[i])
        sum_ = sum_ + w2 * (left2[i] + right2[i])
        total[i] = sum_ + w3 * (left3[i] + right3[i])


@kernel_function
def _write(total, pixels):
    for i in range(len(total)):
        pixels[i] = clamp(truncate((total[i] + _ROUND) - _ROUND))
