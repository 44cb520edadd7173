"""The operations of torchvision's automatic augmentation: which there are, and how strong they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.transforms.colours import mask_of
from shardio.transforms.fills import Colour
from shardio.transforms.matrices import Matrix, make_affine_matrix, make_rotation_matrix
from shardio.transforms.warps import make_warps


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

AUTO_AUGMENT: Space = {**{name: RAND_AUGMENT[name] for name in RAND_AUGMENT if name != "Identity"}, "Invert": None}

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

PARTIAL_AUG_MIX: Space = {
    "ShearX": Strength(0.3),
    "ShearY": Strength(0.3),
    "TranslateX": Strength(1.0 / 3.0, side=1),
    "TranslateY": Strength(1.0 / 3.0, side=0),
    "Rotate": Strength(30.0),
    "Posterize": Strength(0, 4, is_signed=False),
    "Solarize": Strength(0.0, 1.0, is_signed=False),
    "AutoContrast": None,
    "Equalize": None,
}

AUG_MIX: Space = {
    **PARTIAL_AUG_MIX,
    "Brightness": Strength(0.9),
    "Color": Strength(0.9),
    "Contrast": Strength(0.9),
    "Sharpness": Strength(0.9),
}

_FACTORS = {
    "Brightness": codes.BRIGHTNESS,
    "Color": codes.SATURATION,
    "Contrast": codes.CONTRAST,
    "Sharpness": codes.SHARPNESS,
}
_PLAIN = {
    "Identity": codes.NONE,
    "AutoContrast": codes.AUTOCONTRAST,
    "Equalize": codes.EQUALIZE,
    "Invert": codes.INVERT,
}


def make_named_operations(
    name: str, magnitudes: NDArray[np.float64], sizes: Sizes, interpolation: str, fill: Colour
) -> Operations:
    """Return an operation of torchvision's automatic augmentation for each of n images, OPERATION [n, 1].

    Args:
        name: Its name there.
        magnitudes: float64 [n], its strength for each image.
        sizes: int64 [n, 2].
        interpolation: The name of the interpolation.
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
    drawn = zip(magnitudes.tolist(), sizes.tolist(), strict=True)
    matrices = [_make_matrix(name, magnitude, height, width) for magnitude, (height, width) in drawn]
    return make_warps(matrices, interpolation, fill)


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
