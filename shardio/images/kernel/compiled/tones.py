"""Operations on each value, or on the three colours of each pixel, with the results of Pillow.

Pillow blends two images as floating-point numbers of 32 bits, rounds towards 0, and limits the result to bytes
(Blend.c). It computes grey values with weights of 16 bits (Convert.c, L24).
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function, load_word
from shardio.images.kernel.compiled.scalars import choose, clamp, truncate

_F, _U, _I, _W = np.float32, np.uint32, np.int32, np.uint64
_RED, _GREEN, _BLUE, _HALF = _U(19595), _U(38470), _U(7471), _U(1 << 15)


@kernel_function
def blend_with(values, count, start, factor):
    """Blend the first values with a constant: brightness with 0, contrast with the mean grey.

    Args:
        values: uint8 [...].
        count: How many.
        start: float32, the constant.
        factor: float32, the weight of the values.
    """
    for i in range(count):
        values[i] = clamp(truncate(start + factor * (_F(values[i]) - start)))


@kernel_function
def sum_grey(red, green, blue, count):
    """Return the sum of the grey values of some pixels."""
    total = np.uint64(0)
    for i in range(count):
        total += np.uint64(_grey(red[i], green[i], blue[i]))
    return total


@kernel_function
def blend_with_grey(red, green, blue, count, factor):
    """Blend pixels with their grey values; ``factor``, float32, is the weight of the pixels."""
    for i in range(count):
        grey = _F(_I(_grey(red[i], green[i], blue[i])))
        red[i] = clamp(truncate(grey + factor * (_F(red[i]) - grey)))
        green[i] = clamp(truncate(grey + factor * (_F(green[i]) - grey)))
        blue[i] = clamp(truncate(grey + factor * (_F(blue[i]) - grey)))


@kernel_function
def make_grey(red, green, blue, count):
    """Replace the colours of pixels by their grey values."""
    for i in range(count):
        grey = np.uint8(_grey(red[i], green[i], blue[i]))
        red[i] = green[i] = blue[i] = grey


@kernel_function
def solarize(values, count, threshold):
    """Invert values that are not below a threshold, uint8."""
    for i in range(count):
        values[i] = choose(values[i] < threshold, values[i], np.uint8(~values[i]))


@kernel_function
def keep_bits(values, count, mask):
    """Clear the bits of values that are not in a mask, uint8."""
    for i in range(count):
        values[i] &= mask


@kernel_function
def invert(values, count):
    """Invert values."""
    for i in range(count):
        values[i] = np.uint8(~values[i])


@kernel_function
def look_up(values, count, table):
    """Replace values by those in a table, uint8 [256]. Eight are read at once."""
    for i in range(0, count - 7, 8):
        word = load_word(values, _W(i))
        for j in range(8):
            values[_W(i) + _W(j)] = table[(word >> _W(56 - 8 * j)) & _W(255)]  # numba checks the sign of others.
    for i in range(count // 8 * 8, count):
        values[i] = table[values[i]]


@kernel_function
def stretch(values, count, table):
    """Stretch values to 0 to 255, as ImageOps.autocontrast does.

    Args:
        values: uint8 [...].
        count: How many.
        table: uint8 [256], for temporary values.
    """
    lowest, highest = np.uint8(255), np.uint8(0)
    for i in range(count):
        lowest, highest = min(lowest, values[i]), max(highest, values[i])
    low, high = np.int64(lowest), np.int64(highest)
    if high <= low or (low == 0 and high == 255):
        return
    _make_stretching_table(low, high, table)
    # Integers are four times as fast as the table, and equal it for four in five pairs of lowest and highest values.
    start, factor = _U(low), _U(((255 << 16) + high - low - 1) // (high - low))
    is_equal = True
    for value in range(low, high + 1):
        is_equal = is_equal and table[value] == _multiply(np.uint8(value), start, factor)
    if is_equal:
        for i in range(count):
            values[i] = _multiply(values[i], start, factor)
    else:
        look_up(values, count, table)


@kernel_function
def _multiply(value, start, factor):
    """Return the distance of a value, uint8, from a start, times a factor of 1/2^16."""
    return np.uint8(_U(_U(_U(value) - start) * factor) >> _U(16))


@kernel_function
def _make_stretching_table(low, high, table):
    scale = 255.0 / (high - low)
    offset = -np.float64(low) * scale
    for value in range(256):
        table[value] = np.uint8(min(max(np.int64(value * scale + offset), 0), 255))


@kernel_function
def make_equalizing_table(values, count, counts, table):
    """Write a table that makes all values equally frequent, as ImageOps.equalize does; return whether they change.

    Args:
        values: uint8 [...].
        count: How many.
        counts: int32 [1024], for temporary numbers.
        table: uint8 [256].
    """
    _count_values(values, count, counts)
    last, num_values = 0, 0
    for value in range(256):
        if counts[value]:
            last, num_values = value, num_values + 1
    step = (count - counts[last]) // 255
    if num_values <= 1 or step == 0:
        return False
    total = step // 2
    for value in range(256):
        table[value] = np.uint8(min(total // step, 255))
        total += counts[value]
    return True


@kernel_function
def _count_values(values, count, counts):
    """Count how often each value occurs. Four counts of each value are added up, as equal neighbours would wait."""
    counts[:] = 0
    for i in range(0, count - 3, 4):
        for j in range(4):
            counts[256 * j + values[i + j]] += _I(1)
    for i in range(count // 4 * 4, count):
        counts[values[i]] += _I(1)
    for value in range(256):
        counts[value] += _I(_I(counts[256 + value] + counts[512 + value]) + counts[768 + value])


@kernel_function
def _grey(red, green, blue):
    return _U(_U(_U(_U(red) * _RED + _U(green) * _GREEN) + _U(_U(blue) * _BLUE + _HALF)) >> _U(16))
