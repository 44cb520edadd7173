"""Crops, resizes and flips, with torchvision's names and defaults.

Parameters follow torchvision's definitions (torchvision.transforms.v2). Images are resized bilinearly. By default, each
new pixel is computed from the nearest four, as in OpenCV; if both sides shrink to half or less, from all pixels nearby.
``antialias=True`` always does the latter. It takes about 15 % longer and gives the pixels of Pillow and torchvision:
see :mod:`shardio.images.resizing`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.images import Boxes, CropPlan, Resampling, Sizes
from shardio.order import Words, random_words, to_unit
from shardio.transforms.drawing import check_probability, draw_chance
from shardio.transforms.interpolations import check_interpolation
from shardio.transforms.transform import Geometry
from shardio.values import check_optional_integer

Interpolation = Literal["bilinear", "bicubic"]

NUM_TRIES = 10
"""How many random boxes RandomResizedCrop tries before it falls back to a central one, as in torchvision."""


class _Resizing(Geometry):
    """The base class of transforms that resize.

    Attributes:
        interpolation: The name of the interpolation.
        antialias: Whether to average when shrinking.
    """

    interpolation: Interpolation
    antialias: bool

    @property
    def _resampling(self) -> Resampling:
        if not self.antialias:
            return "bilinear"
        return "antialiased bicubic" if self.interpolation == "bicubic" else "antialiased bilinear"

    def _show_resampling(self) -> str:
        shown = f"antialias={self.antialias}"
        return shown if self.interpolation == "bilinear" else f"interpolation={self.interpolation!r}, {shown}"


class RandomResizedCrop(_Resizing):
    """Crop a random part of the image, then resize it.

    Args:
        size: The result's size in pixels: one number for a square, or (height, width).
        scale: The lower and upper bounds of the crop's share of the image's area.
        ratio: The lower and upper bounds of the crop's width / height, drawn uniformly on a logarithmic scale.
        interpolation: "bilinear" or "bicubic", or the constant of torchvision or Pillow.
        antialias: Whether to average over all of a crop's pixels when it is shrunk. "bicubic" requires it.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: object = "bilinear",
        antialias: bool = False,
    ) -> None:
        if not (are_in_order(scale) and scale[1] <= 1):
            raise ValueError(f"scale must be (low, high) with 0 < low <= high <= 1, got {scale!r}")
        if not are_in_order(ratio):
            raise ValueError(f"ratio must be (low, high) with 0 < low <= high, got {ratio!r}")
        self.size, self.scale, self.ratio = pair(size), scale, ratio
        self.interpolation, self.antialias = _check_interpolation(interpolation, antialias=antialias), antialias

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width."""
        unit = to_unit(random_words(rng_keys[:, None], np.arange(2 * NUM_TRIES + 2, dtype=np.uint64)))  # [n, words]
        height, width = sizes[:, :1], sizes[:, 1:]  # [n, 1], against [n, tries] below
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * unit[:, :NUM_TRIES])
        low, high = np.log(self.ratio)
        ratio = np.exp(low + (high - low) * unit[:, NUM_TRIES : 2 * NUM_TRIES])
        crop_width = np.rint(np.sqrt(area * ratio)).astype(np.int64)
        crop_height = np.rint(np.sqrt(area / ratio)).astype(np.int64)

        fits = (crop_width > 0) & (crop_width <= width) & (crop_height > 0) & (crop_height <= height)
        rows, first = np.arange(len(sizes)), np.argmax(fits, axis=1)
        crop = np.stack([crop_height[rows, first], crop_width[rows, first]], axis=1)  # [n, 2]
        corner = np.floor(unit[:, -2:] * (sizes - crop + 1)).astype(np.int64)
        central = self._central_crop(sizes)
        return np.where(fits.any(axis=1)[:, None], np.concatenate([corner, crop], axis=1), central)

    def needs_pixels(self, plan: CropPlan, parameters: Boxes) -> NDArray[np.bool_]:
        return plan.is_final

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

    def __repr__(self) -> str:
        return f"RandomResizedCrop(size={self.size}, scale={self.scale}, ratio={self.ratio}, {self._show_resampling()})"


class Resize(_Resizing):
    """Resize the image.

    Args:
        size: The result's size in pixels: (height, width), or one number for the shorter side. The longer side is
            then scaled in proportion, rounded down. None scales the image so that its longer side is ``max_size``.
        interpolation: "bilinear" or "bicubic", or the constant of torchvision or Pillow.
        max_size: The largest length of the longer side in pixels, unless ``size`` is (height, width). An image that
            would be longer is scaled to this length.
        antialias: Whether to average over all of an image's pixels when it is shrunk. "bicubic" requires it.
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
        self.interpolation, self.antialias = _check_interpolation(interpolation, antialias=antialias), antialias

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

    def needs_pixels(self, plan: CropPlan, parameters: Sizes) -> NDArray[np.bool_]:
        return plan.is_final

    def extend(self, plan: CropPlan, parameters: Sizes) -> CropPlan:
        return plan.resize(parameters, self._resampling)

    def __repr__(self) -> str:
        max_size = "" if self.max_size is None else f"max_size={self.max_size}, "
        return f"Resize(size={self.size}, {max_size}{self._show_resampling()})"


