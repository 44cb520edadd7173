"""Augment images automatically, with torchvision's names, magnitudes and distributions, and with Pillow's pixels.

AutoAugment: arxiv.org/abs/1805.09501. RandAugment: arxiv.org/abs/1909.13719. TrivialAugment: arxiv.org/abs/2103.10158.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.kernel import operations as codes
from shardio.kernel.records import OPERATION
from shardio.order import Words, derive_rng_key, random_words, to_unit
from shardio.transforms.geometry import Color, Fill, check_fill, check_interpolation
from shardio.transforms.pixels import mask_of
from shardio.transforms.transform import PixelTransform, draw_units, to_integers
from shardio.transforms.warps import Matrix, make_affine_matrix, make_rotation_matrix, make_warps
from shardio.values import check_integer

__all__ = ["AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"]


class Strength(NamedTuple):
    """The magnitudes of an operation: evenly spaced values.

    Attributes:
        last: The last value.
        first: The first value.
        side: The side that the values are relative to: the image's height (0) or width (1); None for neither.
        is_signed: Whether magnitudes are negated at random, with probability 0.5.
    """

    last: float
    first: float = 0.0
    side: int | None = None
    is_signed: bool = True


NUM_STRENGTHS = 10
"""The number of strengths in AutoAugment and AugMix."""

MAX_DEPTH = 3
"""The maximum depth of an AugMix chain whose depth is random."""

Space = Mapping[str, Strength | None]
"""The operations to choose from, by torchvision's names; None for an operation without a magnitude."""


def _moves(shear: float, shift: float, angle: float, *, is_relative: bool = True) -> Space:
    x, y = Strength(shift, side=1 if is_relative else None), Strength(shift, side=0 if is_relative else None)
    return {
        "ShearX": Strength(shear),
        "ShearY": Strength(shear),
        "TranslateX": x,
        "TranslateY": y,
        "Rotate": Strength(angle),
    }


def _factors(last: float) -> Space:
    return dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), Strength(last))


def _tones(first_bits: float, last_bits: float) -> Space:
    bits, threshold = Strength(last_bits, first_bits, is_signed=False), Strength(0.0, 1.0, is_signed=False)
    return {"Posterize": bits, "Solarize": threshold, "AutoContrast": None, "Equalize": None}


AUTO_AUGMENT: Space = {**_moves(0.3, 150.0 / 331.0, 30.0), **_factors(0.9), **_tones(8, 4), "Invert": None}

RAND_AUGMENT: Space = {"Identity": None, **{name: AUTO_AUGMENT[name] for name in AUTO_AUGMENT if name != "Invert"}}

TRIVIAL_AUGMENT: Space = {
    "Identity": None,
    **_moves(0.99, 32.0, 135.0, is_relative=False),
    **_factors(0.99),
    **_tones(8, 2),
}

PARTIAL_AUG_MIX: Space = {**_moves(0.3, 1.0 / 3.0, 30.0), **_tones(4, 0)}

AUG_MIX: Space = {**PARTIAL_AUG_MIX, **_factors(0.9)}

_CODES_WITH_FACTOR = {
    "Brightness": codes.BRIGHTNESS,
    "Color": codes.SATURATION,
    "Contrast": codes.CONTRAST,
    "Sharpness": codes.SHARPNESS,
}
_CODES_WITHOUT_MAGNITUDE = {
    "Identity": codes.NONE,
    "AutoContrast": codes.AUTOCONTRAST,
    "Equalize": codes.EQUALIZE,
    "Invert": codes.INVERT,
}


def make_named_operations(
    name: str, magnitudes: NDArray[np.float64], sizes: Sizes, interpolation: str, fill: Color
) -> Operations:
    """Return a named operation for each of n images, OPERATION [n, 1].

    Args:
        name: torchvision's name for the operation.
        magnitudes: float64 [n], the operation's strength for each image.
        sizes: int64 [n, 2].
        interpolation: The name of the interpolation.
        fill: The color of pixels outside the image.
    """
    if name in _CODES_WITHOUT_MAGNITUDE:
        return make_operations(len(sizes), _CODES_WITHOUT_MAGNITUDE[name])
    if name in _CODES_WITH_FACTOR:
        return make_operations(len(sizes), _CODES_WITH_FACTOR[name], 1.0 + magnitudes)
    if name == "Posterize":
        return make_operations(len(sizes), codes.POSTERIZE, [mask_of(int(bits)) for bits in np.rint(magnitudes)])
    if name == "Solarize":
        return make_operations(len(sizes), codes.SOLARIZE, np.ceil(255.0 * magnitudes))
    drawn = zip(magnitudes.tolist(), sizes.tolist(), strict=True)
    matrices = [_make_matrix(name, magnitude, height, width) for magnitude, (height, width) in drawn]
    return make_warps(matrices, interpolation, fill)


