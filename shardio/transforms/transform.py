"""The base classes of transforms. They draw parameters for many images at once, then transform one image at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import CropPlan, DecodedPicture, Pixels, Sizes, render_chunk, sizes_of
from shardio.order import Words
from shardio.transforms import foreign


def check_call(cls: type, parent: type, remedy: str) -> None:
    """Raise TypeError if a class overrides its parent's ``__call__``, which datasets and loaders do not call."""
    if cls.__call__ is not parent.__call__:
        raise TypeError(
            f"{cls.__name__} overrides __call__, but datasets and loaders do not call it: they transform many images "
            f"at once. {remedy}"
        )


class Transform(ABC):
    """A transform of uint8 [height, width, 3] arrays.

    Subclasses draw their parameters for n images at once, as a function of the images' sizes and one rng key for each
    image, and apply them to one image at a time. When called with an image, a transform draws its rng key from torch's
    global generator, as torchvision's transforms do. Subclasses cannot override ``__call__``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_call(cls, Transform, "Override apply(image, parameters), or pass a function to Compose([...])")

    def __call__(self, image: Any) -> Pixels:
        """Transform one image with parameters from torch's global generator."""
        pixels = self.as_input(image)
        (parameters,) = self.draw(np.array([pixels.shape[:2]], dtype=np.int64), rng_keys_from_torch(1))
        return self.apply(pixels, parameters)

    def as_input(self, image: Any) -> Any:
        """Return an image in the form that :meth:`apply` takes."""
        return as_pixels(self, image)

    @abstractmethod
    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        """Return the parameters of n images.

        Args:
            sizes: int64 [n, 2], their heights and widths.
            rng_keys: uint64 [n], one rng key for each image.

        Returns:
            An array of n rows, one for each image. :meth:`apply` gets one of them.
        """

    @abstractmethod
    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        """Transform one image with its row of parameters."""


class Geometry(Transform):
    """A transform that extends crop plans, so that only the needed parts of encoded images are decoded."""

    @property
    def is_planned(self) -> bool:
        """Whether crop plans can express this transform. If not, :meth:`apply` transforms whole images."""
        return type(self).apply is Geometry.apply

    @abstractmethod
    def needs_pixels(self, plan: CropPlan, parameters: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of n images must be rendered before this transform can extend their plan, bool [n]."""

    @abstractmethod
    def extend(self, plan: CropPlan, parameters: NDArray[Any]) -> CropPlan:
        """Return a plan that also applies this transform. Images for which ``needs_pixels`` is true are rendered."""

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        picture = DecodedPicture(image)
        plan = self.extend(CropPlan.whole(sizes_of([picture])), np.asarray(parameters)[None])
        pixels: Pixels = render_chunk([picture], plan).images[0]
        return pixels


def rng_keys_from_torch(num_keys: int) -> Words:
    """Draw rng keys from torch's global generator, uint64 [num_keys]."""
    import torch

    return torch.randint(-(2**63), 2**63 - 1, (num_keys,), device="cpu").numpy().view(np.uint64)


def as_pixels(transform: Transform, image: Any) -> Pixels:
    """Convert an image to the array that a transform accepts, uint8 [height, width, 3].

    Raises:
        TypeError: If it is neither such an array nor a tensor uint8 [3, height, width].
    """
    if not foreign.is_pillow_image(image):
        image = foreign.as_array(image)  # torchvision's transforms return tensors.
    if isinstance(image, np.ndarray) and image.size and image.dtype == np.uint8 and image.shape[2:] == (3,):
        return image
    got = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
    raise TypeError(
        f"{transform!r} takes uint8 [height, width, 3] arrays that are not empty, got {got}: convert the image first, "
        "or use this as the first transform, with decode='array', the default"
    )
