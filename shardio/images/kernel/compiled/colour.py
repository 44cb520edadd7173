"""Convert samples to pixels: YCbCr to RGB as in libjpeg (jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert).

A pixel is a 32-bit number with 8 bits per colour: red in the lowest bits, then green, then blue.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.vectors import (
    LENGTH,
    Vector,
    sixteen_in_four_columns,
    upper_half_of_product,
)

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


_convert_columns = sixteen_in_four_columns(_convert)
_join_columns = sixteen_in_four_columns(
    lambda red, green, blue: _join(red.unsigned(16), green.unsigned(16), blue.unsigned(16))
)


@kernel_function
def convert_row(luma, cb, cr, is_ycc, pixels, places, start):
    """Convert one row of each MCU, and put the pixels of each MCU side by side.

    Args:
        luma: uint8 [columns, n], the samples of each column of n MCUs: Y, or red. The number of columns is a multiple
            of 4, and n is one of 16.
        cb: The same for Cb, or green.
        cr: The same for Cr, or blue.
        is_ycc: Whether the samples are Y, Cb and Cr.
        pixels: uint32 [...], for the pixels.
        places: int64 [n], the index of each MCU's first pixel.
        start: What to add to these indices for the row.
    """
    for column in range(0, len(luma) - 3, 4):
        operands = (
            luma[column], luma[column + 1], luma[column + 2], luma[column + 3],
            cb[column], cb[column + 1], cb[column + 2], cb[column + 3],
            cr[column], cr[column + 1], cr[column + 2], cr[column + 3],
        )  # fmt: skip
        for at in range(0, luma.shape[1] - (LENGTH - 1), LENGTH):
            if is_ycc:
                _convert_columns(operands, np.uint64(at), pixels, places, np.int64(start + column))
            else:
                _join_columns(operands, np.uint64(at), pixels, places, np.int64(start + column))