class CenterCrop(Geometry):
    """Crop the image's centre.

    Args:
        size: The result's size in pixels: one number for a square, or (height, width). In a dimension
            in which the image is smaller, it is padded with black on both sides.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = pair(size)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width. For smaller images, top or left is negative."""
        size = np.array(self.size, dtype=np.int64)
        missing = np.maximum(size - sizes, 0)
        corner = np.rint((np.maximum(sizes, size) - size) / 2).astype(np.int64) - missing // 2
        return np.concatenate([corner, np.broadcast_to(size, sizes.shape)], axis=1)

    def needs_pixels(self, plan: CropPlan, parameters: Boxes) -> NDArray[np.bool_]:
        return plan.pads(parameters)

    def extend(self, plan: CropPlan, parameters: Boxes) -> CropPlan:
        return plan.crop(parameters)

    def __repr__(self) -> str:
        return f"CenterCrop(size={self.size})"


class _RandomFlip(Geometry):
    """The base class of flips.

    Args:
        p: The probability that an image is flipped.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability(p)

    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[np.bool_]:
        """Return whether each image is flipped, bool [n]."""
        return draw_chance(rng_keys, self.p)

    def needs_pixels(self, plan: CropPlan, parameters: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.zeros_like(parameters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


class RandomHorizontalFlip(_RandomFlip):
    """Mirror the image left to right with probability ``p``."""

    def extend(self, plan: CropPlan, parameters: NDArray[np.bool_]) -> CropPlan:
        return plan.mirror(parameters)


class RandomVerticalFlip(_RandomFlip):
    """Mirror the image top to bottom with probability ``p``."""

    def extend(self, plan: CropPlan, parameters: NDArray[np.bool_]) -> CropPlan:
        return plan.mirror_vertically(parameters)


GEOMETRIES: frozenset[type] = frozenset(
    {CenterCrop, RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip, Resize},
)
"""The transforms of this module."""


def _check_interpolation(interpolation: object, *, antialias: bool) -> Interpolation:
    """Return the name of an interpolation, which may be a constant of torchvision or Pillow."""
    name = check_interpolation(interpolation)
    if name not in get_args(Interpolation):
        raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {interpolation!r}")
    if name == "bicubic" and not antialias:
        raise ValueError("interpolation='bicubic' requires antialias=True")
    return cast(Interpolation, name)


def pair(size: object) -> tuple[int, int]:
    """Return a size as (height, width)."""
    match size:
        case int() | np.integer() if size >= 1:
            return int(size), int(size)
        case (int() | np.integer() as side,) if side >= 1:
            return int(side), int(side)
        case (int() | np.integer() as height, int() | np.integer() as width) if min(height, width) >= 1:
            return int(height), int(width)
    got = reprlib.repr(size)  # Shortened, because calling the class with an image ends here.
    raise ValueError(f"size must be a positive integer or (height, width), got {got}")


def are_in_order(bounds: object) -> bool:
    """Return whether ``bounds`` are two positive numbers, the lower one first."""
    match bounds:
        case (Real() as low, Real() as high):
            return 0 < float(low) <= float(high)
    return False
