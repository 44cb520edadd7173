"""Recognition of torchvision's crops, resizes and flips, which shardio's own replace where the pixels are the same.

On Pillow images, torchvision resizes by Pillow, whose pixels shardio's transforms give with ``antialias=True``. So what
a pipeline of torchvision's begins with is drawn from the same distribution here, and only the part of an image that the
crop needs is decoded. (Pillow 13 resizes some crops down first and then across. shardio always resizes as earlier
versions do, so these crops may differ by 1: see decision 0027.) On tensors, torchvision's own resize differs from
Pillow's by 1 in 4 % of the values, so nothing is recognised there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardio.transforms import foreign
from shardio.transforms.compose import Compose
from shardio.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardio.transforms.transform import Geometry

_MODULES = ("torchvision.transforms.v2._geometry", "torchvision.transforms.transforms")


def plan_pillow_steps(transform: Callable[[Any], Any] | None) -> Compose | None:
    """Return a pipeline that takes arrays and gives what ``transform`` gives for Pillow images.

    Return None if it does not begin with a transform that is recognised.
    """
    steps = list(_flatten(transform))
    own = list[Geometry]()
    for step in steps:
        if (found := recognise(step)) is None:
            break
        own.append(found)
    return Compose([*own, as_pillow, *steps[len(own) :]]) if own else None


def recognise(transform: Any) -> Geometry | None:
    """Return the transform of shardio's that equals one of torchvision's on Pillow images; None if there is none."""
    kind = type(transform)
    if kind.__module__ not in _MODULES:  # A subclass of the user's may do anything.
        return None
    try:
        return _convert(kind.__name__, transform)
    except (AttributeError, TypeError, ValueError):  # Settings that shardio's transform does not have.
        return None


def as_pillow(image: Any) -> Any:
    """Return pixels as a Pillow image."""
    from PIL import Image

    return Image.fromarray(image)


def _convert(name: str, transform: Any) -> Geometry | None:
    match name:
        case "RandomResizedCrop":
            resampling = {"interpolation": transform.interpolation, "antialias": True}
            return RandomResizedCrop(transform.size, tuple(transform.scale), tuple(transform.ratio), **resampling)
        case "Resize" if transform.max_size is None:
            is_single = isinstance(transform.size, list) and len(transform.size) == 1
            size = transform.size[0] if is_single else transform.size
            return Resize(size, interpolation=transform.interpolation, antialias=True)
        case "CenterCrop":
            return CenterCrop(transform.size)
        case "RandomHorizontalFlip":
            return RandomHorizontalFlip(transform.p)
    return None


def _flatten(transform: Any) -> Iterator[Any]:
    """Yield the transforms in torchvision's sequences, at any depth."""
    if (inner := foreign.steps_of(transform)) is not None:
        for each in inner:
            yield from _flatten(each)
    elif transform is not None:
        yield transform
