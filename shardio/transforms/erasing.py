"""RandomErasing, with torchvision's name, arguments and distribution. Random Erasing: arxiv.org/abs/1708.04896."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.drawing import check_probability, draw_units, to_integers
from shardio.transforms.fills import Fill, check_fill
from shardio.transforms.geometry import NUM_TRIES, are_in_order
from shardio.transforms.pixel_transform import PixelTransform


class RandomErasing(PixelTransform):
    """Make a random part of an image one colour, with probability ``p``.

    This acts on bytes. torchvision's recipes erase normalised images instead, where 0 is the mean colour: use
    ``shardio.BatchRandomErasing`` for that, or the mean colour as ``value``.

    Args:
        p: The probability that an image is changed.
        scale: The lower and upper bounds of the part's share of the image's area.
        ratio: The lower and upper bounds of the part's height / width, drawn uniformly on a logarithmic scale.
        value: The colour: one number from 0 to 255, or three.
        inplace: Accepted as in torchvision, without effect: the input is never changed.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        value: Fill = 0.0,
        inplace: bool = False,
    ) -> None:
        self.p = check_probability(p)
        if not (are_in_order(scale) and scale[1] <= 1):
            raise ValueError(f"scale must be (low, high) with 0 < low <= high <= 1, got {scale!r}")
        if not are_in_order(ratio):
            raise ValueError(f"ratio must be (low, high) with 0 < low <= high, got {ratio!r}")
        if isinstance(value, str):
            raise ValueError(f"value must be a colour, got {value!r}: shardio.BatchRandomErasing has random values")
        self.scale, self.ratio, self.value = scale, ratio, value
        self._colour = check_fill("value", value)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit = draw_units(rng_keys, 2 * NUM_TRIES + 3)
        area = sizes.prod(axis=1)[:, None] * _within(*self.scale, unit[:, :NUM_TRIES])  # [n, tries]
        ratio = np.exp(_within(math.log(self.ratio[0]), math.log(self.ratio[1]), unit[:, NUM_TRIES : 2 * NUM_TRIES]))
        heights, widths = (np.rint(np.sqrt(side)).astype(np.int64) for side in (area * ratio, area / ratio))
        fits = (heights < sizes[:, :1]) & (widths < sizes[:, 1:])
        rows, first = np.arange(len(sizes)), np.argmax(fits, axis=1)
        parts = np.stack([heights[rows, first], widths[rows, first]], axis=1)  # [n, 2]
        corners = to_integers(unit[:, -3:-1], np.maximum(sizes - parts + 1, 1))
        operations = make_operations(len(sizes), codes.ERASE, *corners.T, *parts.T, *self._colour)
        operations["code"][~((unit[:, -1] < self.p) & fits.any(axis=1))] = codes.NONE
        return operations

    def __repr__(self) -> str:
        return f"RandomErasing(p={self.p}, scale={self.scale}, ratio={self.ratio}, value={self.value})"


def _within(low: float, high: float, unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return numbers between two bounds for numbers from 0 to below 1."""
    return low + (high - low) * unit
