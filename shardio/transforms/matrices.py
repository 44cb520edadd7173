"""The matrices of rotations, affine and perspective transforms: those of Pillow and torchvision, number by number.

A matrix says which place (x, y) of the original each place of the result shows. It has six numbers; that of a
perspective transform has two more, those of the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Matrix = list[float]

Point = tuple[float, float]
"""A place, x and y in pixels."""


def make_affine_matrix(
    center: Point, angle: float, translate: tuple[float, float], scale: float, shear: tuple[float, float]
) -> Matrix:
    """Return the matrix of torchvision's ``affine``.

    Args:
        center: What stays at its place, x and y in pixels.
        angle: The angle of the rotation in degrees, clockwise.
        translate: The shift to the right and downwards in pixels.
        scale: The factor of the size.
        shear: The angles of the shears along x and y in degrees.
    """
    rotation, shear_x, shear_y = math.radians(angle), math.radians(shear[0]), math.radians(shear[1])
    a = math.cos(rotation - shear_y) / math.cos(shear_y)
    b = -math.cos(rotation - shear_y) * math.tan(shear_x) / math.cos(shear_y) - math.sin(rotation)
    c = math.sin(rotation - shear_y) / math.cos(shear_y)
    d = -math.sin(rotation - shear_y) * math.tan(shear_x) / math.cos(shear_y) + math.cos(rotation)
    matrix = [number / scale for number in (d, -b, 0.0, -c, a, 0.0)]
    x, y = -center[0] - translate[0], -center[1] - translate[1]
    matrix[2] += matrix[0] * x + matrix[1] * y
    matrix[5] += matrix[3] * x + matrix[4] * y
    matrix[2] += center[0]
    matrix[5] += center[1]
    return matrix


def make_rotation_matrix(height: int, width: int, angle: float, center: Point | None = None) -> Matrix | None:
    """Return the matrix of Pillow's ``rotate``; None if the image stays as it is.

    Args:
        height: The image's height.
        width: The image's width.
        angle: The angle in degrees, counterclockwise.
        center: What stays at its place; the image's centre by default.
    """
    angle %= 360.0
    if angle == 0:
        return None
    radians = -math.radians(angle)
    cosine, sine = round(math.cos(radians), 15), round(math.sin(radians), 15)
    x, y = center or (width / 2, height / 2)
    return [cosine, sine, cosine * -x + sine * -y + 0.0 + x, -sine, cosine, -sine * -x + cosine * -y + 0.0 + y]


def make_perspective_matrix(height: int, width: int, corners: Sequence[tuple[int, int]]) -> Matrix | None:
    """Return the matrix of torchvision's ``perspective``; None if there is none, as three corners are on a line.

    torchvision solves eight equations and rounds the solution to 32 bits. This is the exact solution, rounded in the
    same way. The only difference is that numbers that should be 0 are around 1e-14 in torchvision.

    The matrix from a unit square to the corners has a formula with integers (Heckbert, Fundamentals of Texture Mapping
    and Image Warping, 1989, section 2.2.3). Its adjugate is the inverse matrix, times a number.

    Args:
        height: The image's height.
        width: The image's width.
        corners: Where the image's corners are in the result, each as x and y: top left, top right, bottom right,
            bottom left.
    """
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners
    x_sum, y_sum = x0 - x1 + x2 - x3, y0 - y1 + y2 - y3
    i = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    g, h = x_sum * (y3 - y2) - (x3 - x2) * y_sum, (x1 - x2) * y_sum - x_sum * (y1 - y2)
    a, b, c = (x1 - x0) * i + g * x1, (x3 - x0) * i + h * x3, x0 * i
    d, e, f = (y1 - y0) * i + g * y1, (y3 - y0) * i + h * y3, y0 * i
    divisor = a * e - b * d
    if divisor == 0 or i == 0:
        return None
    across, down = width - 1, height - 1
    numbers = [
        *(across * (e * i - f * h), across * (c * h - b * i), across * (b * f - c * e)),
        *(down * (f * g - d * i), down * (a * i - c * g), down * (c * d - a * f)),
        *(d * h - e * g, b * g - a * h),
    ]
    return [float(np.float32(number / divisor)) for number in numbers]
