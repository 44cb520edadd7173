"""Rotate images and warp them with affine and perspective transforms.

The names, arguments and distributions are torchvision's. The pixels match Pillow's, as torchvision's do for Pillow
images. torchvision rounds differently for tensors.

A warp is a rotation, an affine transform or a perspective transform. Its matrix maps each place (x, y) in the result to
the place in the original image that appears there. The matrix has six numbers, and two more for the divisor of a
perspective transform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Pixels, Sizes, make_operations
from shardio.kernel import operations as codes
from shardio.order import Words
from shardio.transforms.geometry import INTERPOLATIONS, Color, Fill, check_fill, check_interpolation
from shardio.transforms.transform import PixelTransform, Transform, between, check_probability, draw_units

__all__ = ["RandomAffine", "RandomPerspective", "RandomRotation"]

Matrix = list[float]

Point = tuple[float, float]
"""A point: x and y in pixels."""


class RandomRotation(PixelTransform):
    """Rotate images by random angles.

    Args:
        degrees: The counterclockwise angle is drawn from ``-degrees`` to ``degrees``, or within the bounds (low, high).
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        expand: Whether to enlarge each image so that all of it stays visible. The results then differ in size, and
            rotating takes longer, because Pillow does it.
        center: The fixed point, x and y in pixels; by default, the image's center.
        fill: The color of pixels outside the image: one number or three.
    """

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: object = "nearest",
        expand: bool = False,
        center: Sequence[float] | None = None,
        fill: Fill = 0,
    ) -> None:
        self.degrees = _check_bounds("degrees", degrees)
        self.interpolation = check_interpolation(interpolation)
        self.expand = expand
        self.center = _check_center(center)
        self.fill = check_fill("fill", fill)

    @property
    def is_planned(self) -> bool:
        return not self.expand and type(self).apply is RandomRotation.apply

    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        """Return the operations on n images, OPERATION [n, 1]; with ``expand``, the angles, float64 [n]."""
        angles = between(self.degrees, draw_units(rng_keys, 1)[:, 0])
        if self.expand:
            return angles
        drawn = zip(sizes.tolist(), angles.tolist(), strict=True)
        matrices = [make_rotation_matrix(height, width, angle, self.center) for (height, width), angle in drawn]
        return make_warps(matrices, self.interpolation, self.fill)

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        if not self.expand:
            return super().apply(image, parameters)
        from PIL import Image

        resampling = Image.Resampling(INTERPOLATIONS[self.interpolation])
        rotated = Image.fromarray(image).rotate(
            float(parameters), resampling, expand=True, center=self.center, fillcolor=self.fill
        )
        return np.array(rotated)

    @classmethod
    def from_torchvision(cls, theirs: Any) -> Transform | None:
        return None if theirs.expand else super().from_torchvision(theirs)


class RandomAffine(PixelTransform):
    """Rotate, move, scale and shear images at random. By default, the center of an image is the fixed point.

    Args:
        degrees: The clockwise angle is drawn from ``-degrees`` to ``degrees``, or within the bounds (low, high).
        translate: The maximum horizontal and vertical shifts, as fractions of the image's width and height, from 0 to
            1.
        scale: The bounds of the scale factor.
        shear: The angle of the shear along x is drawn from ``-shear`` to ``shear``, or within the bounds (low, high).
            With four bounds, the last two are for the shear along y.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The color of pixels outside the image: one number or three.
        center: The fixed point before the shift, x and y in pixels; by default, the image's center.
    """

    def __init__(
        self,
        degrees: float | Sequence[float],
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: float | Sequence[float] | None = None,
        interpolation: object = "nearest",
        fill: Fill = 0,
        center: Sequence[float] | None = None,
    ) -> None:
        self.degrees = _check_bounds("degrees", degrees)
        if translate is not None and not (len(translate) == 2 and all(0 <= share <= 1 for share in translate)):
            raise ValueError(f"translate must be two numbers from 0 to 1, got {translate!r}")
        if scale is not None and not (len(scale) == 2 and 0 < scale[0] <= scale[1]):
            raise ValueError(f"scale must be (low, high) with 0 < low <= high, got {scale!r}")
        self.translate, self.scale = translate, scale
        self.shear = None if shear is None else _check_bounds("shear", shear, (2, 4))
        self.interpolation = check_interpolation(interpolation)
        self.fill = check_fill("fill", fill)
        self.center = _check_center(center)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit, shear = draw_units(rng_keys, 6), (0.0, 0.0, 0.0, 0.0) if self.shear is None else self.shear
        largest = sizes[:, ::-1] * np.array(self.translate or (0.0, 0.0))
        drawn = zip(
            sizes.tolist(),
            between(self.degrees, unit[:, 0]).tolist(),
            np.rint(between((-largest, largest), unit[:, 1:3])).tolist(),
            between(self.scale or (1.0, 1.0), unit[:, 3]).tolist(),
            between(shear[:2], unit[:, 4]).tolist(),
            between(shear[2:] or (0.0, 0.0), unit[:, 5]).tolist(),
            strict=True,
        )
        matrices = [
            make_affine_matrix(self.center or (width * 0.5, height * 0.5), angle, shift, scale, (shear_x, shear_y))
            for (height, width), angle, shift, scale, shear_x, shear_y in drawn
        ]
        return make_warps(matrices, self.interpolation, self.fill)


class RandomPerspective(PixelTransform):
    """Move the corners of images inward at random; each image is changed with probability ``p``.

    An image stays unchanged if three of its moved corners are on a line, for example because the image has only one
    row. torchvision raises an error for such images.

    Args:
        distortion_scale: The maximum shift of a corner, as a fraction of half the width and height, from 0 to 1.
        p: The probability that an image is changed.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The color of pixels outside the image: one number or three.
    """

    equals_torchvisions = False

    def __init__(
        self, distortion_scale: float = 0.5, p: float = 0.5, interpolation: object = "bilinear", fill: Fill = 0
    ) -> None:
        if not 0 <= distortion_scale <= 1:
            raise ValueError(f"distortion_scale must be from 0 to 1, got {distortion_scale!r}")
        self.distortion_scale = distortion_scale
        self.p = check_probability(p)
        self.interpolation = check_interpolation(interpolation)
        self.fill = check_fill("fill", fill)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]; for unchanged images, operations that do nothing."""
        unit = draw_units(rng_keys, 9)
        counts = (self.distortion_scale * (sizes[:, ::-1] // 2)).astype(np.int64) + 1
        moves = (unit[:, 1:].reshape(-1, 4, 2) * counts[:, np.newaxis]).astype(np.int64)  # [n, corner, x and y]
        far = (sizes[:, ::-1] - counts)[:, np.newaxis] + moves
        is_far = np.array([[False, False], [True, False], [True, True], [False, True]])
        corners = np.where(is_far, far, moves).tolist()
        drawn = zip(sizes.tolist(), corners, (unit[:, 0] < self.p).tolist(), strict=True)
        matrices = [
            make_perspective_matrix(height, width, four) if is_changed else None
            for (height, width), four, is_changed in drawn
        ]
        return make_warps(matrices, self.interpolation, self.fill)


def make_warps(matrices: Sequence[Matrix | None], interpolation: str, fill: Color) -> Operations:
    """Return an affine or perspective transform for each of n images, OPERATION [n, 1].

    Args:
        matrices: The matrix for each image; None leaves the image unchanged.
        interpolation: The name of the interpolation.
        fill: The color of pixels outside the images.
    """
    operations = make_operations(len(matrices), codes.NONE)
    for operation, matrix in zip(operations[:, 0], matrices, strict=True):
        if matrix is not None:
            code = codes.AFFINE if len(matrix) == 6 else codes.PERSPECTIVE
            numbers = (*matrix[:6], *fill, INTERPOLATIONS[interpolation], *(matrix[6:] or (0, 0)))
            operation["code"], operation["numbers"] = code, numbers
    return operations


def _check_bounds(name: str, given: float | Sequence[float], lengths: tuple[int, ...] = (2,)) -> tuple[float, ...]:
    if isinstance(given, int | float):
        given = (-given, given)
    bounds = tuple(map(float, given))
    if len(bounds) not in lengths or any(low > high for low, high in zip(bounds[::2], bounds[1::2], strict=True)):
        shown = " or ".join(map(str, lengths))
        raise ValueError(f"{name} must be a non-negative number, or {shown} bounds, the lower first, got {given!r}")
    return bounds


def _check_center(center: Sequence[float] | None) -> Point | None:
    if center is None:
        return None
    if len(center) != 2:
        raise ValueError(f"center must be two numbers, x and y, got {center!r}")
    return float(center[0]), float(center[1])


def make_affine_matrix(
    center: Point, angle: float, translate: tuple[float, float], scale: float, shear: tuple[float, float]
) -> Matrix:
    """Return the matrix of torchvision's ``affine``.

    Args:
        center: The fixed point, x and y in pixels.
        angle: The angle of the rotation in degrees, clockwise.
        translate: The shift to the right and down, in pixels.
        scale: The scale factor.
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
    """Return the matrix of Pillow's ``rotate``, or None if the image stays unchanged.

    Args:
        height: The image's height.
        width: The image's width.
        angle: The angle in degrees, counterclockwise.
        center: The fixed point, x and y in pixels; by default, the image's center.
    """
    angle %= 360.0
    if angle == 0:
        return None
    radians = -math.radians(angle)
    cosine, sine = round(math.cos(radians), 15), round(math.sin(radians), 15)
    x, y = center or (width / 2, height / 2)
    return [cosine, sine, cosine * -x + sine * -y + 0.0 + x, -sine, cosine, -sine * -x + cosine * -y + 0.0 + y]


def make_perspective_matrix(height: int, width: int, corners: Sequence[tuple[int, int]]) -> Matrix | None:
    """Return the matrix of torchvision's ``perspective``, or None if three corners are on a line.

    torchvision solves eight equations and rounds the solution to 32 bits. This function rounds the exact solution in
    the same way. The results differ only where numbers that should be 0 are around 1e-14 in torchvision.

    The matrix that maps a unit square to the corners is given by a formula in integers (Heckbert, Fundamentals of
    Texture Mapping and Image Warping, 1989, section 2.2.3). The adjugate of this matrix is a multiple of its inverse.

    Args:
        height: The image's height.
        width: The image's width.
        corners: The places of the image's corners in the result, each as x and y: top left, top right, bottom right,
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
