"""Crop, resize, flip and pad images, with torchvision's names, arguments and distributions.

Parameters follow torchvision's definitions (torchvision.transforms.v2). Images are resized bilinearly. By default, each
new pixel is computed from the nearest four pixels, as in OpenCV. If both sides shrink to half or less, each new pixel
is computed from all nearby pixels. With ``antialias=True``, all nearby pixels are always used, which takes about 15 %
longer and gives the same pixels as Pillow and torchvision. See :mod:`shardio.images.crop_plan`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.images import Boxes, CropPlan, DecodeError, Operations, Pixels, Resampling, Sizes, make_operations
from shardio.kernel import operations as codes
from shardio.order import Words
from shardio.transforms.compose import Compose, MultiCrop
from shardio.transforms.transform import (
    Bounds,
    Geometry,
    between,
    check_probability,
    draw_chance,
    draw_units,
    to_integers,
)
from shardio.values import check_choice, check_optional_integer

__all__ = ["CenterCrop", "CornerCrop", "FiveCrop", "Pad", "RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop"]
__all__ += ["RandomVerticalFlip", "Resize"]

Fill = float | Sequence[float] | None
"""One number for all colors, or three; None for black."""

Color = tuple[int, int, int]
"""Red, green and blue."""

INTERPOLATIONS = {"nearest": codes.NEAREST, "bilinear": codes.BILINEAR, "bicubic": codes.BICUBIC}
"""The number of each interpolation, by name."""

Interpolation = Literal["bilinear", "bicubic"]

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]

Corner = Literal["top left", "top right", "bottom left", "bottom right"]

NUM_TRIES = 10
"""The number of random boxes that RandomResizedCrop tries before it uses a central box, as in torchvision."""


class _Resizing(Geometry):
    unshown: ClassVar[dict[str, object]] = {"interpolation": "bilinear", "max_size": None}
    unaveraged: Resampling = "bilinear"
    """The way to resize without antialiasing."""

    def __init__(self, interpolation: object, antialias: bool) -> None:
        self.interpolation = check_interpolation(interpolation)
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {interpolation!r}")
        if self.interpolation == "bicubic" and not antialias:
            raise ValueError("interpolation='bicubic' requires antialias=True")
        self.antialias = antialias

    @property
    def _resampling(self) -> Resampling:
        if not self.antialias:
            return self.unaveraged
        return "antialiased bicubic" if self.interpolation == "bicubic" else "antialiased bilinear"

    def needs_pixels(self, plan: CropPlan, parameters: NDArray[Any]) -> NDArray[np.bool_]:
        return plan.is_final


class RandomResizedCrop(_Resizing):
    """Crop a random part of the image, and resize it.

    Args:
        size: The result's size in pixels: one number for a square, or (height, width).
        scale: The lower and upper bounds of the crop's area, as a fraction of the image's area.
        ratio: The lower and upper bounds of the crop's aspect ratio (width / height), which is drawn uniformly on a
            logarithmic scale.
        interpolation: "bilinear" or "bicubic", or a torchvision or Pillow constant.
        antialias: Whether to average over all pixels when a crop is shrunk. "bicubic" requires it.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: object = "bilinear",
        antialias: bool = False,
    ) -> None:
        self.scale, self.ratio = check_part(scale, ratio)
        self.size = pair(size)
        super().__init__(interpolation, antialias)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width."""
        unit = draw_units(rng_keys, 2 * NUM_TRIES + 2)
        low, high = np.log(self.ratio)
        widths, heights = draw_sides(sizes, unit, self.scale, (low, high))
        fits: NDArray[np.bool_] = (widths > 0) & (widths <= sizes[:, 1:]) & (heights > 0) & (heights <= sizes[:, :1])
        crop = take_first(fits, heights, widths)
        corner = to_integers(unit[:, -2:], sizes - crop + 1)
        central = self._central_crop(sizes)
        return np.where(fits.any(axis=1, keepdims=True), np.concatenate([corner, crop], axis=1), central)

    def extend(self, plan: CropPlan, parameters: Boxes) -> CropPlan:
        sizes = np.broadcast_to(np.array(self.size, dtype=np.int64), (len(parameters), 2))
        return plan.crop(parameters).resize(sizes, self._resampling)

    def _central_crop(self, sizes: Sizes) -> Boxes:
        """Return the largest central crops whose ratio is within bounds, int64 [n, 4]."""
        height, width = sizes[:, 0], sizes[:, 1]
        crop_width = np.minimum(width, np.rint(height * self.ratio[1]).astype(np.int64))
        crop_height = np.minimum(height, np.rint(width / self.ratio[0]).astype(np.int64))
        crop = np.maximum(np.stack([crop_height, crop_width], axis=1), 1)
        return np.concatenate([(sizes - crop) // 2, crop], axis=1)


class Resize(_Resizing):
    """Resize the image.

    Args:
        size: The result's size in pixels: (height, width), or one number for the shorter side. With one number, the
            longer side is scaled in proportion and rounded down. None scales the longer side to ``max_size``.
        interpolation: "bilinear" or "bicubic", or a torchvision or Pillow constant.
        max_size: The maximum length of the longer side in pixels. An image that would be longer is scaled to this
            length. ``max_size`` cannot be combined with a ``size`` of (height, width).
        antialias: Whether to average over all pixels when an image is shrunk. "bicubic" requires it.
    """

    def __init__(
        self,
        size: int | Sequence[int] | None,
        interpolation: object = "bilinear",
        max_size: int | None = None,
        antialias: bool = False,
    ) -> None:
        self.size: int | tuple[int, int] | None = None if size is None else pair(size)
        if isinstance(size, int | np.integer) or (isinstance(size, Sequence) and len(size) == 1):
            self.size = pair(size)[0]
        self.max_size = check_optional_integer("max_size", max_size, at_least=1)
        if self.size is None and self.max_size is None:
            raise ValueError("size=None requires max_size")
        if self.max_size is not None and isinstance(self.size, tuple):
            raise ValueError(f"max_size applies only to a size of one number, got size={self.size}")
        if self.max_size is not None and self.size is not None and self.max_size <= self.size:  # type: ignore[operator]
            raise ValueError(f"max_size must be greater than size, got max_size={max_size} and size={self.size}")
        super().__init__(interpolation, antialias)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Sizes:
        """Return the new sizes as int64 [n, 2]: height, width."""
        if isinstance(self.size, tuple):
            return np.tile(np.array(self.size, dtype=np.int64), (len(sizes), 1))
        shorter, longer = sizes.min(axis=1, keepdims=True), sizes.max(axis=1, keepdims=True)  # int64 [n, 1]
        if self.size is None:
            new_shorter, new_longer = self.max_size * shorter // longer, np.full_like(longer, self.max_size)
        else:
            new_shorter, new_longer = np.full_like(shorter, self.size), self.size * longer // shorter
        if self.max_size is not None:
            new_shorter = np.where(new_longer > self.max_size, self.max_size * new_shorter // new_longer, new_shorter)
            new_longer = np.minimum(new_longer, self.max_size)
        new_sizes: Sizes = np.where(sizes == shorter, np.maximum(new_shorter, 1), new_longer)
        return new_sizes

    def extend(self, plan: CropPlan, parameters: Sizes) -> CropPlan:
        return plan.resize(parameters, self._resampling)


class _Plain(_Resizing):
    unaveraged = "plain bilinear"

    def __repr__(self) -> str:
        return super().__repr__().removeprefix("Plain")


class PlainRandomResizedCrop(_Plain, RandomResizedCrop):
    """A RandomResizedCrop that always resizes as OpenCV's INTER_LINEAR does, without averaging."""


