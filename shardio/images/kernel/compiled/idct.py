"""Convert coefficients to samples: dequantisation and the inverse DCT of libjpeg's ``islow`` method (jidctint.c).

The integers are those of libjpeg, bit for bit. As in libjpeg-turbo's vector code (jidctint-avx2.asm), samples out of
range become 0 or 255. That code computes in 16 bits in some places. Blocks whose numbers do not fit are reported. No
encoder writes such blocks.
"""

from __future__ import annotations

import numpy as np

from shardio.images.jpeg.standard import MAX_AC_SIZE, MAX_DC
from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.vectors import LENGTH, Vector, sixteen_at_once

_S = np.int16

_CONST_BITS, _PASS1_BITS = 13, 2

# jidctint.c: FIX_0_298631336 and so on, the number times 2^13.
_F_0_298, _F_0_390, _F_0_541, _F_0_765 = 2446, 3196, 4433, 6270
_F_0_899, _F_1_175, _F_1_501, _F_1_847 = 7373, 9633, 12299, 15137
_F_1_961, _F_2_053, _F_2_562, _F_3_072 = 16069, 16819, 20995, 25172

_HALF_RANGE = 1 << 14
"""The sum of two numbers below it fits into 16 bits."""

_MAX_AC = (1 << MAX_AC_SIZE) - 1


