"""The operations on pixels, in the form that the kernel reads."""

from __future__ import annotations

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
PERSPECTIVE                                    the numbers of AFFINE, and the two numbers of the divisor
GAUSSIAN_BLUR                                  the vertical radius and ratio, then the horizontal radius and ratio.
                                               Weights at distances i and i + 1 differ by the factor
                                               ratio^(2 i + 1), as in a Gaussian
ERASE                                          top, left, height and width of a part within the image, then red, green
                                               and blue
BEGIN_MIXTURE, ADD_TO_MIXTURE                  the weight of the image; the next operation edits the original image
=============================================  ====================================================================
"""

NEAREST, BILINEAR, BICUBIC = 0, 2, 3
"""Interpolation methods, numbered as in Pillow."""

MOVING = {AFFINE: (0, 1, 2, 3, 4, 5), PERSPECTIVE: (0, 1, 2, 3, 4, 5, 10, 11)}
"""The indices of the matrix among the numbers of each operation that moves pixels (and masks, boxes and points).

The indices follow the matrix row by row. The matrix maps places in the result to places in the original. An affine
matrix has six numbers. A perspective matrix has eight numbers; a ninth would always be 1. VERTICAL_FLIP is missing,
because crop plans have an attribute for it.
"""

FILL = slice(6, 9)
"""The indices of the fill color (for pixels outside the image) among the numbers of AFFINE and PERSPECTIVE."""

INTERPOLATION = 9
"""The index of the interpolation method among the numbers of AFFINE and PERSPECTIVE."""

SLACK = 128
"""The bytes of scratch memory that a call needs in addition to those for its largest image, mixtures and blurs."""


def count_mixture_bytes(num_values: int) -> int:
    """Return how many more bytes a call needs for mixtures, given the number of values in its largest image."""
    return 5 * num_values + 4


def count_blur_bytes(width: int, radius: int) -> int:
    """Return how many more bytes a call needs for blurs, given the width of the widest image and the largest radius."""
    return 4 * (3 * width + 8 * radius + 2)
