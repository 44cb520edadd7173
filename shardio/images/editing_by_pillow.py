"""Apply operations to the pixels of an image by Pillow and numpy, for machines without the compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from shardio.images.kernel.compiled import operation_records as codes
from shardio.images.kernel.compiled.operation_records import SMALLEST_WEIGHT
from shardio.images.pictures import Pixels


def edit_by_pillow(pixels: Pixels, operations: NDArray[np.void]) -> Pixels:
    """Return an image after operations.

    Args:
        pixels: uint8 [height, width, 3].
        operations: OPERATION [k].
    """
    image = original = Image.fromarray(pixels)
    total = np.zeros(pixels.shape, np.float32)
    for code, numbers in operations.tolist():
        if code == codes.BEGIN_MIXTURE:
            original, total = image, np.asarray(image, np.float32) * np.float32(numbers[0])
        elif code == codes.ADD_TO_MIXTURE:
            image, total = original, total + np.asarray(image, np.float32) * np.float32(numbers[0])
        elif code == codes.END_MIXTURE:
            image = Image.fromarray(total.clip(0, 255).astype(np.uint8))
        elif code != codes.NONE:
            image = _BY_PILLOW[code](image, numbers)
    return np.array(image)


def _turn_hue(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + int(numbers[0])) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _solarize(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
    return ImageOps.solarize(image, int(numbers[0]))


def _transform_affinely(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
    return _transform(image, Image.Transform.AFFINE, numbers[:6], numbers)


def _transform_perspectively(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
    return _transform(image, Image.Transform.PERSPECTIVE, [*numbers[:6], *numbers[10:]], numbers)


def _transform(
    image: Image.Image, method: Image.Transform, matrix: Sequence[float], numbers: Sequence[float]
) -> Image.Image:
    fill, interpolation = tuple(map(int, numbers[6:9])), Image.Resampling(int(numbers[9]))
    return image.transform(image.size, method, matrix, interpolation, fillcolor=fill)


def _erase(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
    top, left, height, width, *colour = map(int, numbers[:7])
    erased = image.copy()
    erased.paste(tuple(colour), (left, top, left + width, top + height))
    return erased


def blur(image: Pixels, radius_down: float, ratio_down: float, radius_across: float, ratio_across: float) -> Pixels:
    """Return an image after a Gaussian blur, down and then across; GAUSSIAN_BLUR describes the numbers.

    Beyond the border, the image is mirrored at the centre of the border's pixels.
    """
    down = _add_neighbours(image, _weigh(int(radius_down), ratio_down))
    across = _add_neighbours(down.swapaxes(0, 1), _weigh(int(radius_across), ratio_across)).swapaxes(0, 1)
    pixels: Pixels = np.rint(across).astype(np.uint8)
    return pixels


def _add_neighbours(image: NDArray[np.generic], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weighted sums of the pixels above and below each pixel, float32, from the middle outwards."""
    radius, height = len(weights) - 1, len(image)
    padded = np.pad(image.astype(np.float32), ((radius, radius), (0, 0), (0, 0)), mode="reflect")
    total: NDArray[np.float32] = weights[0] * padded[radius : radius + height]
    for i in range(1, radius + 1):
        above, below = padded[radius - i : radius - i + height], padded[radius + i : radius + i + height]
        total = total + weights[i] * (above + below)
    return total


def _weigh(radius: int, ratio: float) -> NDArray[np.float32]:
    """Return the weights of a pixel and of its neighbours up to a radius, without negligible ones."""
    total, weight, step = 1.0, 1.0, ratio
    for _ in range(radius):
        weight, step = weight * step, step * (ratio * ratio)
        total += 2 * weight
    weights, weight, step = list[float](), 1 / total, ratio
    while len(weights) <= radius and weight >= SMALLEST_WEIGHT:
        weights.append(weight)
        weight, step = weight * step, step * (ratio * ratio)
    return np.array(weights, np.float32)


_BY_PILLOW: dict[int, Callable[[Image.Image, Sequence[float]], Image.Image]] = {
    codes.BRIGHTNESS: lambda image, numbers: ImageEnhance.Brightness(image).enhance(numbers[0]),
    codes.CONTRAST: lambda image, numbers: ImageEnhance.Contrast(image).enhance(numbers[0]),
    codes.SATURATION: lambda image, numbers: ImageEnhance.Color(image).enhance(numbers[0]),
    codes.SHARPNESS: lambda image, numbers: ImageEnhance.Sharpness(image).enhance(numbers[0]),
    codes.HUE: _turn_hue,
    codes.GRAYSCALE: lambda image, _: image.convert("L").convert("RGB"),
    codes.SOLARIZE: _solarize,
    codes.POSTERIZE: lambda image, numbers: image.point([level & int(numbers[0]) for level in range(256)] * 3),
    codes.INVERT: lambda image, _: ImageOps.invert(image),
    codes.AUTOCONTRAST: lambda image, _: ImageOps.autocontrast(image),
    codes.EQUALIZE: lambda image, _: ImageOps.equalize(image),
    codes.AFFINE: _transform_affinely,
    codes.PERSPECTIVE: _transform_perspectively,
    codes.ERASE: _erase,
    codes.VERTICAL_FLIP: lambda image, _: ImageOps.flip(image),
    codes.GAUSSIAN_BLUR: lambda image, numbers: Image.fromarray(blur(np.asarray(image), *numbers[:4])),
}
"""A function of an image and the operation's numbers, by the operation's code."""
