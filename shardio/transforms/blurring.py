"""GaussianBlur, with torchvision's name, arguments and distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.drawing import draw_units
from shardio.transforms.pixel_transform import PixelTransform


class GaussianBlur(PixelTransform):
    """Blur images by a Gaussian of random width.

    The pixels are those of torchvision, except that some may differ by 1: torchvision adds up in another order.
    Images may be smaller than the kernel, which torchvision refuses.

    Args:
        kernel_size: The size of the kernel in pixels: an odd number, or two, for the width and the height.
        sigma: The bounds (low, high) of the standard deviation in pixels, or the deviation itself.
    """

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
        low, high = self.sigma
        deviations = low + (high - low) * draw_units(rng_keys, 1)[:, 0]
        # Not np.exp, whose last bit may depend on the processor.
        ratios = np.array([math.exp(-0.5 / deviation**2) for deviation in deviations.tolist()])
        width, height = self.kernel_size
        return make_operations(len(sizes), codes.GAUSSIAN_BLUR, height // 2, ratios, width // 2, ratios)

    def __repr__(self) -> str:
        return f"GaussianBlur(kernel_size={self.kernel_size}, sigma={self.sigma})"
