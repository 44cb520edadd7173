"""Recolour, blur, erase, warp and convert images, with torchvision's names, arguments and distributions.

The pixels equal Pillow's, as in torchvision on Pillow images. torchvision rounds differently for tensors.

A warp is a rotation, an affine or a perspective transform. Its matrix maps each place (x, y) of the result to the place
of the original image that appears there. The matrix has six numbers. The matrix of a perspective transform has two
more, for the divisor.

Most programs need no conversion: DevicePrefetcher converts and normalises on the device, so images cross the bus as
uint8, which is a quarter of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Pixels, Sizes, make_operations, normalize_floats, normalize_image
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.geometry import (
    INTERPOLATIONS,
    NUM_TRIES,
    Colour,
    Fill,
    check_fill,
    check_interpolation,
    check_part,
    draw_sides,
    take_first,
)
from shardio.transforms.transform import (
    Bounds,
    PixelTransform,
    RandomPixelTransform,
    Transform,
    as_pixels,
    between,
    check_probability,
    draw_units,
    to_integers,
)

__all__ = ["ColorJitter", "GaussianBlur", "Normalize", "RandomAdjustSharpness", "RandomAffine", "RandomAutocontrast"]
__all__ += ["RandomEqualize", "RandomErasing", "RandomGrayscale", "RandomInvert", "RandomPerspective"]
__all__ += ["RandomPosterize", "RandomRotation", "RandomSolarize", "ToDtype"]

MAX_FACTOR = 4096.0
"""The largest factor. Larger factors give the same pixels, because every value that they change is 0 or 255."""

Matrix = list[float]

Point = tuple[float, float]
"""A place, x and y in pixels."""


class ColorJitter(PixelTransform):
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    Args:
        brightness: The factor is drawn from ``max(0, 1 - brightness)`` to ``1 + brightness``, or from given bounds
            (low, high). None or 0 changes nothing.
        contrast: The same for contrast.
        saturation: The same for saturation.
        hue: The shift is drawn from ``-hue`` to ``hue``, or from given bounds, within -0.5 to 0.5 of the circle.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] | None = None,
        contrast: float | Sequence[float] | None = None,
        saturation: float | Sequence[float] | None = None,
        hue: float | Sequence[float] | None = None,
    ) -> None:
        self.brightness = _check_range("brightness", brightness)
        self.contrast = _check_range("contrast", contrast)
        self.saturation = _check_range("saturation", saturation)
        self.hue = _check_range("hue", hue, center=0.0, bounds=(-0.5, 0.5))

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 4]."""
        unit = draw_units(rng_keys, 8)
        factors = {codes.BRIGHTNESS: self.brightness, codes.CONTRAST: self.contrast, codes.SATURATION: self.saturation}
        operations = [make_operations(len(sizes), codes.NONE) for _ in range(4)]
        for i, (code, bounds) in enumerate(factors.items()):
            if bounds is not None:
                operations[i] = make_operations(len(sizes), code, np.minimum(between(bounds, unit[:, i]), MAX_FACTOR))
        if self.hue is not None:
            hue = np.trunc(between(self.hue, unit[:, 3]) * 255) % 256
            operations[3] = make_operations(len(sizes), codes.HUE, hue)
        return np.take_along_axis(np.concatenate(operations, axis=1), np.argsort(unit[:, 4:], axis=1), axis=1)


def _check_range(
    name: str, given: float | Sequence[float] | None, center: float = 1.0, bounds: Bounds = (0.0, math.inf)
) -> Bounds | None:
    if given is None:
        return None
    if isinstance(given, int | float) and given >= 0:
        low, high = max(center - given, 0.0) if center else -float(given), float(center + given)
    elif isinstance(given, Sequence) and len(given) == 2:
        low, high = float(given[0]), float(given[1])
    else:
        raise ValueError(f"{name} must be a number that is not negative or (low, high), got {given!r}")
    if not bounds[0] <= low <= high <= bounds[1]:
        raise ValueError(f"{name} must be from {bounds[0]} to {bounds[1]}, the lower bound first, got {given!r}")
    return None if low == high == center else (low, high)


