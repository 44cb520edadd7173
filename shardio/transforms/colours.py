"""Transforms of colours, with torchvision's names, arguments and distributions, and the pixels of Pillow.

torchvision gives the same pixels for Pillow images. For tensors, it rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.drawing import draw_units
from shardio.transforms.pixel_transform import PixelTransform, RandomPixelTransform

MAX_FACTOR = 4096.0
"""A larger factor gives the same pixels: whatever it changes is black or white."""

Range = tuple[float, float]


class ColorJitter(PixelTransform):
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    Args:
        brightness: The factor is drawn from ``max(0, 1 - brightness)`` to ``1 + brightness``, or from given bounds
            (low, high). None or 0 changes nothing.
        contrast: The same.
        saturation: The same.
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
        operations = np.concatenate(
            [
                _draw_factors(codes.BRIGHTNESS, self.brightness, unit[:, 0]),
                _draw_factors(codes.CONTRAST, self.contrast, unit[:, 1]),
                _draw_factors(codes.SATURATION, self.saturation, unit[:, 2]),
                self._draw_hue(unit[:, 3]),
            ],
            axis=1,
        )
        return np.take_along_axis(operations, np.argsort(unit[:, 4:], axis=1), axis=1)

    def _draw_hue(self, unit: NDArray[np.float64]) -> Operations:
        if self.hue is None:
            return make_operations(len(unit), codes.NONE)
        low, high = self.hue
        return make_operations(len(unit), codes.HUE, np.trunc((low + (high - low) * unit) * 255) % 256)

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)}" for name in ("brightness", "contrast", "saturation", "hue"))
        return f"ColorJitter({', '.join(shown)})"


class RandomGrayscale(RandomPixelTransform):
    """Make images grey, each with probability ``p``. They keep three colours."""

    code = codes.GRAYSCALE

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)


class RandomInvert(RandomPixelTransform):
    """Invert the colours of images, each with probability ``p``."""

    code = codes.INVERT


class RandomAutocontrast(RandomPixelTransform):
    """Stretch each colour of images to 0 to 255, each with probability ``p``."""

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

    def __repr__(self) -> str:
        return f"RandomSolarize(threshold={self.threshold}, p={self.p})"


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

    def __repr__(self) -> str:
        return f"RandomPosterize(bits={self.bits}, p={self.p})"


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

    def __repr__(self) -> str:
        return f"RandomAdjustSharpness(sharpness_factor={self.sharpness_factor}, p={self.p})"


COLOURS: frozenset[type] = frozenset(
    {
        *(ColorJitter, RandomAdjustSharpness, RandomAutocontrast, RandomEqualize, RandomGrayscale, RandomInvert),
        *(RandomPosterize, RandomSolarize),
    }
)
"""The transforms of this module."""


def mask_of(bits: int) -> int:
    """Return a byte whose highest bits are set."""
    return 256 - (1 << 8 - bits)


def _draw_factors(code: int, bounds: Range | None, unit: NDArray[np.float64]) -> Operations:
    if bounds is None:
        return make_operations(len(unit), codes.NONE)
    low, high = bounds
    return make_operations(len(unit), code, np.minimum(low + (high - low) * unit, MAX_FACTOR))


def _check_range(
    name: str, given: float | Sequence[float] | None, center: float = 1.0, bounds: Range = (0.0, math.inf)
) -> Range | None:
    """Return the bounds of a factor, or None if it changes nothing."""
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