@kernel_function
def transform_block(coefficients, first, quantiser, between, samples, row, column, to):
    """Transform one block of each of n lanes.

    Args:
        coefficients: int16 [8, 8, lanes], by vertical and horizontal frequency.
        first: The first lane.
        quantiser: uint16 [64], in natural order.
        between: int16 [8, 8, n], for intermediate results.
        samples: uint8 [rows, columns, lanes], for the result.
        row: The block's first row there.
        column: Its first column.
        to: The first lane.

    Returns:
        Whether all numbers are in range.
    """
    for i in range(64):
        factor = np.int64(quantiser[i])
        largest = _MAX_AC if i else MAX_DC
        if factor * largest >= _HALF_RANGE:  # Only then does the actual value matter.
            largest = _largest(coefficients[i // 8, i % 8, first : first + between.shape[2]])
        if factor * largest >= _HALF_RANGE:
            return False
    for i in range(8):
        _transform_columns(coefficients, first, quantiser, between, i)
    if _largest(shaped(between, 0, between.size)) >= _HALF_RANGE:
        return False
    for i in range(8):
        _transform_rows(between, i, samples, row + i, column, to)
    return True


@kernel_function
def _largest(numbers):
    """Return the largest absolute value of int16 [n]."""
    low = high = _S(0)
    for i in range(len(numbers)):
        number = numbers[i]
        low = number if number < low else low
        high = number if number > high else high
    return max(np.int64(high), -np.int64(low))


@kernel_function
def _transform_columns(coefficients, first, quantiser, between, i):
    q0, q1, q2, q3 = _S(quantiser[i]), _S(quantiser[8 + i]), _S(quantiser[16 + i]), _S(quantiser[24 + i])
    q4, q5, q6, q7 = _S(quantiser[32 + i]), _S(quantiser[40 + i]), _S(quantiser[48 + i]), _S(quantiser[56 + i])
    c0, c1 = coefficients[0, i, first:], coefficients[1, i, first:]
    c2, c3 = coefficients[2, i, first:], coefficients[3, i, first:]
    c4, c5 = coefficients[4, i, first:], coefficients[5, i, first:]
    c6, c7 = coefficients[6, i, first:], coefficients[7, i, first:]
    b0, b1, b2, b3 = between[0, i], between[1, i], between[2, i], between[3, i]
    b4, b5, b6, b7 = between[4, i], between[5, i], between[6, i], between[7, i]
    for at in range(0, len(b0) - (LENGTH - 1), LENGTH):
        _first_pass(
            (c0, c1, c2, c3, c4, c5, c6, c7, q0, q1, q2, q3, q4, q5, q6, q7),
            (b0, b1, b2, b3, b4, b5, b6, b7),
            np.uint64(at),
        )


@kernel_function
def _transform_rows(between, i, samples, row, column, to):
    b0, b1, b2, b3 = between[i, 0], between[i, 1], between[i, 2], between[i, 3]
    b4, b5, b6, b7 = between[i, 4], between[i, 5], between[i, 6], between[i, 7]
    s0, s1 = samples[row, column, to:], samples[row, column + 1, to:]
    s2, s3 = samples[row, column + 2, to:], samples[row, column + 3, to:]
    s4, s5 = samples[row, column + 4, to:], samples[row, column + 5, to:]
    s6, s7 = samples[row, column + 6, to:], samples[row, column + 7, to:]
    for at in range(0, len(b0) - (LENGTH - 1), LENGTH):
        _second_pass((b0, b1, b2, b3, b4, b5, b6, b7), (s0, s1, s2, s3, s4, s5, s6, s7), np.uint64(at))


@sixteen_at_once
def _first_pass(*numbers: Vector) -> tuple[Vector, ...]:
    """Dequantise and transform: eight coefficients, eight quantisers."""
    dequantised = (coefficient * quantiser for coefficient, quantiser in zip(numbers[:8], numbers[8:], strict=True))
    shift = _CONST_BITS - _PASS1_BITS
    sums = _transform(*dequantised, added=1 << shift - 1)
    limit = 1 << 15  # The clamped numbers are still out of range.
    return tuple((total >> shift).clamp(-limit, limit - 1).low(16) for total in sums)


@sixteen_at_once
def _second_pass(*numbers: Vector) -> tuple[Vector, ...]:
    """Transform, and shift the level: samples are unsigned (A.3.1)."""
    shift = _CONST_BITS + _PASS1_BITS + 3
    sums = _transform(*numbers, added=(128 << shift) + (1 << shift - 1))
    return tuple((total >> shift).clamp(0, 255).low(8) for total in sums)


def _transform(
    c0: Vector, c1: Vector, c2: Vector, c3: Vector, c4: Vector, c5: Vector, c6: Vector, c7: Vector, *, added: int
) -> tuple[Vector, ...]:
    """Return the transform of eight numbers of 15 bits, times 2^13, plus ``added`` (jidctint.c).

    One instruction computes the sum of two products of 16-bit numbers. So libjpeg's terms are collected into total
    factors of each pair of numbers.
    """
    even0, even1 = ((c0 + c4).signed(32) << _CONST_BITS) + added, ((c0 - c4).signed(32) << _CONST_BITS) + added
    even2 = _two_products(c2, _F_0_541, c6, _F_0_541 - _F_1_847)
    even3 = _two_products(c2, _F_0_541 + _F_0_765, c6, _F_0_541)
    t10, t13, t11, t12 = even0 + even3, even0 - even3, even1 + even2, even1 - even2

    z3, z4 = c7 + c3, c5 + c1
    w3 = _two_products(z3, _F_1_175 - _F_1_961, z4, _F_1_175)
    w4 = _two_products(z3, _F_1_175, z4, _F_1_175 - _F_0_390)
    odd0 = _two_products(c7, _F_0_298 - _F_0_899, c1, -_F_0_899) + w3
    odd1 = _two_products(c5, _F_2_053 - _F_2_562, c3, -_F_2_562) + w4
    odd2 = _two_products(c3, _F_3_072 - _F_2_562, c5, -_F_2_562) + w3
    odd3 = _two_products(c1, _F_1_501 - _F_0_899, c7, -_F_0_899) + w4
    return t10 + odd3, t11 + odd2, t12 + odd1, t13 + odd0, t13 - odd0, t12 - odd1, t11 - odd2, t10 - odd3


def _two_products(one: Vector, its_factor: int, other: Vector, others_factor: int) -> Vector:
    return one.signed(32) * its_factor + other.signed(32) * others_factor
