"""The base class of transforms whose parameters are operations on pixels. Many are applied in one compiled call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Pixels, Sizes, edit_images, make_operations
from shardio.order import Words, random_words, to_unit
from shardio.transforms.transform import Transform


class PixelTransform(Transform):
    """A transform that keeps an image's size. What it draws for n images are their operations, OPERATION [n, k]."""

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
