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
    GAUSSIAN_BLUR,
    ERASE,
    VERTICAL_FLIP,
    BEGIN_MIXTURE,
    ADD_TO_MIXTURE,
    END_MIXTURE,
) = range(20)
"""The codes of operations. Their numbers:

=============================================  ====================================================================
BRIGHTNESS, CONTRAST, SATURATION, SHARPNESS    the factor
HUE                                            what to add to the hue, 0 to 255
SOLARIZE                                       the lowest value that is inverted, 0 to 256
POSTERIZE                                      the bits to keep, as a mask
AFFINE                                         the six numbers of the inverse matrix, then red, green and blue of the
                                               pixels outside the image, and the interpolation
PERSPECTIVE                                    the same, and the two numbers of the divisor
GAUSSIAN_BLUR                                  the radius down and a ratio, then both across. Weights at distances i and
                                               i + 1 differ by the factor ratio^(2 i + 1), which is a Gaussian
ERASE                                          top, left, height and width of a part within the image, then red, green
                                               and blue
BEGIN_MIXTURE, ADD_TO_MIXTURE                  the weight of the image; the next operation gets the one at the beginning
=============================================  ====================================================================
"""

NEAREST, BILINEAR, BICUBIC = 0, 2, 3
"""How to interpolate: Pillow's numbers."""

MOVING = {AFFINE: (0, 1, 2, 3, 4, 5), PERSPECTIVE: (0, 1, 2, 3, 4, 5, 10, 11)}
"""The operations that move pixels, which masks, boxes and points follow.

For each, which of its numbers are the matrix, by rows, from places of the result to those of the original: six for an
affine one; eight for a perspective, whose ninth is 1. VERTICAL_FLIP is not among them, because crop plans have an
attribute for it.
"""

FILL = slice(6, 9)
"""Which of their numbers are the colour of the pixels outside the image."""

INTERPOLATION = 9
"""Which of their numbers is the interpolation."""

OPERATION = np.dtype([("code", np.int64), ("numbers", np.float64, 12)], align=True)
"""An operation on the pixels of one image."""

EDIT = np.dtype([("num_images", np.int64), ("num_operations", np.int64), ("rows", np.int64), ("operations", np.int64),
                 ("scratch", np.int64), ("scratch_length", np.int64)], align=True)  # fmt: skip
"""A call: the addresses of ROW [n], of OPERATION [n, k], and of uint8 [scratch_length] for temporary pixels."""

NORMALIZATION = np.dtype([("num_pixels", np.int64), ("pixels", np.int64), ("planes", np.int64), ("result", np.int64),
                          ("means", np.float32, 3), ("deviations", np.float32, 3)], align=True)  # fmt: skip
"""A conversion of an image to floating-point numbers: the addresses of uint8 [3 n] twice and of float32 [3 n]."""

BLOCK = 1024
"""How many pixels are edited together by operations that treat each pixel alone."""

SLACK = 5120 + 3 * BLOCK
"""How many bytes of scratch memory a call needs beyond those of its largest image, without mixtures and blurring."""

BLURRED_AT_ONCE = 4
"""How many pairs of rows or columns are added together when blurring."""

SMALLEST_WEIGHT = 2.0**-26
"""What is smaller than this part of a byte's range is lost when 32-bit floats are added up."""


def count_mixture_bytes(num_values: int) -> int:
    """Return how many more bytes are needed for mixtures of images up to this size."""
    return 5 * num_values + 4


def count_blur_bytes(width: int, radius: int) -> int:
    """Return how many more bytes are needed to blur images up to a width by radii up to this one."""
    return 4 * (2 * 3 * width + (2 + 6) * (radius + BLURRED_AT_ONCE))
