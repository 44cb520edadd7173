"""The base classes of transforms. They draw parameters for many images at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import (
    CropPlan,
    DecodedPicture,
    Operations,
    Pixels,
    Sizes,
    edit_images,
    make_operations,
    render_chunk,
    sizes_of,
)
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words, derive_rng_key, random_words, to_unit
from shardio.transforms import foreign

Fill = float | Sequence[float] | None
"""One number for all colours, or three; None for black."""

Colour = tuple[int, int, int]
"""Red, green and blue."""

INTERPOLATIONS = {"nearest": codes.NEAREST, "bilinear": codes.BILINEAR, "bicubic": codes.BICUBIC}
"""The numbers of interpolations by their names."""


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
            An array of n rows, one for each image. :meth:`apply` gets one row.
        """

    @abstractmethod
    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        """Transform one image with its row of parameters."""


def check_call(cls: type, parent: type, remedy: str) -> None:
    """Raise TypeError if a class overrides its parent's ``__call__``, which datasets and loaders do not call."""
    if cls.__call__ is not parent.__call__:
        raise TypeError(
            f"{cls.__name__} overrides __call__, but datasets and loaders do not call it: they transform many images "
            f"at once. {remedy}"
        )


class Geometry(Transform):
    """A transform that extends crop plans: only the needed parts of encoded images are decoded."""

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


class PixelTransform(Transform):
    """A transform that keeps an image's size. It draws the operations of n images, OPERATION [n, k]."""

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


def rng_keys_from_torch(num_keys: int) -> Words:
    """Draw rng keys from torch's global generator, uint64 [num_keys]."""
    import torch

    return torch.randint(-(2**63), 2**63 - 1, (num_keys,), device="cpu").numpy().view(np.uint64)


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


def to_integers(unit: NDArray[np.float64], counts: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return integers from 0 to below ``counts`` for numbers from 0 to below 1."""
    integers: NDArray[np.int64] = np.minimum((unit * counts).astype(np.int64), np.asarray(counts) - 1)
    return integers


def draw_gammas(rng_keys: Words, shape: float, num_numbers: int) -> NDArray[np.float64]:
    """Return variates of the gamma distribution for each of n rng keys, float64 [n, num_numbers].

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Args:
        rng_keys: uint64 [n].
        shape: The distribution's shape, positive. Its scale is 1.
        num_numbers: The number of variates of each rng key.
    """
    keys = derive_rng_key(rng_keys[:, None], np.arange(num_numbers, dtype=np.uint64)).reshape(-1)
    d = (shape + 1 if shape < 1 else shape) - 1 / 3
    gammas, left, attempt = np.empty(len(keys)), np.arange(len(keys)), 0
    while left.size:
        counters = np.arange(3 * attempt, 3 * attempt + 3, dtype=np.uint64)
        unit = 1.0 - to_unit(random_words(keys[left, None], counters))  # Above 0, up to 1.
        normal = np.sqrt(-2 * np.log(unit[:, 0])) * np.cos(2 * np.pi * unit[:, 1])
        v = (1 + normal / np.sqrt(9 * d)) ** 3
        with np.errstate(invalid="ignore", divide="ignore"):  # v may be zero or negative.
            is_accepted = (v > 0) & (np.log(unit[:, 2]) < 0.5 * normal**2 + d - d * v + d * np.log(v))
        gammas[left[is_accepted]] = d * v[is_accepted]
        left, attempt = left[~is_accepted], attempt + 1
    if shape < 1:
        last = derive_rng_key(keys, np.array([1], np.uint64))
        gammas *= (1.0 - to_unit(random_words(last, np.zeros(1, np.uint64)))) ** (1 / shape)
    return gammas.reshape(len(rng_keys), num_numbers)


def check_fill(name: str, fill: Fill) -> Colour:
    """Return a colour as red, green and blue, or raise ValueError."""
    values = [0.0] * 3 if fill is None else [float(fill)] * 3 if isinstance(fill, int | float) else list(fill)
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or not all(0 <= value <= 255 for value in values):
        raise ValueError(f"{name} must be a number from 0 to 255 or three of them, got {fill!r}")
    red, green, blue = map(int, values)
    return red, green, blue


def check_interpolation(interpolation: object) -> str:
    """Return the name of an interpolation, which may be a torchvision or Pillow constant, or raise ValueError."""
    value = getattr(interpolation, "value", interpolation)
    for name, number in INTERPOLATIONS.items():
        if value in (name, number):
            return name
    raise ValueError(f"interpolation must be 'nearest', 'bilinear' or 'bicubic', got {interpolation!r}")
