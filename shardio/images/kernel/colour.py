"""From samples to pixels: YCbCr to RGB as libjpeg converts it (jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert).

A pixel is one number of 64 bits in which each colour has 21: red the lowest, then green, then blue. So one
multiplication weighs all three.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.memory import compiled

_I, _U = np.int32, np.uint64

# jdcolor.c: FIX(1.40200) and so on, the number times 2^16, rounded.
_CR_RED, _CB_BLUE, _CR_GREEN, _CB_GREEN = _I(91881), _I(116130), _I(46802), _I(22554)
_ROUND, _SHIFT, _CENTRE = _I(1 << 15), _I(16), _I(128)

FIELD = 21
"""Bits of a colour in a pixel."""

_GREEN, _BLUE, _WHITE = _U(FIELD), _U(2 * FIELD), _U(1 | 1 << FIELD | 1 << 2 * FIELD)


@compiled
def convert_ycc(luma, cb, cr, pixels):
    """Convert some samples.

    Args:
        luma: uint8 [n].
        cb: uint8 [n].
        cr: uint8 [n].
        pixels: uint64 [n], for the result.
    """
    for i in range(len(pixels)):
        y, blue, red = _I(luma[i]), _I(_I(cb[i]) - _CENTRE), _I(_I(cr[i]) - _CENTRE)
        r = _I(y + _I(_I(_I(red * _CR_RED) + _ROUND) >> _SHIFT))
        g = _I(y + _I(_I(_I(_ROUND - _I(blue * _CB_GREEN)) - _I(red * _CR_GREEN)) >> _SHIFT))
        b = _I(y + _I(_I(_I(blue * _CB_BLUE) + _ROUND) >> _SHIFT))
        pixels[i] = _U(_clamp(r)) | _U(_clamp(g)) << _GREEN | _U(_clamp(b)) << _BLUE


@compiled
def join_rgb(red, green, blue, pixels):
    """Join samples that are colours already, uint8 [n] each, to pixels, uint64 [n]."""
    for i in range(len(pixels)):
        pixels[i] = _U(red[i]) | _U(green[i]) << _GREEN | _U(blue[i]) << _BLUE


@compiled
def join_gray(luma, pixels):
    """Make gray samples, uint8 [n], pixels, uint64 [n]."""
    for i in range(len(pixels)):
        pixels[i] = _U(luma[i]) * _WHITE


@compiled
def _clamp(value):
    value = value if value > _I(0) else _I(0)
    return value if value < _I(255) else _I(255)
