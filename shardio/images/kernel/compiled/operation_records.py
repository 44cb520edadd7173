"""The records of operations on pixels, defined for both numpy and numba."""

from __future__ import annotations

import numpy as np

(
    NONE,
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    HUE,
    GRAYSCALE,
    SOLARIZE,
    POSTERIZE,
    INVERT,
    AUTOCONTRAST,
    EQUALIZE,
    SHARPNESS,
    AFFINE,
) = range(13)
"""The codes of operations. Their numbers:

=============================================  ====================================================================
BRIGHTNESS, CONTRAST, SATURATION, SHARPNESS    the factor
HUE                                            what to add to the hue, 0 to 255
SOLARIZE                                       the lowest value that is inverted, 0 to 256
POSTERIZE                                      the bits to keep, as a mask
AFFINE                                         the six numbers of the inverse matrix, then red, green and blue of the
                                               pixels outside the image
=============================================  ====================================================================
"""

MOVING = {AFFINE: (0, 1, 2, 3, 4, 5)}
"""The operations that move pixels, which masks, boxes and points follow.

For each, which of its numbers are the matrix, by rows, from places of the result to those of the original: six for an
affine one; eight for a perspective, whose ninth is 1.
"""

FILL = slice(6, 9)
"""Which of their numbers are the colour of the pixels outside the image."""

OPERATION = np.dtype([("code", np.int64), ("numbers", np.float64, 9)], align=True)
"""An operation on the pixels of one image."""

EDIT = np.dtype([("num_images", np.int64), ("num_operations", np.int64), ("rows", np.int64), ("operations", np.int64),
                 ("scratch", np.int64), ("scratch_length", np.int64)], align=True)  # fmt: skip
"""A call: the addresses of ROW [n], of OPERATION [n, k], and of uint8 [scratch_length] for temporary pixels."""

SLACK = 5120
"""How many bytes of scratch memory a call needs beyond those of its largest image."""
