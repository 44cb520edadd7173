"""Automatic augmentation with torchvision's names, arguments, magnitudes and distributions, and the pixels of Pillow.

AutoAugment: arxiv.org/abs/1805.09501. RandAugment: arxiv.org/abs/1909.13719. TrivialAugment: arxiv.org/abs/2103.10158.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.augmentation_space import (
    AUTO_AUGMENT,
    RAND_AUGMENT,
    TRIVIAL_AUGMENT,
    Space,
    make_named_operations,
    space_evenly,
)
from shardio.transforms.drawing import draw_units, to_integers
from shardio.transforms.fills import Fill, check_fill
from shardio.transforms.interpolations import check_interpolation
from shardio.transforms.pixel_transform import PixelTransform
from shardio.transforms.policies import NUM_STRENGTHS, POLICIES
from shardio.values import check_integer


class Augmentation(PixelTransform):
    """The base class of automatic augmentations, which draw operations from a space."""

    def __init__(self, space: Space, num_magnitude_bins: int, interpolation: object, fill: Fill) -> None:
        self.num_magnitude_bins = check_integer("num_magnitude_bins", num_magnitude_bins, at_least=2)
        self.interpolation = check_interpolation(interpolation)
        self.fill = fill
        self._space, self._fill = space, check_fill("fill", fill)

    def _make(
        self, chosen: NDArray[np.int64], bins: NDArray[np.int64], signs: NDArray[np.float64], sizes: Sizes
    ) -> Operations:
        """Return k operations for each of n images, OPERATION [n, k].

        Args:
            chosen: int64 [n, k], the number of each operation in the space.
            bins: int64 [n, k], the number of each magnitude.
            signs: float64 [n, k], 1 or -1, for magnitudes that have a sign.
            sizes: int64 [n, 2].
        """
        operations = np.zeros(chosen.shape, codes.OPERATION)
        for number, (name, strength) in enumerate(self._space.items()):
            places = rows, _ = np.nonzero(chosen == number)
            if not rows.size:
                continue
            magnitudes = np.zeros(len(rows))
            if strength is not None:
                lasts = np.full(len(rows), strength.last)
                if strength.side is not None:
                    lasts *= sizes[rows, strength.side]
                magnitudes = space_evenly(strength.first, lasts, self.num_magnitude_bins, bins[places])
                magnitudes *= signs[places] if strength.is_signed else 1
            made = make_named_operations(name, magnitudes, sizes[rows], self.interpolation, self._fill)
            operations[places] = made[:, 0]
        return operations

    def _show_pixels(self) -> str:
        return f"interpolation={self.interpolation!r}, fill={self.fill}"


class TrivialAugmentWide(Augmentation):
    """Apply one random operation of random strength to each image.

    Args:
        num_magnitude_bins: The number of different strengths.
        interpolation: "nearest", "bilinear" or "bicubic", or the constant of torchvision's or Pillow's.
        fill: The colour of pixels outside the image: one number or three; black by default.
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: object = "nearest", fill: Fill = None) -> None:
        super().__init__(TRIVIAL_AUGMENT, num_magnitude_bins, interpolation, fill)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit = draw_units(rng_keys, 3)
        chosen, bins = to_integers(unit[:, :1], len(self._space)), to_integers(unit[:, 1:2], self.num_magnitude_bins)
        return self._make(chosen, bins, _choose_signs(unit[:, 2:]), sizes)

    def __repr__(self) -> str:
        return f"TrivialAugmentWide(num_magnitude_bins={self.num_magnitude_bins}, {self._show_pixels()})"


class RandAugment(Augmentation):
    """Apply some random operations of one strength to each image.

    Args:
        num_ops: The number of operations.
        magnitude: The number of the strength, from 0.
        num_magnitude_bins: The number of different strengths.
        interpolation: "nearest", "bilinear" or "bicubic", or the constant of torchvision's or Pillow's.
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
        chosen = to_integers(unit[:, ::2], len(self._space))
        return self._make(chosen, np.full_like(chosen, self.magnitude), _choose_signs(unit[:, 1::2]), sizes)

    def __repr__(self) -> str:
        return (
            f"RandAugment(num_ops={self.num_ops}, magnitude={self.magnitude}, "
            f"num_magnitude_bins={self.num_magnitude_bins}, {self._show_pixels()})"
        )


class AutoAugment(Augmentation):
    """Apply a random pair of operations of a policy that was found by a search, each of the two with its probability.

    Args:
        policy: "imagenet", "cifar10" or "svhn", or torchvision's AutoAugmentPolicy.
        interpolation: "nearest", "bilinear" or "bicubic", or the constant of torchvision's or Pillow's.
        fill: The colour of pixels outside the image: one number or three; black by default.
    """

    def __init__(self, policy: object = "imagenet", interpolation: object = "nearest", fill: Fill = None) -> None:
        super().__init__(AUTO_AUGMENT, NUM_STRENGTHS, interpolation, fill)
        name = getattr(policy, "value", policy)
        if not isinstance(name, str) or name not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        self.policy = name
        pairs, numbers = POLICIES[self.policy], {name: number for number, name in enumerate(self._space)}
        self._chosen = np.array([[numbers[name] for name, _, _ in pair] for pair in pairs])  # [pair, 2]
        self._chances = np.array([[chance for _, chance, _ in pair] for pair in pairs])
        self._bins = np.array([[strength or 0 for _, _, strength in pair] for pair in pairs])

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 2]."""
        unit = draw_units(rng_keys, 5)
        pairs = to_integers(unit[:, 0], len(self._chosen))
        operations = self._make(self._chosen[pairs], self._bins[pairs], _choose_signs(unit[:, 3:]), sizes)
        operations["code"][unit[:, 1:3] >= self._chances[pairs]] = codes.NONE
        return operations

    def __repr__(self) -> str:
        return f"AutoAugment(policy={self.policy!r}, {self._show_pixels()})"


AUGMENTATIONS: frozenset[type] = frozenset({AutoAugment, RandAugment, TrivialAugmentWide})
"""The transforms of this module."""


def _choose_signs(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -1 or 1 for numbers from 0 to below 1."""
    return np.where(unit < 0.5, -1.0, 1.0)
