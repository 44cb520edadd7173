"""Recognition of other libraries' transforms, which shardio's own replace where the pixels are the same.

What a pipeline begins with is then drawn from the same distribution, as a function of the sample, and only the part of
an image that the crop needs is decoded.

- torchvision's, on Pillow images: crops, resizes, flips, rotations, colours and automatic augmentations (see
  :mod:`shardio.transforms.of_torchvision`). It resizes by Pillow, whose pixels shardio gives with ``antialias=True``.
  (Pillow 13 resizes some crops down first and then across. shardio always resizes as earlier versions do, so these
  crops may differ by 1: see decision 0027.) Not on tensors, where torchvision's own resize differs from Pillow's by 1
  in 4 % of the values.
- Albumentations', on arrays: it resizes by OpenCV's INTER_LINEAR, which never averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from shardio.images import Resampling
from shardio.transforms import foreign
from shardio.transforms.compose import Compose
from shardio.transforms.geometry import RandomHorizontalFlip, RandomResizedCrop, Resize
from shardio.transforms.of_torchvision import replace_torchvision
from shardio.transforms.transform import Geometry, Transform

Decode = Literal["array", "pil"]
"""What a dataset's transform takes: arrays or Pillow images."""

_FROM_ALBUMENTATIONS = "albumentations.augmentations."
_CONVERSIONS = frozenset({"ToTensor", "PILToTensor", "MaybePILToTensor", "ToImage", "ToNumpy"})
"""The classes that convert Pillow images."""
_OF_PILLOW_USERS = ("torchvision.transforms.", "timm.data.")
_INTER_LINEAR = 1
"""OpenCV's number for it."""


class PlainRandomResizedCrop(RandomResizedCrop):
    """A RandomResizedCrop that never averages, whatever it shrinks: OpenCV's INTER_LINEAR."""

    _resampling: Resampling = "plain bilinear"


class PlainResize(Resize):
    """A Resize that never averages, whatever it shrinks: OpenCV's INTER_LINEAR."""

    _resampling: Resampling = "plain bilinear"


def replace_leading(transform: Callable[[Any], Any] | None, decode: Decode) -> Compose | None:
    """Return a pipeline of shardio's transforms and the rest of another library's, which takes arrays.

    Args:
        transform: A dataset's transform.
        decode: What it takes.

    Returns:
        The pipeline; None if the transform does not begin with one that is recognised.
    """
    steps = list(_flatten(transform))
    own = list[Callable[[Any], Any]]()
    for step in steps:
        if (found := recognise(step, decode)) is None:
            break
        own.append(found)
    if not own:
        return None
    return Compose([*own, *([foreign.as_pillow] if decode == "pil" else []), *steps[len(own) :]])


def is_made_for_pillow(transform: Callable[[Any], Any] | None) -> bool:
    """Return whether a pipeline of torchvision's or timm's was made for the Pillow images of torchvision's datasets.

    Such a pipeline converts the image to a tensor in a later step. A pipeline that never does so may expect tensors,
    and shardio's own transforms do not take Pillow images.
    """
    steps = list(_flatten(transform))
    if any(isinstance(step, Transform | Compose) for step in steps):
        return False
    kinds = (base for step in steps[1:] for base in type(step).__mro__)
    return any(kind.__name__ in _CONVERSIONS and kind.__module__.startswith(_OF_PILLOW_USERS) for kind in kinds)


def recognise(transform: Any, decode: Decode) -> Callable[[Any], Any] | None:
    """Return the transform of shardio's that equals another library's; None if there is none."""
    kind = type(transform)
    try:
        if decode == "pil":
            return replace_torchvision(transform)
        if kind.__module__.startswith(_FROM_ALBUMENTATIONS):
            return _replace_albumentations(kind.__name__, transform)
    except (AttributeError, TypeError, ValueError):  # Settings that shardio's transform does not have.
        return None
    return None


def _replace_albumentations(name: str, transform: Any) -> Geometry | None:
    match name:
        case "RandomResizedCrop" if _is_plain(transform):
            return PlainRandomResizedCrop(transform.size, tuple(transform.scale), tuple(transform.ratio))
        case "Resize" if _is_plain(transform):
            return PlainResize((transform.height, transform.width))
        case "HorizontalFlip":
            return RandomHorizontalFlip(transform.p)
    return None


def _is_plain(transform: Any) -> bool:
    """Return whether one of Albumentations' transforms is always applied, and always resizes by INTER_LINEAR."""
    return bool(transform.p == 1 and transform.interpolation == _INTER_LINEAR and transform.area_for_downscale is None)


def _flatten(transform: Any) -> Iterator[Any]:
    """Yield the transforms in another library's sequences, at any depth."""
    inner = foreign.steps_of(transform)
    if inner is None and _is_mere_sequence(transform):
        inner = transform.transforms
    if inner is not None:
        for each in inner:
            yield from _flatten(each)
    elif transform is not None:
        yield transform


def _is_mere_sequence(transform: Any) -> bool:
    """Return whether this is Albumentations' Compose, without boxes and the like, which calls transforms in order."""
    kind = type(transform)
    return bool(
        f"{kind.__module__}.{kind.__qualname__}" == "albumentations.core.composition.Compose"
        and transform.p == 1
        and not transform.processors
        and not getattr(transform, "save_applied_params", False)
    )