class RandomGrayscale(RandomPixelTransform):
    """Make images gray, each with probability ``p``. They keep three channels."""

    code = codes.GRAYSCALE

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)


class RandomInvert(RandomPixelTransform):
    """Invert the colours of images, each with probability ``p``."""

    code = codes.INVERT


class RandomAutocontrast(RandomPixelTransform):
    """Stretch each colour to the range from 0 to 255, in each image with probability ``p``."""

    code = codes.AUTOCONTRAST


class RandomEqualize(RandomPixelTransform):
    """Make all values of each colour equally frequent, in each image with probability ``p``."""

    code = codes.EQUALIZE


class RandomSolarize(RandomPixelTransform):
    """Invert all values that are not below a threshold, in each image with probability ``p``."""

    code = codes.SOLARIZE

    def __init__(self, threshold: float, p: float = 0.5) -> None:
        super().__init__(p)
        self.threshold = threshold

    @property
    def numbers(self) -> tuple[float, ...]:
        """The lowest value that is inverted."""
        return (float(min(max(math.ceil(self.threshold), 0), 256)),)


class RandomPosterize(RandomPixelTransform):
    """Keep only the highest bits of each value, 0 to 8, in each image with probability ``p``."""

    code = codes.POSTERIZE

    def __init__(self, bits: int, p: float = 0.5) -> None:
        super().__init__(p)
        if bits not in range(9):
            raise ValueError(f"bits must be from 0 to 8, got {bits!r}")
        self.bits = bits

    @property
    def numbers(self) -> tuple[float, ...]:
        """The bits as a mask."""
        return (float(mask_of(self.bits)),)


def mask_of(bits: int) -> int:
    """Return a byte whose highest bits are set."""
    return 256 - (1 << 8 - bits)


class RandomAdjustSharpness(RandomPixelTransform):
    """Blur (0 to 1) or sharpen (above 1) images by a factor, each with probability ``p``."""

    code = codes.SHARPNESS

    def __init__(self, sharpness_factor: float, p: float = 0.5) -> None:
        super().__init__(p)
        if not sharpness_factor >= 0:
            raise ValueError(f"sharpness_factor must not be negative, got {sharpness_factor}")
        self.sharpness_factor = sharpness_factor

    @property
    def numbers(self) -> tuple[float, ...]:
        """The factor."""
        return (min(float(self.sharpness_factor), MAX_FACTOR),)


