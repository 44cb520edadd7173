"""Automatic augmentation with torchvision's names, arguments, magnitudes and distributions, and the pixels of Pillow.

AutoAugment: arxiv.org/abs/1805.09501. RandAugment: arxiv.org/abs/1909.13719. TrivialAugment: arxiv.org/abs/2103.10158.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.colours import mask_of
from shardio.transforms.matrices import Matrix, make_affine_matrix, make_rotation_matrix
from shardio.transforms.pixel_transform import PixelTransform, draw_units
from shardio.values import check_integer

Fill = float | Sequence[float] | None


class Strength(NamedTuple):
    """The magnitudes of an operation: numbers at equal distances.

    Attributes:
        last: The last number.
        first: The first number.
        side: What the numbers are relative to: nothing, or the image's height (0) or width (1).
        is_signed: Whether half of the magnitudes are negated.
    """

    last: float
    first: float = 0.0
    side: int | None = None
    is_signed: bool = True


Space = Mapping[str, Strength | None]
"""The operations to choose from, by torchvision's names; None for those without a magnitude."""

_WHOLE: Space = {"Posterize": Strength(4, 8, is_signed=False), "Solarize": Strength(0.0, 1.0, is_signed=False)}

RAND_AUGMENT: Space = {
    "Identity": None,
    "ShearX": Strength(0.3),
    "ShearY": Strength(0.3),
    "TranslateX": Strength(150.0 / 331.0, side=1),
    "TranslateY": Strength(150.0 / 331.0, side=0),
    "Rotate": Strength(30.0),
    "Brightness": Strength(0.9),
    "Color": Strength(0.9),
    "Contrast": Strength(0.9),
    "Sharpness": Strength(0.9),
    **_WHOLE,
    "AutoContrast": None,
    "Equalize": None,
}

TRIVIAL_AUGMENT: Space = {
    "Identity": None,
    "ShearX": Strength(0.99),
    "ShearY": Strength(0.99),
    "TranslateX": Strength(32.0),
    "TranslateY": Strength(32.0),
    "Rotate": Strength(135.0),
    "Brightness": Strength(0.99),
    "Color": Strength(0.99),
    "Contrast": Strength(0.99),
    "Sharpness": Strength(0.99),
    **_WHOLE,
    "Posterize": Strength(2, 8, is_signed=False),
    "AutoContrast": None,
    "Equalize": None,
}

_FACTORS = {
    "Brightness": codes.BRIGHTNESS,
    "Color": codes.SATURATION,
    "Contrast": codes.CONTRAST,
    "Sharpness": codes.SHARPNESS,
}
_PLAIN = {"Identity": codes.NONE, "AutoContrast": codes.AUTOCONTRAST, "Equalize": codes.EQUALIZE}


class _Augmentation(PixelTransform):
    """The base class: operations of a space."""

    def __init__(self, space: Space, num_magnitude_bins: int, interpolation: object, fill: Fill) -> None:
        if getattr(interpolation, "value", interpolation) != "nearest":
            raise ValueError(
                f"interpolation must be 'nearest', got {interpolation!r}: for others, use torchvision's "
                f"{type(self).__name__}"
            )
        self.num_magnitude_bins = check_integer("num_magnitude_bins", num_magnitude_bins, at_least=2)
        self.fill = fill
        self._space, self._fill = space, _check_fill(fill)

    def _make(
        self, chosen: NDArray[np.int64], bins: NDArray[np.int64], signs: NDArray[np.float64], sizes: Sizes
    ) -> Operations:
        """Return an operation for each of n images, OPERATION [n, 1].

        Args:
            chosen: int64 [n], the number of each operation in the space.
            bins: int64 [n], the number of each magnitude.
            signs: float64 [n], 1 or -1, for magnitudes that have a sign.
            sizes: int64 [n, 2].
        """
        operations = make_operations(len(sizes), codes.NONE)
        for number, (name, strength) in enumerate(self._space.items()):
            rows = np.flatnonzero(chosen == number)
            if not rows.size:
                continue
            magnitudes = np.zeros(len(rows))
            if strength is not None:
                lasts = np.full(len(rows), strength.last)
                if strength.side is not None:
                    lasts *= sizes[rows, strength.side]
                magnitudes = space_evenly(strength.first, lasts, self.num_magnitude_bins, bins[rows])
                magnitudes *= signs[rows] if strength.is_signed else 1
            operations[rows] = make_named_operations(name, magnitudes, sizes[rows], self._fill)
        return operations


