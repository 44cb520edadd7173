"""Convert samples to pixels: YCbCr to RGB as in libjpeg (jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert).

A pixel is a 32-bit number with 8 bits per colour: red in the lowest bits, then green, then blue.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.vectors import LENGTH, Vector, sixteen_at_once, upper_half_of_product

# jdcolor.c: FIX(1.40200) and so on, the number times 2^16, rounded. Multiples of 2^16 are added or subtracted, so that
# it fits into 16 bits.
_CR_RED, _CB_BLUE = 91881 - (1 << 16), 116130 - (2 << 16)
_CR_GREEN, _CB_GREEN = (1 << 16) - 46802, -22554
_ROUND, _CENTRE = 1 << 15, 128


def _convert(luma: Vector, cb: Vector, cr: Vector) -> Vector:
    luma, cb, cr = luma.unsigned(16), cb.unsigned(16) - _CENTRE, cr.unsigned(16) - _CENTRE
    green = cb.signed(32) * _CB_GREEN + cr.signed(32) * _CR_GREEN
    return _join(
        (luma + cr + _weigh(cr, _CR_RED)).clamp(0, 255),
        (luma - cr + (green + _ROUND >> 16).low(16)).clamp(0, 255),
        (luma + cb + cb + _weigh(cb, _CB_BLUE)).clamp(0, 255),
    )


def _weigh(chroma: Vector, weight: int) -> Vector:
    """Return (chroma * weight + 2^15) >> 16. It uses upper halves of 16-bit products, which are one instruction."""
    return upper_half_of_product(chroma + chroma, weight) + 1 >> 1


def _join(red: Vector, green: Vector, blue: Vector) -> Vector:
    return (red | green << 8).unsigned(32) | blue.unsigned(32) << 16


_convert_sixteen = sixteen_at_once(_convert)
_join_sixteen = sixteen_at_once(lambda red, green, blue: _join(red.unsigned(16), green.unsigned(16), blue.unsigned(16)))


@kernel_function
def convert_ycc(luma, cb, cr, pixels):
    """Convert samples, uint8 [n] each, to pixels, uint32 [n]; n is a multiple of 16."""
    for at in range(0, len(pixels) - (LENGTH - 1), LENGTH):
        _convert_sixteen((luma, cb, cr), (pixels,), np.uint64(at))


@kernel_function
def join_colours(red, green, blue, pixels):
    """Join colours, uint8 [n] each, into pixels, uint32 [n]; n is a multiple of 16."""
    for at in range(0, len(pixels) - (LENGTH - 1), LENGTH):
        _join_sixteen((red, green, blue), (pixels,), np.uint64(at))
