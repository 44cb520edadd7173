"""From samples to pixels: YCbCr to RGB as libjpeg converts it (jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert).

A pixel is one number of 32 bits in which each colour has 8: red the lowest, then green, then blue.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.memory import compiled

_I, _U = np.int32, np.uint32

# jdcolor.c: FIX(1.40200) and so on, the number times 2^16, rounded.
_CR_RED, _CB_BLUE, _CR_GREEN, _CB_GREEN = _I(91881), _I(116130), _I(46802), _I(22554)
_ROUND, _SHIFT, _CENTRE = _I(1 << 15), _I(16), _I(128)

_GREEN, _BLUE = _U(8), _U(16)


@compiled
def convert_ycc(luma, cb, cr, colours):
    """Convert some samples.

    A loop for each colour: LLVM makes better ones of three than of one.

    Args:
        luma: uint8 [n].
        cb: uint8 [n].
        cr: uint8 [n].
        colours: uint8 [3, n], for the result: red, green, blue.
    """
    _add_chroma(luma, cr, _CR_RED, colours[0])
    _add_chromas(luma, cb, cr, colours[1])
    _add_chroma(luma, cb, _CB_BLUE, colours[2])


@compiled
def _add_chroma(luma, chroma, weight, colour):
    for i in range(len(colour)):
        weighted = _I(_I(_I(chroma[i]) - _CENTRE) * weight)
        colour[i] = _clamp(_I(_I(luma[i]) + _I(_I(weighted + _ROUND) >> _SHIFT)))


@compiled
def _add_chromas(luma, cb, cr, colour):
    for i in range(len(colour)):
        blue, red = _I(_I(cb[i]) - _CENTRE), _I(_I(cr[i]) - _CENTRE)
        weighted = _I(_I(_ROUND - _I(blue * _CB_GREEN)) - _I(red * _CR_GREEN))
        colour[i] = _clamp(_I(_I(luma[i]) + _I(weighted >> _SHIFT)))


@compiled
def _clamp(value):
    value = value if value > _I(0) else _I(0)
    return np.uint8(value if value < _I(255) else _I(255))


@compiled
def join_colours(red, green, blue, pixels):
    """Join colours, uint8 [n] each, to pixels, uint32 [n]."""
    for i in range(len(pixels)):
        pixels[i] = _U(_U(red[i]) | _U(_U(_U(green[i]) << _GREEN) | _U(_U(blue[i]) << _BLUE)))
