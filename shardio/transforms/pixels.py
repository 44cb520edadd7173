"""Recolor, blur, erase and convert images, with torchvision's names, arguments and distributions.

The pixels are the same as in Pillow, and in torchvision for Pillow images. torchvision rounds differently for tensors.

Most programs need no conversion: DevicePrefetcher converts and normalizes on the device, so images cross the bus as
uint8, with a quarter of the bytes of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations, normalize_floats, normalize_image
from shardio.kernel import operations as codes
from shardio.order import Words
from shardio.transforms.geometry import NUM_TRIES, Fill, check_fill, check_part, draw_sides, take_first
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

__all__ = ["ColorJitter", "GaussianBlur", "Normalize", "RandomAdjustSharpness", "RandomAutocontrast"]
__all__ += ["RandomEqualize", "RandomErasing", "RandomGrayscale", "RandomInvert"]
__all__ += ["RandomPosterize", "RandomSolarize", "ToDtype"]

MAX_FACTOR = 4096.0
"""The largest factor. Larger factors give the same pixels, because every value that they change becomes 0 or 255."""


class ColorJitter(PixelTransform):
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    Args:
        brightness: The factor for brightness is drawn between ``max(0, 1 - brightness)`` and ``1 + brightness``, or
            between given bounds (low, high). None or 0 changes nothing.
        contrast: The same for contrast.
        saturation: The same for saturation.
        hue: The shift of the hue is drawn between ``-hue`` and ``hue``, or between given bounds, as a fraction of the
            color circle from -0.5 to 0.5.
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
        raise ValueError(f"{name} must be a non-negative number or (low, high), got {given!r}")
    if not bounds[0] <= low <= high <= bounds[1]:
        raise ValueError(f"{name} must be from {bounds[0]} to {bounds[1]}, the lower bound first, got {given!r}")
    return None if low == high == center else (low, high)


class RandomGrayscale(RandomPixelTransform):
    """Make images gray, each with probability ``p``. The images keep three channels."""

    code = codes.GRAYSCALE

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)


class RandomInvert(RandomPixelTransform):
    """Invert the colors of images, each with probability ``p``."""

    code = codes.INVERT


class RandomAutocontrast(RandomPixelTransform):
    """Stretch each color channel to the range from 0 to 255, in each image with probability ``p``."""

    code = codes.AUTOCONTRAST


class RandomEqualize(RandomPixelTransform):
    """Make all values of each color channel equally frequent, in each image with probability ``p``."""

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
    """In each image, with probability ``p``, keep only the highest ``bits`` bits (0 to 8) of each value."""

    code = codes.POSTERIZE

    def __init__(self, bits: int, p: float = 0.5) -> None:
        super().__init__(p)
        if bits not in range(9):
            raise ValueError(f"bits must be from 0 to 8, got {bits!r}")
        self.bits = bits

    @property
    def numbers(self) -> tuple[float, ...]:
        """The kept bits, as a mask."""
        return (float(mask_of(self.bits)),)


def mask_of(bits: int) -> int:
    """Return a byte whose highest ``bits`` bits are set."""
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
    """Blur images with a Gaussian of random width.

    Some pixels may differ by 1 from torchvision's, because torchvision adds the products in a different order. Unlike
    in torchvision, images may be smaller than the kernel.

    Args:
        kernel_size: The size of the kernel in pixels: one odd number, or two for the width and the height.
        sigma: The bounds (low, high) of the standard deviation in pixels, or a fixed standard deviation.
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
        # Avoid np.exp, whose last bit may depend on the processor.
        ratios = np.array([math.exp(-0.5 / deviation**2) for deviation in deviations.tolist()])
        width, height = self.kernel_size
        return make_operations(len(sizes), codes.GAUSSIAN_BLUR, height // 2, ratios, width // 2, ratios)


class RandomErasing(PixelTransform):
    """Fill a random part of an image with one color, with probability ``p``.

    This transform acts on uint8 pixels. torchvision's recipes instead erase normalized images, in which 0 is the mean
    color. For the same effect, use ``shardio.BatchRandomErasing``, or pass the mean color as ``value``.

    Args:
        p: The probability that an image is changed.
        scale: The lower and upper bounds of the part's area, as a fraction of the image's area.
        ratio: The lower and upper bounds of the part's height / width, which is drawn uniformly on a logarithmic scale.
        value: The color: one number from 0 to 255, or three.
        inplace: Ignored, because the input is never changed; accepted for compatibility with torchvision.
    """

    equals_torchvisions = False
    unshown: ClassVar[dict[str, object]] = {"inplace": False}

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
            raise ValueError(f"value must be a color, got {value!r}: shardio.BatchRandomErasing supports random values")
        self.value, self.inplace = value, inplace
        self._color = check_fill("value", value)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit = draw_units(rng_keys, 2 * NUM_TRIES + 3)
        heights, widths = draw_sides(sizes, unit, self.scale, (math.log(self.ratio[0]), math.log(self.ratio[1])))
        fits = (heights < sizes[:, :1]) & (widths < sizes[:, 1:])
        parts = take_first(fits, heights, widths)
        corners = to_integers(unit[:, -3:-1], np.maximum(sizes - parts + 1, 1))
        operations = make_operations(len(sizes), codes.ERASE, *corners.T, *parts.T, *self._color)
        operations["code"][~((unit[:, -1] < self.p) & fits.any(axis=1))] = codes.NONE
        return operations


_ZERO, _ONE = np.zeros(3, np.float32), np.ones(3, np.float32)


class _Conversion(Transform):
    equals_torchvisions = False

    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        return np.zeros((len(sizes), 0))


class ToDtype(_Conversion):
    """Convert images to float32 [3, height, width], with values from 0 to 1.

    A batch is a float32 tensor [N, 3, height, width].

    Args:
        dtype: torch.float32, numpy.float32, or "float32".
        scale: Must be True. For values from 0 to 255, use ``DevicePrefetcher(dtype=torch.float32)``.
    """

    def __init__(self, dtype: Any = "float32", scale: bool = False) -> None:
        name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
        if name != "float32" or not scale:
            raise ValueError(
                f"ToDtype makes float32 images with values from 0 to 1, not dtype={dtype!r}, scale={scale!r}: write "
                "ToDtype(torch.float32, scale=True), or convert on the device, with DevicePrefetcher(dtype=...)"
            )
        self.dtype, self.scale = name, True

    def apply(self, image: Any, parameters: Any) -> Any:
        return normalize_image(image, _ZERO, _ONE)

    def __repr__(self) -> str:
        return "ToDtype(float32, scale=True)"


class Normalize(_Conversion):
    """Normalize images to (image - mean) / std, float32 [3, height, width].

    Pixels, uint8 [height, width, 3], are scaled to [0, 1] first. A batch is a float32 tensor [N, 3, height, width].

    Args:
        mean: The means of the red, green and blue channels, for pixel values from 0 to 1.
        std: The standard deviations of these channels.
        inplace: Ignored, because the input is never changed; accepted for compatibility with torchvision.
    """

    unshown: ClassVar[dict[str, object]] = {"inplace": False}

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"mean and std must have three numbers each, got {mean!r} and {std!r}")
        if not all(deviation > 0 for deviation in std):
            raise ValueError(f"std must be positive, got {std!r}")
        self.mean, self.std, self.inplace = list(mean), list(std), inplace
        self._mean, self._std = np.array(mean, np.float32), np.array(std, np.float32)

    def as_input(self, image: Any) -> Any:
        """Return a float image, such as a result of ToDtype, unchanged, and any other image as pixels."""
        return image if _is_float_image(image) else as_pixels(self, image)

    def apply(self, image: Any, parameters: Any) -> Any:
        normalize = normalize_floats if _is_float_image(image) else normalize_image
        return normalize(image, self._mean, self._std)


def _is_float_image(image: Any) -> bool:
    return isinstance(image, np.ndarray) and image.dtype == np.float32 and image.ndim == 3 and len(image) == 3
