"""The base class of transforms whose parameters are operations on pixels. Many are applied in one compiled call."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardio.images import Operations, Pixels, Sizes, edit_images, make_operations
from shardio.order import Words
from shardio.transforms.drawing import check_probability, draw_chance
from shardio.transforms.transform import Transform


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
