"""The matrices of rotations and affine transforms: those of Pillow and torchvision, number by number.

A matrix has six numbers. It says which place (x, y) of the original each place of the result shows.
"""

from __future__ import annotations

import math

Matrix = list[float]


def make_affine_matrix(
    center: tuple[float, float], angle: float, translate: tuple[float, float], scale: float, shear: tuple[float, float]
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


def make_rotation_matrix(height: int, width: int, angle: float) -> Matrix | None:
    """Return the matrix of Pillow's ``rotate`` around the centre; None if the image stays as it is.

    Args:
        height: The image's height.
        width: The image's width.
        angle: The angle in degrees, counterclockwise.
    """
    angle %= 360.0
    if angle == 0:
        return None
    radians = -math.radians(angle)
    cosine, sine = round(math.cos(radians), 15), round(math.sin(radians), 15)
    x, y = width / 2, height / 2
    return [cosine, sine, cosine * -x + sine * -y + 0.0 + x, -sine, cosine, -sine * -x + cosine * -y + 0.0 + y]
