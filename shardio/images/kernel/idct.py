"""From coefficients to samples: dequantisation and the inverse DCT of libjpeg's ``islow`` method (jidctint.c).

Its integers are those of libjpeg, bit for bit. libjpeg-turbo's vector code computes in 16 bits in some places; blocks
whose numbers would not fit there, which no encoder makes, are reported.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.memory import compiled

_I = np.int32  # numba takes int32 arithmetic to int64, unless each result is told not to.

_CONST_BITS, _PASS1_BITS = 13, 2

# jidctint.c: FIX_0_298631336 and so on, the number times 2^13.
_F_0_298, _F_0_390, _F_0_541, _F_0_765 = _I(2446), _I(3196), _I(4433), _I(6270)
_F_0_899, _F_1_175, _F_1_501, _F_1_847 = _I(7373), _I(9633), _I(12299), _I(15137)
_F_1_961, _F_2_053, _F_2_562, _F_3_072 = _I(16069), _I(16819), _I(20995), _I(25172)

_SHIFT_1 = _I(_CONST_BITS - _PASS1_BITS)
_ROUND_1 = _I(1 << (_CONST_BITS - _PASS1_BITS - 1))
_SHIFT_2 = _I(_CONST_BITS + _PASS1_BITS + 3)
_ROUND_2 = _I((1 << (_CONST_BITS + _PASS1_BITS + 2)) + (128 << (_CONST_BITS + _PASS1_BITS + 3)))  # 128: level shift.
_SCALE = _I(_CONST_BITS)

_HALF_RANGE = _I(1 << 14)
"""Sums of two numbers below it fit into 16 bits."""


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
    beyond = _I(0)
    for column in range(8):
        beyond |= _transform_columns(coefficients, quantiser, between, column)
    for row in range(8):
        _transform_rows(between, samples, margin, row)
    return (beyond & ~_I(2 * _HALF_RANGE - 1)) == 0


@compiled
def _transform_columns(coefficients, quantiser, between, i):
    q0, q1, q2, q3 = _I(quantiser[i]), _I(quantiser[8 + i]), _I(quantiser[16 + i]), _I(quantiser[24 + i])
    q4, q5, q6, q7 = _I(quantiser[32 + i]), _I(quantiser[40 + i]), _I(quantiser[48 + i]), _I(quantiser[56 + i])
    c0, c1, c2, c3 = coefficients[0, i], coefficients[1, i], coefficients[2, i], coefficients[3, i]
    c4, c5, c6, c7 = coefficients[4, i], coefficients[5, i], coefficients[6, i], coefficients[7, i]
    b0, b1, b2, b3 = between[0, i], between[1, i], between[2, i], between[3, i]
    b4, b5, b6, b7 = between[4, i], between[5, i], between[6, i], between[7, i]
    beyond = _I(0)
    for lane in range(len(c0)):
        x0, x1, x2, x3 = _I(_I(c0[lane]) * q0), _I(_I(c1[lane]) * q1), _I(_I(c2[lane]) * q2), _I(_I(c3[lane]) * q3)
        x4, x5, x6, x7 = _I(_I(c4[lane]) * q4), _I(_I(c5[lane]) * q5), _I(_I(c6[lane]) * q6), _I(_I(c7[lane]) * q7)
        beyond = _I(beyond | _I(_beyond(x0, x1, x2, x3) | _beyond(x4, x5, x6, x7)))
        y0, y1, y2, y3, y4, y5, y6, y7 = _transform_eight(x0, x1, x2, x3, x4, x5, x6, x7)
        y0, y1, y2, y3 = _descale(y0), _descale(y1), _descale(y2), _descale(y3)
        y4, y5, y6, y7 = _descale(y4), _descale(y5), _descale(y6), _descale(y7)
        beyond = _I(beyond | _I(_beyond(y0, y1, y2, y3) | _beyond(y4, y5, y6, y7)))
        b0[lane], b1[lane], b2[lane], b3[lane] = np.int16(y0), np.int16(y1), np.int16(y2), np.int16(y3)
        b4[lane], b5[lane], b6[lane], b7[lane] = np.int16(y4), np.int16(y5), np.int16(y6), np.int16(y7)
    return beyond


@compiled
def _transform_rows(between, samples, margin, i):
    b0, b1, b2, b3 = between[i, 0], between[i, 1], between[i, 2], between[i, 3]
    b4, b5, b6, b7 = between[i, 4], between[i, 5], between[i, 6], between[i, 7]
    s0, s1, s2, s3 = samples[i, 0, margin:], samples[i, 1, margin:], samples[i, 2, margin:], samples[i, 3, margin:]
    s4, s5, s6, s7 = samples[i, 4, margin:], samples[i, 5, margin:], samples[i, 6, margin:], samples[i, 7, margin:]
    for lane in range(len(b0)):
        y0, y1, y2, y3, y4, y5, y6, y7 = _transform_eight(
            *(_I(b0[lane]), _I(b1[lane]), _I(b2[lane]), _I(b3[lane])),
            *(_I(b4[lane]), _I(b5[lane]), _I(b6[lane]), _I(b7[lane])),
        )
        s0[lane], s1[lane], s2[lane], s3[lane] = _to_sample(y0), _to_sample(y1), _to_sample(y2), _to_sample(y3)
        s4[lane], s5[lane], s6[lane], s7[lane] = _to_sample(y4), _to_sample(y5), _to_sample(y6), _to_sample(y7)


@compiled
def _beyond(a, b, c, d):
    """Return a number with bits above the 15th if one of four is not in [-2^14, 2^14)."""
    return _I(_I(_I(a + _HALF_RANGE) | _I(b + _HALF_RANGE)) | _I(_I(c + _HALF_RANGE) | _I(d + _HALF_RANGE)))


@compiled
def _descale(value):
    return _I(_I(value + _ROUND_1) >> _SHIFT_1)


@compiled
def _to_sample(value):
    sample = _I(_I(value + _ROUND_2) >> _SHIFT_2)
    sample = sample if sample > _I(0) else _I(0)
    return np.uint8(sample if sample < _I(255) else _I(255))


@compiled
def _transform_eight(c0, c1, c2, c3, c4, c5, c6, c7):
    """Transform eight numbers, times 2^13 (jidctint.c, the even and the odd part)."""
    z1 = _I(_I(c2 + c6) * _F_0_541)
    even2, even3 = _I(z1 - _I(c6 * _F_1_847)), _I(z1 + _I(c2 * _F_0_765))
    even0, even1 = _I(_I(c0 + c4) << _SCALE), _I(_I(c0 - c4) << _SCALE)
    t10, t13, t11, t12 = _I(even0 + even3), _I(even0 - even3), _I(even1 + even2), _I(even1 - even2)

    z1, z2, z3, z4 = _I(c7 + c1), _I(c5 + c3), _I(c7 + c3), _I(c5 + c1)
    z5 = _I(_I(z3 + z4) * _F_1_175)
    z1, z2 = _I(-_I(z1 * _F_0_899)), _I(-_I(z2 * _F_2_562))
    z3, z4 = _I(z5 - _I(z3 * _F_1_961)), _I(z5 - _I(z4 * _F_0_390))
    odd0 = _I(_I(c7 * _F_0_298) + _I(z1 + z3))
    odd1 = _I(_I(c5 * _F_2_053) + _I(z2 + z4))
    odd2 = _I(_I(c3 * _F_3_072) + _I(z2 + z3))
    odd3 = _I(_I(c1 * _F_1_501) + _I(z1 + z4))
    return (
        *(_I(t10 + odd3), _I(t11 + odd2), _I(t12 + odd1), _I(t13 + odd0)),
        *(_I(t13 - odd0), _I(t12 - odd1), _I(t11 - odd2), _I(t10 - odd3)),
    )