class GaussianBlur(PixelTransform):
    """Blur images by a Gaussian of random width.

    Some pixels may differ by 1 from torchvision's, because torchvision adds the products in another order. Images may
    be smaller than the kernel; torchvision refuses such images.

    Args:
        kernel_size: The size of the kernel in pixels: an odd number, or two, for the width and the height.
        sigma: The bounds (low, high) of the standard deviation in pixels, or the deviation itself.
    """

    equals_torchvisions = False

    def __init__(self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)) -> None:
        sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        sizes = sizes * 2 if len(sizes) == 1 else sizes
        if len(sizes) != 2 or not all(size > 0 and size % 2 == 1 for size in sizes):
            raise ValueError(f"kernel_size must be an odd number or two (width, height), got {kernel_size!r}")
        bounds = (sigma, sigma) if isinstance(sigma, int | float) else tuple(sigma)
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] < math.inf:
            raise ValueError(f"sigma must be a positive number or (low, high), the lower bound first, got {sigma!r}")
        self.kernel_size, self.sigma = (sizes[0], sizes[1]), (float(bounds[0]), float(bounds[1]))

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        deviations = between(self.sigma, draw_units(rng_keys, 1)[:, 0])
        # Not np.exp, whose last bit may depend on the processor.
        ratios = np.array([math.exp(-0.5 / deviation**2) for deviation in deviations.tolist()])
        width, height = self.kernel_size
        return make_operations(len(sizes), codes.GAUSSIAN_BLUR, height // 2, ratios, width // 2, ratios)


class RandomErasing(PixelTransform):
    """Fill a random part of an image with one colour, with probability ``p``.

    This transform acts on bytes. torchvision's recipes erase normalised images instead, where 0 is the mean colour: use
    ``shardio.BatchRandomErasing`` for that, or the mean colour as ``value``.

    Args:
        p: The probability that an image is changed.
        scale: The lower and upper bounds of the part's share of the image's area.
        ratio: The lower and upper bounds of the part's height / width, drawn uniformly on a logarithmic scale.
        value: The colour: one number from 0 to 255, or three.
        inplace: Accepted as in torchvision, without effect: the input is never changed.
    """

    equals_torchvisions = False

    def __init__(
        self,
        p: float = 0.5,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        value: Fill = 0.0,
        inplace: bool = False,
    ) -> None:
        self.p = check_probability(p)
        self.scale, self.ratio = check_part(scale, ratio)
        if isinstance(value, str):
            raise ValueError(f"value must be a colour, got {value!r}: shardio.BatchRandomErasing has random values")
        self.value = value
        self._colour = check_fill("value", value)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit = draw_units(rng_keys, 2 * NUM_TRIES + 3)
        heights, widths = draw_sides(sizes, unit, self.scale, (math.log(self.ratio[0]), math.log(self.ratio[1])))
        fits = (heights < sizes[:, :1]) & (widths < sizes[:, 1:])
        parts = take_first(fits, heights, widths)
        corners = to_integers(unit[:, -3:-1], np.maximum(sizes - parts + 1, 1))
        operations = make_operations(len(sizes), codes.ERASE, *corners.T, *parts.T, *self._colour)
        operations["code"][~((unit[:, -1] < self.p) & fits.any(axis=1))] = codes.NONE
        return operations


_ZERO, _ONE = np.zeros(3, np.float32), np.ones(3, np.float32)


class _Conversion(Transform):
    equals_torchvisions = False

    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        return np.zeros((len(sizes), 0))


class ToDtype(_Conversion):
    """Convert images to float32 [3, height, width], from 0 to 1.

    A batch is a tensor float32 [N, 3, height, width].

    Args:
        dtype: float32: torch's, numpy's, or the name.
        scale: Must be True. For values from 0 to 255, use ``DevicePrefetcher(dtype=torch.float32)``.
    """

    def __init__(self, dtype: Any = "float32", scale: bool = False) -> None:
        name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
        if name != "float32" or not scale:
            raise ValueError(
                f"ToDtype makes float32 images from 0 to 1, got dtype={dtype!r}, scale={scale!r}: write "
                "ToDtype(torch.float32, scale=True), or convert on the device, with DevicePrefetcher(dtype=...)"
            )
        self.dtype, self.scale = name, True

    def apply(self, image: Any, parameters: Any) -> Any:
        return normalize_image(image, _ZERO, _ONE)

    def __repr__(self) -> str:
        return "ToDtype(float32, scale=True)"


class Normalize(_Conversion):
    """Normalise images to (image - mean) / std, float32 [3, height, width].

    Pixels, uint8 [height, width, 3], are scaled to 0 to 1 first. A batch is a tensor float32 [N, 3, height, width].

    Args:
        mean: The mean of red, green and blue, for pixels from 0 to 1.
        std: The standard deviation of red, green and blue.
        inplace: Accepted as in torchvision, without effect: the input is never changed.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"mean and std must have three numbers each, got {mean!r} and {std!r}")
        if not all(deviation > 0 for deviation in std):
            raise ValueError(f"std must be positive, got {std!r}")
        self.mean, self.std = list(mean), list(std)
        self._mean, self._std = np.array(mean, np.float32), np.array(std, np.float32)

    def as_input(self, image: Any) -> Any:
        """Return a float image, such as a result of ToDtype, as it is, and any other image as pixels."""
        return image if _is_float_image(image) else as_pixels(self, image)

    def apply(self, image: Any, parameters: Any) -> Any:
        normalize = normalize_floats if _is_float_image(image) else normalize_image
        return normalize(image, self._mean, self._std)


def _is_float_image(image: Any) -> bool:
    return isinstance(image, np.ndarray) and image.dtype == np.float32 and image.ndim == 3 and len(image) == 3


class RandomRotation(PixelTransform):
    """Rotate images by random angles.

    Args:
        degrees: The counterclockwise angle is drawn from ``-degrees`` to ``degrees``, or from given bounds (low, high).
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        expand: Whether to enlarge each image so that all of it stays visible. Such images differ in size. Pillow
            rotates them, which is slower.
        center: The fixed point, x and y in pixels; the image's centre by default.
        fill: The colour of pixels outside the image: one number or three.
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
    """Rotate, move, scale and shear images at random. The centre of an image is the fixed point.

    Args:
        degrees: The clockwise angle is drawn from ``-degrees`` to ``degrees``, or from given bounds (low, high).
        translate: The largest shifts to the right and downwards, as shares of the image's width and height, 0 to 1.
        scale: The bounds of the scale factor.
        shear: The angle of the shear along x is drawn from ``-shear`` to ``shear``, or from given bounds (low, high).
            With four bounds, the last two are for the shear along y.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The colour of pixels outside the image: one number or three.
        center: The fixed point, apart from the shift, x and y in pixels; the image's centre by default.
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
    """Move the corners of images inwards at random, each image with probability ``p``.

    An image stays as it is if three of its moved corners are on a line, as in an image of one row. torchvision raises
    an error for such images.

    Args:
        distortion_scale: The largest move of a corner, as a share of half the width and height, 0 to 1.
        p: The probability that an image is changed.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The colour of pixels outside the image: one number or three.
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
        """Return the operations on n images, OPERATION [n, 1]. Operations on unchanged images do nothing."""
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


def make_warps(matrices: Sequence[Matrix | None], interpolation: str, fill: Colour) -> Operations:
    """Return an affine or perspective transform for each of n images, OPERATION [n, 1].

    Args:
        matrices: The matrix for each image; None if it stays as it is.
        interpolation: The name of the interpolation.
        fill: The colour of pixels outside the images.
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
        raise ValueError(
            f"{name} must be a number that is not negative or {shown} bounds, the lower first, got {given!r}"
        )
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
        translate: The shift to the right and downwards in pixels.
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
    """Return the matrix of Pillow's ``rotate``; None if the image stays as it is.

    Args:
        height: The image's height.
        width: The image's width.
        angle: The angle in degrees, counterclockwise.
        center: The fixed point, x and y in pixels; the image's centre by default.
    """
    angle %= 360.0
    if angle == 0:
        return None
    radians = -math.radians(angle)
    cosine, sine = round(math.cos(radians), 15), round(math.sin(radians), 15)
    x, y = center or (width / 2, height / 2)
    return [cosine, sine, cosine * -x + sine * -y + 0.0 + x, -sine, cosine, -sine * -x + cosine * -y + 0.0 + y]


def make_perspective_matrix(height: int, width: int, corners: Sequence[tuple[int, int]]) -> Matrix | None:
    """Return the matrix of torchvision's ``perspective``; None if three corners are on a line.

    torchvision solves eight equations and rounds the solution to 32 bits. This function rounds the exact solution in
    the same way. The only difference is that numbers that should be 0 are around 1e-14 in torchvision.

    The matrix from a unit square to the corners has a formula with integers (Heckbert, Fundamentals of Texture Mapping
    and Image Warping, 1989, section 2.2.3). Its adjugate is a multiple of the inverse matrix.

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
