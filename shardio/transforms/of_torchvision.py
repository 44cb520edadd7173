"""shardio's transforms for torchvision's, where the pixels of Pillow images stay the same.

GaussianBlur and RandomPerspective are not among them: some of their pixels differ by 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardio.transforms import foreign
from shardio.transforms.auto_augment import AutoAugment, RandAugment, TrivialAugmentWide
from shardio.transforms.choices import RandomApply, RandomChoice, RandomOrder
from shardio.transforms.colours import (
    ColorJitter,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from shardio.transforms.compose import Compose
from shardio.transforms.cropping import Pad, RandomCrop
from shardio.transforms.geometry import (
    CenterCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from shardio.transforms.warps import RandomAffine, RandomRotation

MODULES = frozenset(
    {
        *(f"torchvision.transforms.v2.{name}" for name in ("_auto_augment", "_color", "_container", "_geometry")),
        *(f"torchvision.transforms.{name}" for name in ("autoaugment", "transforms")),
    }
)
"""Where torchvision defines these transforms. A subclass of the user's may do anything."""


def replace_torchvision(theirs: Any) -> Callable[[Any], Any] | None:
    """Return the transform of shardio's that equals one of torchvision's, or None if there is none.

    Raises:
        AttributeError, TypeError, ValueError: If shardio's does not have its settings.
    """
    if type(theirs).__module__ not in MODULES:
        return None
    make = _TRANSFORMS.get(type(theirs).__name__)
    return None if make is None else make(theirs)


def _resize(theirs: Any) -> Resize:
    return Resize(theirs.size, theirs.interpolation, theirs.max_size, antialias=True)


def _random_resized_crop(theirs: Any) -> RandomResizedCrop:
    resampling = {"interpolation": theirs.interpolation, "antialias": True}
    return RandomResizedCrop(theirs.size, tuple(theirs.scale), tuple(theirs.ratio), **resampling)


def _random_crop(theirs: Any) -> RandomCrop:
    padding = theirs.padding
    if padding is not None and ".v2." in type(theirs).__module__:
        left, right, top, bottom = padding  # v2 keeps them in this order, and takes them in another one.
        padding = left, top, right, bottom
    return RandomCrop(theirs.size, padding, theirs.pad_if_needed, theirs.fill, theirs.padding_mode)


def _rotation(theirs: Any) -> RandomRotation | None:
    if theirs.expand:
        return None
    return RandomRotation(theirs.degrees, theirs.interpolation, center=theirs.center, fill=theirs.fill)


def _affine(theirs: Any) -> RandomAffine:
    geometry = theirs.degrees, theirs.translate, theirs.scale, theirs.shear
    return RandomAffine(*geometry, theirs.interpolation, theirs.fill, theirs.center)


def _rand_augment(theirs: Any) -> RandAugment:
    numbers = theirs.num_ops, theirs.magnitude, theirs.num_magnitude_bins
    return RandAugment(*numbers, theirs.interpolation, theirs.fill)


def _inner(theirs: Any) -> list[Any]:
    """Return the transforms of shardio's for a choice's.

    Raises:
        ValueError: If there is none for one of them.
    """
    return [_replace_part(each) for each in theirs.transforms]


def _replace_part(theirs: Any) -> Any:
    steps = foreign.steps_of(theirs)
    found = replace_torchvision(theirs) if steps is None else Compose([_replace_part(each) for each in steps])
    if found is None:
        raise ValueError(f"there is no transform for {theirs}")
    return found


_TRANSFORMS: dict[str, Callable[[Any], Callable[[Any], Any] | None]] = {
    "RandomResizedCrop": _random_resized_crop,
    "Resize": _resize,
    "CenterCrop": lambda theirs: CenterCrop(theirs.size),
    "RandomCrop": _random_crop,
    "Pad": lambda theirs: Pad(theirs.padding, theirs.fill, theirs.padding_mode),
    "RandomHorizontalFlip": lambda theirs: RandomHorizontalFlip(theirs.p),
    "RandomVerticalFlip": lambda theirs: RandomVerticalFlip(theirs.p),
    "RandomRotation": _rotation,
    "RandomAffine": _affine,
    "ColorJitter": lambda theirs: ColorJitter(theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue),
    "RandomGrayscale": lambda theirs: RandomGrayscale(theirs.p),
    "RandomInvert": lambda theirs: RandomInvert(theirs.p),
    "RandomAutocontrast": lambda theirs: RandomAutocontrast(theirs.p),
    "RandomEqualize": lambda theirs: RandomEqualize(theirs.p),
    "RandomSolarize": lambda theirs: RandomSolarize(theirs.threshold, theirs.p),
    "RandomPosterize": lambda theirs: RandomPosterize(theirs.bits, theirs.p),
    "RandomAdjustSharpness": lambda theirs: RandomAdjustSharpness(theirs.sharpness_factor, theirs.p),
    "RandAugment": _rand_augment,
    "TrivialAugmentWide": lambda theirs: TrivialAugmentWide(
        theirs.num_magnitude_bins, theirs.interpolation, theirs.fill
    ),
    "AutoAugment": lambda theirs: AutoAugment(theirs.policy, theirs.interpolation, theirs.fill),
    "RandomApply": lambda theirs: RandomApply(_inner(theirs), theirs.p),
    "RandomChoice": lambda theirs: RandomChoice(
        _inner(theirs), theirs.probabilities if hasattr(theirs, "probabilities") else theirs.p
    ),
    "RandomOrder": lambda theirs: RandomOrder(_inner(theirs)),
}
"""How to make shardio's transform, by the name of torchvision's class."""
