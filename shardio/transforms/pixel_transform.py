"""The base class of transforms whose parameters are operations on pixels. Many are applied in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Pixels, Sizes, edit_images, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words, random_words, to_unit
from shardio.transforms.transform import Transform

Fill = float | Sequence[float] | None
"""The colour of pixels outside an image: one number, three of them, or None for black."""

Colour = tuple[int, int, int]

INTERPOLATIONS = {"nearest": codes.NEAREST, "bilinear": codes.BILINEAR, "bicubic": codes.BICUBIC}
"""The numbers of interpolations by their names."""


class PixelTransform(Transform):
    """A transform that keeps an image's size. What it draws for n images are their operations, OPERATION [n, k]."""

    @property
    def is_planned(self) -> bool:
        """Whether crop plans can end in its operations. If not, :meth:`apply` is called for each image."""
        return type(self).apply is PixelTransform.apply

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        edited = np.array(image)
        edit_images([edited], np.asarray(parameters).reshape(1, -1))
        return edited


class RandomPixelTransform(PixelTransform):
    """The base class of transforms that apply one operation to some of the images.

    Args:
        p: The probability that an image is changed.
    """

    code: int

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability(p)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The operation's numbers."""
        return ()

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]; those of unchanged images do nothing."""
        operations = make_operations(len(sizes), self.code, *self.numbers)
        operations["code"][~draw_chance(rng_keys, self.p)] = 0
        return operations

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


def draw_units(rng_keys: Words, num_numbers: int) -> NDArray[np.float64]:
    """Return random numbers from 0 to below 1 for each of n rng keys, float64 [n, num_numbers]."""
    return to_unit(random_words(rng_keys[:, None], np.arange(num_numbers, dtype=np.uint64)))


def draw_chance(rng_keys: Words, p: float) -> NDArray[np.bool_]:
    """Return true with probability p for each of n rng keys, bool [n]."""
    return np.asarray(draw_units(rng_keys, 1)[:, 0] < p)


def check_probability(p: float) -> float:
    """Return p if it is a probability, else raise ValueError."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be a probability from 0 to 1, got {p}")
    return p


def check_fill(fill: Fill) -> Colour:
    """Return the three numbers of a colour, or raise ValueError."""
    values = [0.0] * 3 if fill is None else [float(fill)] * 3 if isinstance(fill, int | float) else list(fill)
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or not all(0 <= value <= 255 for value in values):
        raise ValueError(f"fill must be a number from 0 to 255 or three of them, got {fill!r}")
    red, green, blue = map(int, values)
    return red, green, blue


def check_interpolation(interpolation: object) -> str:
    """Return the name of an interpolation, also for torchvision's or Pillow's constants, or raise ValueError."""
    value = getattr(interpolation, "value", interpolation)
    for name, number in INTERPOLATIONS.items():
        if value in (name, number):
            return name
    raise ValueError(f"interpolation must be 'nearest', 'bilinear' or 'bicubic', got {interpolation!r}")