def space_evenly(
    first: float, lasts: NDArray[np.float64], num_numbers: int, chosen: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return one element of ``torch.linspace(first, last, num_numbers)`` for each of n values of ``last``.

    Like torch, this function computes in 32 bits, from the nearer end, and rounds once. Thresholds such as 255 × 0.8
    depend on this rounding.

    Args:
        first: The first element of every sequence.
        lasts: float64 [n], the last element of each sequence.
        num_numbers: The length of each sequence.
        chosen: int64 [n], the index of the element to return from each sequence.
    """
    start, end = np.float64(np.float32(first)), lasts.astype(np.float32)
    step = ((end - np.float32(first)) / np.float32(num_numbers - 1)).astype(np.float64)
    from_start, from_end = start + step * chosen, end.astype(np.float64) - step * (num_numbers - 1 - chosen)
    return np.where(chosen < num_numbers // 2, from_start, from_end).astype(np.float32).astype(np.float64)


def _make_matrix(name: str, magnitude: float, height: int, width: int) -> Matrix | None:
    if name == "Rotate":
        return make_rotation_matrix(height, width, magnitude)
    kind, axis = name[:-1], "XY".index(name[-1])
    if kind == "Shear":
        angle = math.degrees(math.atan(magnitude))
        return make_affine_matrix((0.0, 0.0), 0.0, (0, 0), 1.0, (0.0, angle) if axis else (angle, 0.0))
    shift = int(magnitude)
    return make_affine_matrix((width * 0.5, height * 0.5), 0.0, (0, shift) if axis else (shift, 0), 1.0, (0.0, 0.0))


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
            chosen: int64 [n, k], the index of each operation in the space.
            bins: int64 [n, k], the index of each magnitude.
            signs: float64 [n, k], 1 or -1, for magnitudes that have a sign.
            sizes: int64 [n, 2].
        """
        operations = np.zeros(chosen.shape, OPERATION)
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


def _choose_signs(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(unit < 0.5, -1.0, 1.0)


class TrivialAugmentWide(Augmentation):
    """Apply one random operation of random strength to each image.

    Args:
        num_magnitude_bins: The number of different strengths.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The color of pixels outside the image: one number or three; black by default.
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: object = "nearest", fill: Fill = None) -> None:
        super().__init__(TRIVIAL_AUGMENT, num_magnitude_bins, interpolation, fill)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]."""
        unit = draw_units(rng_keys, 3)
        chosen, bins = to_integers(unit[:, :1], len(self._space)), to_integers(unit[:, 1:2], self.num_magnitude_bins)
        return self._make(chosen, bins, _choose_signs(unit[:, 2:]), sizes)


class RandAugment(Augmentation):
    """Apply several random operations of the same strength to each image.

    Args:
        num_ops: The number of operations.
        magnitude: The index of the strength, from 0.
        num_magnitude_bins: The number of different strengths.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The color of pixels outside the image: one number or three; black by default.
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


PolicyStep = tuple[str, float, int | None]
"""An operation, its probability, and the index of its strength (None if the operation has no strengths)."""

_POLICIES = {
    "imagenet": """
        Posterize 0.4 8, Rotate 0.6 9; Solarize 0.6 5, AutoContrast 0.6;
        Equalize 0.8, Equalize 0.6; Posterize 0.6 7, Posterize 0.6 6;
        Equalize 0.4, Solarize 0.2 4; Equalize 0.4, Rotate 0.8 8;
        Solarize 0.6 3, Equalize 0.6; Posterize 0.8 5, Equalize 1.0;
        Rotate 0.2 3, Solarize 0.6 8; Equalize 0.6, Posterize 0.4 6;
        Rotate 0.8 8, Color 0.4 0; Rotate 0.4 9, Equalize 0.6;
        Equalize 0.0, Equalize 0.8; Invert 0.6, Equalize 1.0;
        Color 0.6 4, Contrast 1.0 8; Rotate 0.8 8, Color 1.0 2;
        Color 0.8 8, Solarize 0.8 7; Sharpness 0.4 7, Invert 0.6;
        ShearX 0.6 5, Equalize 1.0; Color 0.4 0, Equalize 0.6;
        Equalize 0.4, Solarize 0.2 4; Solarize 0.6 5, AutoContrast 0.6;
        Invert 0.6, Equalize 1.0; Color 0.6 4, Contrast 1.0 8;
        Equalize 0.8, Equalize 0.6
    """,
    "cifar10": """
        Invert 0.1, Contrast 0.2 6; Rotate 0.7 2, TranslateX 0.3 9;
        Sharpness 0.8 1, Sharpness 0.9 3; ShearY 0.5 8, TranslateY 0.7 9;
        AutoContrast 0.5, Equalize 0.9; ShearY 0.2 7, Posterize 0.3 7;
        Color 0.4 3, Brightness 0.6 7; Sharpness 0.3 9, Brightness 0.7 9;
        Equalize 0.6, Equalize 0.5; Contrast 0.6 7, Sharpness 0.6 5;
        Color 0.7 7, TranslateX 0.5 8; Equalize 0.3, AutoContrast 0.4;
        TranslateY 0.4 3, Sharpness 0.2 6; Brightness 0.9 6, Color 0.2 8;
        Solarize 0.5 2, Invert 0.0; Equalize 0.2, AutoContrast 0.6;
        Equalize 0.2, Equalize 0.6; Color 0.9 9, Equalize 0.6;
        AutoContrast 0.8, Solarize 0.2 8; Brightness 0.1 3, Color 0.7 0;
        Solarize 0.4 5, AutoContrast 0.9; TranslateY 0.9 9, TranslateY 0.7 9;
        AutoContrast 0.9, Solarize 0.8 3; Equalize 0.8, Invert 0.1;
        TranslateY 0.7 9, AutoContrast 0.9
    """,
    "svhn": """
        ShearX 0.9 4, Invert 0.2; ShearY 0.9 8, Invert 0.7;
        Equalize 0.6, Solarize 0.6 6; Invert 0.9, Equalize 0.6;
        Equalize 0.6, Rotate 0.9 3; ShearX 0.9 4, AutoContrast 0.8;
        ShearY 0.9 8, Invert 0.4; ShearY 0.9 5, Solarize 0.2 6;
        Invert 0.9, AutoContrast 0.8; Equalize 0.6, Rotate 0.9 3;
        ShearX 0.9 4, Solarize 0.3 3; ShearY 0.8 8, Invert 0.7;
        Equalize 0.9, TranslateY 0.6 6; Invert 0.9, Equalize 0.6;
        Contrast 0.3 3, Rotate 0.8 4; Invert 0.8, TranslateY 0.0 2;
        ShearY 0.7 6, Solarize 0.4 8; Invert 0.6, Rotate 0.8 4;
        ShearY 0.3 7, TranslateX 0.9 3; ShearX 0.1 6, Invert 0.6;
        Solarize 0.7 2, TranslateY 0.6 7; ShearY 0.8 4, Invert 0.8;
        ShearX 0.7 9, TranslateY 0.8 3; ShearY 0.8 5, AutoContrast 0.7;
        ShearX 0.7 2, Invert 0.1
    """,
}
"""The pairs of operations of each policy: their names, probabilities, and the indices of their strengths, if any."""


def read_policy(name: str) -> list[tuple[PolicyStep, PolicyStep]]:
    """Return the pairs of operations that a policy chooses from."""

    def read(step: str) -> PolicyStep:
        operation, chance, *strength = step.split()
        return operation, float(chance), int(strength[0]) if strength else None

    pairs = (pair.split(",") for pair in _POLICIES[name].split(";"))
    return [(read(first), read(second)) for first, second in pairs]


class AutoAugment(Augmentation):
    """Apply a random pair of operations from a learned policy. Each operation has its own probability.

    Args:
        policy: "imagenet", "cifar10" or "svhn", or torchvision's AutoAugmentPolicy.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The color of pixels outside the image: one number or three; black by default.
    """

    def __init__(self, policy: object = "imagenet", interpolation: object = "nearest", fill: Fill = None) -> None:
        super().__init__(AUTO_AUGMENT, NUM_STRENGTHS, interpolation, fill)
        name = getattr(policy, "value", policy)
        if not isinstance(name, str) or name not in _POLICIES:
            raise ValueError(f"policy must be one of {', '.join(map(repr, _POLICIES))}, got {policy!r}")
        self.policy = name
        pairs, numbers = read_policy(self.policy), {name: number for number, name in enumerate(self._space)}
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


class AugMix(Augmentation):
    """Mix an image with the results of several random chains of operations.

    The operations give the same pixels as Pillow. torchvision converts Pillow images to tensors first, and its
    operations on tensors round differently. The results are mixed as in torchvision. In a Compose with fields, AugMix
    transforms only images.

    Args:
        severity: The maximum strength of an operation, from 1 to 10.
        mixture_width: The number of chains.
        chain_depth: The number of operations in a chain; if not positive, each chain gets a random number from 1 to 3.
        alpha: The chains' weights come from Dirichlet(alpha, …), and the image's weight from Beta(alpha, alpha).
        all_ops: Whether to also change brightness, color, contrast and sharpness.
        interpolation: "nearest", "bilinear" or "bicubic", or a torchvision or Pillow constant.
        fill: The color of pixels outside the image: one number or three; black by default.
    """

    equals_torchvisions = False

    def __init__(
        self,
        severity: int = 3,
        mixture_width: int = 3,
        chain_depth: int = -1,
        alpha: float = 1.0,
        all_ops: bool = True,
        interpolation: object = "bilinear",
        fill: Fill = None,
    ) -> None:
        super().__init__(AUG_MIX if all_ops else PARTIAL_AUG_MIX, NUM_STRENGTHS, interpolation, fill)
        self.severity = check_integer("severity", severity, at_least=1, below=NUM_STRENGTHS + 1)
        self.mixture_width = check_integer("mixture_width", mixture_width, at_least=1)
        self.chain_depth = check_integer("chain_depth", chain_depth)
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {alpha}")
        self.alpha, self.all_ops = float(alpha), all_ops

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, k]."""
        num_chains, depth = self.mixture_width, self.chain_depth if self.chain_depth > 0 else MAX_DEPTH
        unit = draw_units(rng_keys, num_chains * (1 + 3 * depth)).reshape(len(sizes), num_chains, 1 + 3 * depth)
        depths = to_integers(unit[..., :1], MAX_DEPTH) + 1 if self.chain_depth <= 0 else depth
        chosen, strengths, signs = np.split(unit[..., 1:], 3, axis=2)  # [n, chain, place] each
        operations = self._make(
            to_integers(chosen, len(self._space)).reshape(len(sizes), num_chains * depth),
            to_integers(strengths, self.severity).reshape(len(sizes), num_chains * depth),
            _choose_signs(signs).reshape(len(sizes), num_chains * depth),
            sizes,
        ).reshape(chosen.shape)
        operations["code"][np.arange(depth) >= np.broadcast_to(depths, chosen.shape)] = codes.NONE
        weights = self._draw_weights(rng_keys)
        chains = [
            np.concatenate([operations[:, i], make_operations(len(sizes), codes.ADD_TO_MIXTURE, weights[:, 1 + i])], 1)
            for i in range(num_chains)
        ]
        begin = make_operations(len(sizes), codes.BEGIN_MIXTURE, weights[:, 0])
        return np.concatenate([begin, *chains, make_operations(len(sizes), codes.END_MIXTURE)], axis=1)

    def _draw_weights(self, rng_keys: Words) -> NDArray[np.float64]:
        """Return the weights of n images and their chains, float64 [n, 1 + mixture_width]."""
        # Normalized gamma variates follow a Dirichlet distribution.
        gammas = draw_gammas(derive_rng_key(rng_keys, np.array([0], np.uint64)), self.alpha, 2 + self.mixture_width)
        own, chains = gammas[:, :2], gammas[:, 2:]
        own, chains = (each / each.sum(axis=1, keepdims=True) for each in (own, chains))
        # torchvision computes in 32 bits.
        scaled = chains.astype(np.float32) * own[:, 1:].astype(np.float32)
        return np.concatenate([own[:, :1].astype(np.float32), scaled], axis=1).astype(np.float64)


def draw_gammas(rng_keys: Words, shape: float, num_numbers: int) -> NDArray[np.float64]:
    """Return variates of the gamma distribution for each of n rng keys, float64 [n, num_numbers].

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Args:
        rng_keys: uint64 [n].
        shape: The distribution's shape, positive; the scale is 1.
        num_numbers: The number of variates for each rng key.
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