class PlainResize(_Plain, Resize):
    """A Resize that always resizes as OpenCV's INTER_LINEAR does, without averaging."""


class _Cropping(Geometry):
    def needs_pixels(self, plan: CropPlan, parameters: Boxes) -> NDArray[np.bool_]:
        return plan.pads(parameters)

    def extend(self, plan: CropPlan, parameters: Boxes) -> CropPlan:
        return plan.crop(parameters)


class CenterCrop(_Cropping):
    """Crop the image's center.

    Args:
        size: The result's size in pixels: one number for a square, or (height, width). An image that is smaller than
            the crop in either dimension is padded with black on both sides.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = pair(size)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width. For smaller images, top or left is negative."""
        size = np.array(self.size, dtype=np.int64)
        missing = np.maximum(size - sizes, 0)
        corner = np.rint((np.maximum(sizes, size) - size) / 2).astype(np.int64) - missing // 2
        return np.concatenate([corner, np.broadcast_to(size, sizes.shape)], axis=1)


class _RandomFlip(Geometry):
    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability(p)

    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[np.bool_]:
        return draw_chance(rng_keys, self.p)

    def needs_pixels(self, plan: CropPlan, parameters: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.zeros_like(parameters)


class RandomHorizontalFlip(_RandomFlip):
    """Flip the image horizontally with probability ``p``."""

    def extend(self, plan: CropPlan, parameters: NDArray[np.bool_]) -> CropPlan:
        return plan.mirror(parameters)


class RandomVerticalFlip(_RandomFlip):
    """Flip the image vertically with probability ``p``."""

    def extend(self, plan: CropPlan, parameters: NDArray[np.bool_]) -> CropPlan:
        return plan.mirror_vertically(parameters)


class _Padding(_Cropping):
    """A transform that may show pixels beyond an image's border. :class:`Pad` describes its arguments."""

    def __init__(self, fill: Fill, padding_mode: PaddingMode) -> None:
        self.fill, self.padding_mode = fill, check_choice("padding_mode", padding_mode, PaddingMode)
        self._color = check_fill("fill", fill)

    @property
    def is_planned(self) -> bool:
        return self.padding_mode == "constant" and type(self).apply is _Padding.apply

    def extend(self, plan: CropPlan, parameters: Boxes) -> CropPlan:
        extended = super().extend(plan, parameters)
        if not any(self._color):
            return extended
        return extended.edit(_paint_outside(parameters, plan.output_size, self._color))

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        if self.padding_mode == "constant":
            return super().apply(image, parameters)
        corner, size = np.array(parameters[:2]), np.array(parameters[2:])
        before = np.maximum(-corner, 0)
        after = np.maximum(corner + size - image.shape[:2], 0)
        padded = np.pad(image, (*zip(before, after, strict=True), (0, 0)), mode=self.padding_mode)
        top, left = corner + before
        return np.ascontiguousarray(padded[top : top + size[0], left : left + size[1]])


class Pad(_Padding):
    """Add pixels on all sides of the image.

    Args:
        padding: The number of pixels to add: one number for all sides; two numbers, for left and right, and for top and
            bottom; or four numbers, for left, top, right and bottom.
        fill: The color of the added pixels in mode "constant": one number or three.
        padding_mode: The content of the added pixels: "constant"; "edge" repeats the border's pixels; "reflect" mirrors
            the image at the centers of the border's pixels; "symmetric" mirrors the image at the outer edges of these
            pixels.
    """

    def __init__(self, padding: int | Sequence[int], fill: Fill = 0, padding_mode: PaddingMode = "constant") -> None:
        super().__init__(fill, padding_mode)
        self.padding = _check_padding(padding)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the part of each image's plane that is in the result, int64 [n, 4]: top, left, height, width."""
        left, top, right, bottom = self.padding
        corners = np.broadcast_to(np.array([-top, -left], dtype=np.int64), sizes.shape)
        return np.concatenate([corners, sizes + np.array([top + bottom, left + right])], axis=1)


class RandomCrop(_Padding):
    """Crop a random part of a given size, after padding the image.

    Args:
        size: The crop's size in pixels: one number for a square, or (height, width).
        padding: The number of pixels to add first, as in :class:`Pad`; None adds no padding.
        pad_if_needed: Whether to also pad images that are smaller than the crop, by the missing length on each side.
            If false, smaller images raise an error.
        fill: The color of the added pixels in mode "constant": one number or three.
        padding_mode: The content of the added pixels; see :class:`Pad`.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: Fill = 0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        super().__init__(fill, padding_mode)
        self.size, self.pad_if_needed = pair(size), pad_if_needed
        self.padding = _check_padding(0 if padding is None else padding)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width. Crops may reach beyond the image.

        Raises:
            DecodeError: If an image is smaller than the crop.
        """
        left, top, right, bottom = self.padding
        crop = np.array(self.size, dtype=np.int64)
        before = np.broadcast_to(np.array([top, left], dtype=np.int64), sizes.shape)
        padded: Sizes = sizes + np.array([top + bottom, left + right], dtype=np.int64)
        if self.pad_if_needed:
            missing = np.maximum(crop - padded, 0)
            before, padded = before + missing, np.asarray(padded + 2 * missing)
        else:
            _refuse_smaller(self, padded, self.size, "set pad_if_needed=True, or resize images first")
        corner = to_integers(draw_units(rng_keys, 2), padded - crop + 1) - before
        return np.concatenate([corner, np.broadcast_to(crop, sizes.shape)], axis=1)

    @classmethod
    def from_torchvision(cls, theirs: Any) -> RandomCrop:
        padding = theirs.padding
        if padding is not None and ".v2." in type(theirs).__module__:
            left, right, top, bottom = padding  # torchvision's v2 uses a different order.
            padding = left, top, right, bottom
        return cls(theirs.size, padding, theirs.pad_if_needed, theirs.fill, theirs.padding_mode)


class CornerCrop(_Cropping):
    """Crop a corner of the image.

    Args:
        size: The crop's size in pixels: one number for a square, or (height, width).
        corner: "top left", "top right", "bottom left" or "bottom right".
    """

    def __init__(self, size: int | Sequence[int], corner: Corner) -> None:
        self.size, self.corner = pair(size), check_choice("corner", corner, Corner)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width.

        Raises:
            DecodeError: If an image is smaller than the crop.
        """
        _refuse_smaller(self, sizes, self.size, "resize images first")
        is_last = np.array([self.corner.startswith("bottom"), self.corner.endswith("right")])
        crop = np.broadcast_to(np.array(self.size, dtype=np.int64), sizes.shape)
        return np.concatenate([np.where(is_last, sizes - crop, 0), crop], axis=1)


class FiveCrop(MultiCrop):
    """Crop the four corners and the center of an image, for example to evaluate on several crops.

    torchvision's FiveCrop is a step in a pipeline. This class is a MultiCrop, which must be the whole transform of a
    dataset, so it accepts the other steps as arguments.

    Args:
        size: The crops' size in pixels: one number for a square, or (height, width).
        before: The transforms to apply before each crop. Random transforms draw different parameters for each crop.
        after: The transforms to apply after each crop.

    Example:
        >>> from shardio.transforms import FiveCrop, Resize
        >>> transform = FiveCrop(224, before=[Resize(256, antialias=True)])
    """

    def __init__(
        self,
        size: int | Sequence[int],
        before: Sequence[Callable[[Any], Any]] = (),
        after: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        crops = [*(CornerCrop(size, corner) for corner in get_args(Corner)), CenterCrop(size)]
        super().__init__([Compose([*before, crop, *after]) for crop in crops])


def pair(size: object) -> tuple[int, int]:
    """Return a size as (height, width)."""
    match size:
        case int() | np.integer() if size >= 1:
            return int(size), int(size)
        case (int() | np.integer() as side,) if side >= 1:
            return int(side), int(side)
        case (int() | np.integer() as height, int() | np.integer() as width) if min(height, width) >= 1:
            return int(height), int(width)
    got = reprlib.repr(size)  # Shorten the value, which may be an image passed by mistake.
    raise ValueError(f"size must be a positive integer or (height, width), got {got}")


def are_in_order(bounds: object) -> bool:
    """Return whether ``bounds`` are two positive numbers, the lower one first."""
    match bounds:
        case (Real() as low, Real() as high):
            return 0 < float(low) <= float(high)
    return False


def check_part(scale: Bounds, ratio: Bounds) -> tuple[Bounds, Bounds]:
    """Check the bounds of a part's relative area and of its aspect ratio, and return them."""
    if not (are_in_order(scale) and scale[1] <= 1):
        raise ValueError(f"scale must be (low, high) with 0 < low <= high <= 1, got {scale!r}")
    if not are_in_order(ratio):
        raise ValueError(f"ratio must be (low, high) with 0 < low <= high, got {ratio!r}")
    return (scale[0], scale[1]), (ratio[0], ratio[1])


def draw_sides(
    sizes: Sizes, unit: NDArray[np.float64], scale: Bounds, log_ratio: Bounds
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sides of random parts of n images, as two int64 [n, NUM_TRIES] arrays.

    The sides in the first array grow with the ratio.

    Args:
        sizes: int64 [n, 2].
        unit: float64 [n, 2 * NUM_TRIES or more], numbers in [0, 1).
        scale: The bounds of a part's area, as a fraction of the image's area.
        log_ratio: The bounds of the logarithm of a part's aspect ratio.
    """
    area = sizes.prod(axis=1)[:, None] * between(scale, unit[:, :NUM_TRIES])
    ratio = np.exp(between(log_ratio, unit[:, NUM_TRIES : 2 * NUM_TRIES]))
    grows, shrinks = (np.rint(np.sqrt(side)).astype(np.int64) for side in (area * ratio, area / ratio))
    return grows, shrinks


def take_first(fits: NDArray[np.bool_], heights: NDArray[np.int64], widths: NDArray[np.int64]) -> Sizes:
    """Return the first fitting sides for each image, int64 [n, 2]: height, width; arbitrary sides if none fit."""
    rows, first = np.arange(len(fits)), np.argmax(fits, axis=1)
    return np.stack([heights[rows, first], widths[rows, first]], axis=1)


def check_fill(name: str, fill: Fill) -> Color:
    """Check a color, and return it as red, green and blue."""
    values = [0.0] * 3 if fill is None else [float(fill)] * 3 if isinstance(fill, int | float) else list(fill)
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or not all(0 <= value <= 255 for value in values):
        raise ValueError(f"{name} must be a number from 0 to 255 or three such numbers, got {fill!r}")
    red, green, blue = map(int, values)
    return red, green, blue


def check_interpolation(interpolation: object) -> str:
    """Return the name of an interpolation, which may be a torchvision or Pillow constant."""
    value = getattr(interpolation, "value", interpolation)
    for name, number in INTERPOLATIONS.items():
        if value in (name, number):
            return name
    raise ValueError(f"interpolation must be 'nearest', 'bilinear' or 'bicubic', got {interpolation!r}")


def _check_padding(padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    given = [padding] if isinstance(padding, int) else list(padding)
    sides = {1: given * 4, 2: given * 2, 4: given}.get(len(given))
    if sides is None or min(sides) < 0:
        raise ValueError(f"padding must be one, two or four non-negative integers, got {padding!r}")
    left, top, right, bottom = sides
    return left, top, right, bottom


def _refuse_smaller(step: Geometry, sizes: Sizes, crop: tuple[int, int], remedy: str) -> None:
    is_smaller = (sizes < np.array(crop)).any(axis=1)
    if is_smaller.any():
        row = int(np.argmax(is_smaller))
        height, width = sizes[row].tolist()
        message = f"{step!r} needs at least {crop[1]}×{crop[0]} pixels, but the image has {width}×{height}: {remedy}"
        raise DecodeError(row, message)


def _paint_outside(boxes: Boxes, sizes: Sizes, color: tuple[int, int, int]) -> Operations:
    """Return operations that paint those pixels of n boxes that are outside the images, OPERATION [n, 4]."""
    height, width = boxes[:, 2], boxes[:, 3]
    top, left = np.clip(-boxes[:, 0], 0, height), np.clip(-boxes[:, 1], 0, width)
    bottom = np.clip(sizes[:, 0] - boxes[:, 0], 0, height)
    right = np.clip(sizes[:, 1] - boxes[:, 1], 0, width)
    parts = [
        (0, 0, top, width),
        (bottom, 0, height - bottom, width),
        (0, 0, height, left),
        (0, right, height, width - right),
    ]
    return np.concatenate([make_operations(len(boxes), codes.ERASE, *part, *color) for part in parts], axis=1)
