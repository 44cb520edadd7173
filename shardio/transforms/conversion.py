"""ToDtype and Normalize, with torchvision's names: floating-point images on the host.

Most programs need neither: DevicePrefetcher converts and normalises on the device, so that images cross the bus as
uint8, which is a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Sizes, normalize_floats, normalize_image
from shardio.order import Words
from shardio.transforms.transform import Transform, as_pixels

_ZERO, _ONE = np.zeros(3, np.float32), np.ones(3, np.float32)


class _Conversion(Transform):
    """The base class of transforms without parameters."""

    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        return np.zeros((len(sizes), 0))


class ToDtype(_Conversion):
    """Convert images to float32 [3, height, width], from 0 to 1.

    In a batch, they are a tensor float32 [N, 3, height, width].

    Args:
        dtype: float32: torch's, numpy's, or the name.
        scale: True. For values from 0 to 255, use ``DevicePrefetcher(dtype=torch.float32)``.
    """

    def __init__(self, dtype: Any = "float32", scale: bool = False) -> None:
        name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
        if name != "float32" or not scale:
            raise ValueError(
                f"ToDtype makes float32 images from 0 to 1, got dtype={dtype!r}, scale={scale!r}: write "
                "ToDtype(torch.float32, scale=True), or convert on the device, with DevicePrefetcher(dtype=...)"
            )
        self.dtype, self.scale = name, True

    def apply(self, image: Any, parameters: Any) -> Any:
        return normalize_image(image, _ZERO, _ONE)

    def __repr__(self) -> str:
        return "ToDtype(float32, scale=True)"


class Normalize(_Conversion):
    """Normalise images to (image - mean) / std, float32 [3, height, width].

    Pixels, uint8 [height, width, 3], are scaled to 0 to 1 first. In a batch, the images are a tensor
    float32 [N, 3, height, width].

    Args:
        mean: The mean of red, green and blue, for pixels from 0 to 1.
        std: Their standard deviation.
        inplace: Accepted as in torchvision, without effect: the input is never changed.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"mean and std must have three numbers each, got {mean!r} and {std!r}")
        if not all(deviation > 0 for deviation in std):
            raise ValueError(f"std must be positive, got {std!r}")
        self.mean, self.std = list(mean), list(std)
        self._mean, self._std = np.array(mean, np.float32), np.array(std, np.float32)

    def as_input(self, image: Any) -> Any:
        """Return an image of ToDtype's as it is, and any other as pixels."""
        return image if _is_float_image(image) else as_pixels(self, image)

    def apply(self, image: Any, parameters: Any) -> Any:
        normalize = normalize_floats if _is_float_image(image) else normalize_image
        return normalize(image, self._mean, self._std)

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std})"


CONVERSIONS: frozenset[type] = frozenset({Normalize, ToDtype})
"""The transforms of this module."""


def _is_float_image(image: Any) -> bool:
    return isinstance(image, np.ndarray) and image.dtype == np.float32 and image.ndim == 3 and len(image) == 3
