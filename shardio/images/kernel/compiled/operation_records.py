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
    PERSPECTIVE,
) = range(14)
"""The codes of operations. Their numbers:

=============================================  ====================================================================
BRIGHTNESS, CONTRAST, SATURATION, SHARPNESS    the factor
HUE                                            what to add to the hue, 0 to 255
SOLARIZE                                       the lowest value that is inverted, 0 to 256
POSTERIZE                                      the bits to keep, as a mask
AFFINE                                         the six numbers of the inverse matrix, then red, green and blue of the
                                               pixels outside the image, and the interpolation
PERSPECTIVE                                    the same, and the two numbers of the divisor
=============================================  ====================================================================
"""

NEAREST, BILINEAR, BICUBIC = 0, 2, 3
"""How to interpolate: Pillow's numbers."""

OPERATION = np.dtype([("code", np.int64), ("numbers", np.float64, 12)], align=True)
"""An operation on the pixels of one image."""

EDIT = np.dtype([("num_images", np.int64), ("num_operations", np.int64), ("rows", np.int64), ("operations", np.int64),
                 ("scratch", np.int64), ("scratch_length", np.int64)], align=True)  # fmt: skip
"""A call: the addresses of ROW [n], of OPERATION [n, k], and of uint8 [scratch_length] for temporary pixels."""

SLACK = 5120
"""How many bytes of scratch memory a call needs beyond those of its largest image."""
