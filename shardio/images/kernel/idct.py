"""From coefficients to samples: dequantisation and the inverse DCT of libjpeg's ``islow`` method (jidctint.c).

Its integers are those of libjpeg, bit for bit. libjpeg-turbo's vector code computes in 16 bits in some places; blocks
whose numbers would not fit there, which no encoder makes, are reported.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.codes import MAX_AC_SIZE, MAX_DC
from shardio.images.kernel.memory import compiled

_S, _I = np.int16, np.int32  # numba takes all arithmetic to int64, unless each result is told not to.

_CONST_BITS, _PASS1_BITS = 13, 2

# jidctint.c: FIX_0_298631336 and so on, the number times 2^13.
_F_0_298, _F_0_390, _F_0_541, _F_0_765 = _I(2446), _I(3196), _I(4433), _I(6270)
_F_0_899, _F_1_175, _F_1_501, _F_1_847 = _I(7373), _I(9633), _I(12299), _I(15137)
_F_1_961, _F_2_053, _F_2_562, _F_3_072 = _I(16069), _I(16819), _I(20995), _I(25172)

_HALF_RANGE = 1 << 14
"""Sums of two numbers below it fit into 16 bits."""

# What is added to eight numbers before they are shifted: what rounds them; in the first pass half of the range, so that
# those in range have 15 bits and no sign; and in the second 128, libjpeg's level shift.
_SHIFT_1, _SHIFT_2 = _I(_CONST_BITS - _PASS1_BITS), _I(_CONST_BITS + _PASS1_BITS + 3)
_ADDED_1 = _I((1 << (_SHIFT_1 - 1)) + (_HALF_RANGE << _SHIFT_1))
_ADDED_2 = _I((1 << (_SHIFT_2 - 1)) + (128 << _SHIFT_2))
_SCALE = _I(_CONST_BITS)
_MAX_AC = (1 << MAX_AC_SIZE) - 1


@compiled
def transform_block(coefficients, quantiser, between, samples, margin):
    """Transform one block of each lane.

    Args:
        coefficients: int16 [8, 8, lanes], by vertical and horizontal frequency.
        quantiser: uint16 [64], in natural order.
        between: int16 [8, 8, lanes], for what comes between.
        samples: uint8 [8, 8, margin + lanes + …], for the result, by row and column.
        margin: Lanes before the first.

    Returns:
        Whether all numbers are in range.
    """
    for place in range(64):
        factor = np.int64(quantiser[place])
        largest = _MAX_AC if place else MAX_DC
        if factor * largest >= _HALF_RANGE:  # Then it is worth a look.
            largest = _largest(coefficients[place // 8, place % 8])
        if factor * largest >= _HALF_RANGE:
            return False
    beyond = _I(0)
    for column in range(8):
        beyond |= _transform_columns(coefficients, quantiser, between, column)
    for row in range(8):
        _transform_rows(between, samples, margin, row)
    return beyond < 2 * _HALF_RANGE and beyond >= 0


@compiled
def _largest(coefficients):
    """Return the largest absolute value of int16 [lanes], none of which is -2^15."""
    largest = _S(0)
    for lane in range(len(coefficients)):
        size = coefficients[lane]
        size = size if size > _S(0) else _S(-size)
        largest = largest if largest > size else size
    return np.int64(largest)


@compiled
def _transform_columns(coefficients, quantiser, between, i):
    q0, q1, q2, q3 = _S(quantiser[i]), _S(quantiser[8 + i]), _S(quantiser[16 + i]), _S(quantiser[24 + i])
    q4, q5, q6, q7 = _S(quantiser[32 + i]), _S(quantiser[40 + i]), _S(quantiser[48 + i]), _S(quantiser[56 + i])
    c0, c1, c2, c3 = coefficients[0, i], coefficients[1, i], coefficients[2, i], coefficients[3, i]
    c4, c5, c6, c7 = coefficients[4, i], coefficients[5, i], coefficients[6, i], coefficients[7, i]
    b0, b1, b2, b3 = between[0, i], between[1, i], between[2, i], between[3, i]
    b4, b5, b6, b7 = between[4, i], between[5, i], between[6, i], between[7, i]
    beyond = _I(0)
    for lane in range(len(c0)):
        y0, y1, y2, y3, y4, y5, y6, y7 = _transform_eight(
            *(_S(c0[lane] * q0), _S(c1[lane] * q1), _S(c2[lane] * q2), _S(c3[lane] * q3)),
            *(_S(c4[lane] * q4), _S(c5[lane] * q5), _S(c6[lane] * q6), _S(c7[lane] * q7)),
            *(_ADDED_1, _SHIFT_1),
        )
        beyond = _I(beyond | _I(_I(_I(y0 | y1) | _I(y2 | y3)) | _I(_I(y4 | y5) | _I(y6 | y7))))
        b0[lane], b1[lane], b2[lane], b3[lane] = _S(y0), _S(y1), _S(y2), _S(y3)
        b4[lane], b5[lane], b6[lane], b7[lane] = _S(y4), _S(y5), _S(y6), _S(y7)
    return beyond


@compiled
def _transform_rows(between, samples, margin, i):
    b0, b1, b2, b3 = between[i, 0], between[i, 1], between[i, 2], between[i, 3]
    b4, b5, b6, b7 = between[i, 4], between[i, 5], between[i, 6], between[i, 7]
    s0, s1, s2, s3 = samples[i, 0, margin:], samples[i, 1, margin:], samples[i, 2, margin:], samples[i, 3, margin:]
    s4, s5, s6, s7 = samples[i, 4, margin:], samples[i, 5, margin:], samples[i, 6, margin:], samples[i, 7, margin:]
    half = _S(_HALF_RANGE)
    for lane in range(len(b0)):
        y0, y1, y2, y3, y4, y5, y6, y7 = _transform_eight(
            *(_S(b0[lane] - half), _S(b1[lane] - half), _S(b2[lane] - half), _S(b3[lane] - half)),
            *(_S(b4[lane] - half), _S(b5[lane] - half), _S(b6[lane] - half), _S(b7[lane] - half)),
            *(_ADDED_2, _SHIFT_2),
        )
        s0[lane], s1[lane], s2[lane], s3[lane] = _clamp(y0), _clamp(y1), _clamp(y2), _clamp(y3)
        s4[lane], s5[lane], s6[lane], s7[lane] = _clamp(y4), _clamp(y5), _clamp(y6), _clamp(y7)


@compiled
def _clamp(sample):
    sample = sample if sample > _I(0) else _I(0)
    return np.uint8(sample if sample < _I(255) else _I(255))


@compiled
def _transform_eight(c0, c1, c2, c3, c4, c5, c6, c7, added, shift):
    """Transform eight numbers of 15 bits (jidctint.c, the even and the odd part).

    Returns:
        Of each result, times 2^13, (result + added) >> shift. Factors of 16 bits cost half as much as those of 32:
        that is why z3 and z4 are not added up before they are multiplied, as they are in libjpeg.
    """
    z1 = _times(_S(c2 + c6), _F_0_541)
    even2, even3 = _I(z1 - _times(c6, _F_1_847)), _I(z1 + _times(c2, _F_0_765))
    even0 = _I(_I(_I(_S(c0 + c4)) << _SCALE) + added)
    even1 = _I(_I(_I(_S(c0 - c4)) << _SCALE) + added)
    t10, t13, t11, t12 = _I(even0 + even3), _I(even0 - even3), _I(even1 + even2), _I(even1 - even2)

    z1, z2, z3, z4 = _S(c7 + c1), _S(c5 + c3), _S(c7 + c3), _S(c5 + c1)
    w3 = _I(_times(z3, _I(_F_1_175 - _F_1_961)) + _times(z4, _F_1_175))
    w4 = _I(_times(z3, _F_1_175) + _times(z4, _I(_F_1_175 - _F_0_390)))
    w1, w2 = _times(z1, _I(-_F_0_899)), _times(z2, _I(-_F_2_562))
    odd0 = _I(_times(c7, _F_0_298) + _I(w1 + w3))
    odd1 = _I(_times(c5, _F_2_053) + _I(w2 + w4))
    odd2 = _I(_times(c3, _F_3_072) + _I(w2 + w3))
    odd3 = _I(_times(c1, _F_1_501) + _I(w1 + w4))
    return (
        *(_I(_I(t10 + odd3) >> shift), _I(_I(t11 + odd2) >> shift)),
        *(_I(_I(t12 + odd1) >> shift), _I(_I(t13 + odd0) >> shift)),
        *(_I(_I(t13 - odd0) >> shift), _I(_I(t12 - odd1) >> shift)),
        *(_I(_I(t11 - odd2) >> shift), _I(_I(t10 - odd3) >> shift)),
    )


@compiled
def _times(number, factor):
    return _I(_I(number) * factor)
