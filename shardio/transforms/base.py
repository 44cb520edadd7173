"""What a transform is: parameters for a whole batch at once, then pixels, one image at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Pixels
from shardio.order import Words, derive_key

Sizes = NDArray[np.int64]
"""int64 [n, 2]: the height and width of n images."""


class Transform(ABC):
    """A transform of uint8 [height, width, 3] arrays.

    Subclasses draw their parameters for n images at once, as a function of the images' sizes and one random
    key an image, and apply them to one image at a time. Called by hand, a transform takes its key from
    torch's global generator, as torchvision's transforms do.
    """

    @abstractmethod
    def draw(self, sizes: Sizes, keys: Words) -> NDArray[Any]:
        """Return the parameters of n images.

        Args:
            sizes: int64 [n, 2], their heights and widths.
            keys: uint64 [n], one random key an image.

        Returns:
            An array of n rows; :meth:`apply` gets one.
        """

    @abstractmethod
    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        """Transform one image by its row of parameters."""

    def __call__(self, image: Pixels) -> Any:
        """Transform one image with parameters from torch's global generator."""
        return apply_transform(self, [image], keys_from_torch(1))[0]


class Compose:
    """Several transforms in a row.

    Args:
        transforms: Transforms of this package, which share the batch's random keys, and any other callables,
            which get the array (or what came before them) and bring their own randomness.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        """Transform one image with parameters from torch's global generator."""
        return apply_transform(self, [image], keys_from_torch(1))[0]

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self.transforms))}])"


def apply_transform(transform: Callable[[Any], Any], images: Sequence[Any], keys: Words) -> list[Any]:
    """Transform n images, each by its own random key.

    Args:
        transform: A transform of this package or any other callable.
        images: The images.
        keys: uint64 [n], one key an image. The place of a transform in a Compose is part of what it draws by.
    """
    if isinstance(transform, Compose):
        for place, step in enumerate(transform.transforms):
            images = apply_transform(step, images, derive_key(keys, np.array([place], dtype=np.uint64)))
        return list(images)
    if isinstance(transform, Transform):
        parameters = transform.draw(_sizes_of(transform, images), keys)
        return [transform.apply(image, row) for image, row in zip(images, parameters, strict=True)]
    return [transform(image) for image in images]


def keys_from_torch(num_keys: int) -> Words:
    """Draw keys from torch's global generator, uint64 [num_keys]."""
    import torch

    return torch.randint(-(2**63), 2**63 - 1, (num_keys,)).numpy().view(np.uint64)


def _sizes_of(transform: Transform, images: Sequence[Any]) -> Sizes:
    for image in images:
        if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3):
            got = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
            raise TypeError(
                f"{transform!r} takes uint8 [height, width, 3] arrays, got {got}: with decode='pil' or after a "
                "callable that returns something else, use that library's own transforms"
            )
    return np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