class TrivialAugmentWide(_Augmentation):
    """Apply one random operation of random strength to each image.

    Args:
        num_magnitude_bins: The number of different strengths.
        interpolation: "nearest".
        fill: The colour of pixels outside the image: one number or three; black by default.
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: object = "nearest", fill: Fill = None) -> None:
        super().__init__(TRIVIAL_AUGMENT, num_magnitude_bins, interpolation, fill)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit = draw_units(rng_keys, 3)
        chosen, bins = _choose(unit[:, 0], len(self._space)), _choose(unit[:, 1], self.num_magnitude_bins)
        return self._make(chosen, bins, np.where(unit[:, 2] < 0.5, -1.0, 1.0), sizes)

    def __repr__(self) -> str:
        return f"TrivialAugmentWide(num_magnitude_bins={self.num_magnitude_bins}, fill={self.fill})"


class RandAugment(_Augmentation):
    """Apply some random operations of one strength to each image.

    Args:
        num_ops: The number of operations.
        magnitude: The number of the strength, from 0.
        num_magnitude_bins: The number of different strengths.
        interpolation: "nearest".
        fill: The colour of pixels outside the image: one number or three; black by default.
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: object = "nearest",
        fill: Fill = None,
    ) -> None:
        super().__init__(RAND_AUGMENT, num_magnitude_bins, interpolation, fill)
        self.num_ops = check_integer("num_ops", num_ops, at_least=0)
        self.magnitude = check_integer("magnitude", magnitude, at_least=0)
        if self.magnitude >= self.num_magnitude_bins:
            raise ValueError(f"magnitude must be below num_magnitude_bins={num_magnitude_bins}, got {magnitude}")

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, num_ops]."""
        unit = draw_units(rng_keys, 2 * self.num_ops)
        bins = np.full(len(sizes), self.magnitude)
        made = [
            self._make(
                _choose(unit[:, 2 * i], len(self._space)), bins, np.where(unit[:, 2 * i + 1] < 0.5, -1.0, 1.0), sizes
            )
            for i in range(self.num_ops)
        ]
        return np.concatenate([*made, make_operations(len(sizes), codes.NONE)][: max(self.num_ops, 1)], axis=1)

    def __repr__(self) -> str:
        return (
            f"RandAugment(num_ops={self.num_ops}, magnitude={self.magnitude}, "
            f"num_magnitude_bins={self.num_magnitude_bins}, fill={self.fill})"
        )


AUGMENTATIONS: frozenset[type] = frozenset({RandAugment, TrivialAugmentWide})
"""The transforms of this module."""


def make_named_operations(
    name: str, magnitudes: NDArray[np.float64], sizes: Sizes, fill: tuple[int, int, int]
) -> Operations:
    """Return an operation of torchvision's automatic augmentation for each of n images, OPERATION [n, 1].

    Args:
        name: Its name there.
        magnitudes: float64 [n], its strength for each image.
        sizes: int64 [n, 2].
        fill: The colour of pixels outside the image.
    """
    if name in _PLAIN:
        return make_operations(len(sizes), _PLAIN[name])
    if name in _FACTORS:
        return make_operations(len(sizes), _FACTORS[name], 1.0 + magnitudes)
    if name == "Posterize":
        return make_operations(len(sizes), codes.POSTERIZE, [mask_of(int(bits)) for bits in np.rint(magnitudes)])
    if name == "Solarize":
        return make_operations(len(sizes), codes.SOLARIZE, np.ceil(255.0 * magnitudes))
    operations = make_operations(len(sizes), codes.NONE)
    for row, (magnitude, (height, width)) in enumerate(zip(magnitudes.tolist(), sizes.tolist(), strict=True)):
        matrix = _make_matrix(name, magnitude, height, width)
        if matrix is not None:
            operations[row, 0] = (codes.AFFINE, (*matrix, *fill, codes.NEAREST, 0, 0))
    return operations


def space_evenly(
    first: float, lasts: NDArray[np.float64], num_numbers: int, chosen: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return numbers of torch.linspace(first, last, num_numbers), which computes with 32 bits, for several ``lasts``.

    It counts from the nearer end, and rounds once. A threshold such as 255 × 0.8 depends on that.

    Args:
        first: The first number of all.
        lasts: float64 [n], the last number of each.
        num_numbers: How many numbers each has.
        chosen: int64 [n], which number of each to return.
    """
    start, end = np.float64(np.float32(first)), lasts.astype(np.float32)
    step = ((end - np.float32(first)) / np.float32(num_numbers - 1)).astype(np.float64)
    from_start, from_end = start + step * chosen, end.astype(np.float64) - step * (num_numbers - 1 - chosen)
    return np.where(chosen < num_numbers // 2, from_start, from_end).astype(np.float32).astype(np.float64)


def _make_matrix(name: str, magnitude: float, height: int, width: int) -> Matrix | None:
    middle = (width * 0.5, height * 0.5)
    angle = math.degrees(math.atan(magnitude))
    match name:
        case "ShearX":
            return make_affine_matrix((0.0, 0.0), 0.0, (0, 0), 1.0, (angle, 0.0))
        case "ShearY":
            return make_affine_matrix((0.0, 0.0), 0.0, (0, 0), 1.0, (0.0, angle))
        case "TranslateX":
            return make_affine_matrix(middle, 0.0, (int(magnitude), 0), 1.0, (0.0, 0.0))
        case "TranslateY":
            return make_affine_matrix(middle, 0.0, (0, int(magnitude)), 1.0, (0.0, 0.0))
    assert name == "Rotate", f"there is no operation {name}"
    return make_rotation_matrix(height, width, magnitude)


def _choose(unit: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return integers from 0 to below ``count`` for numbers from 0 to below 1."""
    return np.minimum((unit * count).astype(np.int64), count - 1)


def _check_fill(fill: Fill) -> tuple[int, int, int]:
    values = [0.0] * 3 if fill is None else [float(fill)] * 3 if isinstance(fill, int | float) else list(fill)
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or not all(0 <= value <= 255 for value in values):
        raise ValueError(f"fill must be a number from 0 to 255 or three of them, got {fill!r}")
    red, green, blue = map(int, values)
    return red, green, blue
