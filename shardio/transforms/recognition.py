"""Replace the leading steps of another library's pipeline with shardio's transforms, which extend crop plans.

shardio's transforms draw from the same distributions, as a function of the sample, and give the same pixels. The
transforms of two libraries are replaced:

- torchvision, on Pillow images: crops, resizes, flips, rotations, colors and automatic augmentations. torchvision
  resizes such images with Pillow, which shardio matches with ``antialias=True``. (Pillow 13 resizes some crops
  vertically first. shardio always resizes horizontally first, as earlier versions of Pillow do, so these crops may
  differ by 1: see docs/decisions/pixels.md.) Steps on tensors are not replaced, because torchvision's own resize
  differs from Pillow's by 1 in 4 % of the values. GaussianBlur and RandomPerspective are not replaced, because some of
  shardio's pixels differ from torchvision's by 1.
- Albumentations, on arrays: RandomResizedCrop and Resize with OpenCV's INTER_LINEAR, which never averages, and
  HorizontalFlip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from shardio.transforms import automatic, geometry, pixels, warps
from shardio.transforms.compose import Choice, Compose, RandomApply, RandomChoice, RandomOrder
from shardio.transforms.geometry import PlainRandomResizedCrop, PlainResize, RandomHorizontalFlip
from shardio.transforms.transform import Transform, as_pillow, steps_of

__all__ = ["Decode", "is_made_for_pillow", "replace_leading"]

Decode = Literal["array", "pil"]
"""The input of a dataset's transform: arrays or Pillow images."""

_NAMED = {name: vars(module)[name] for module in (automatic, geometry, pixels, warps) for name in module.__all__}

_EQUAL: dict[str, type[Transform]] = {
    name: kind for name, kind in _NAMED.items() if issubclass(kind, Transform) and kind.equals_torchvisions
}
"""shardio's equivalents of torchvision's transforms, by name."""

_CHOICES: dict[str, type[Choice]] = {kind.__name__: kind for kind in (RandomApply, RandomChoice, RandomOrder)}

_TORCHVISION_MODULES = frozenset(
    {
        *(f"torchvision.transforms.v2.{name}" for name in ("_auto_augment", "_color", "_container", "_geometry")),
        *(f"torchvision.transforms.{name}" for name in ("autoaugment", "transforms")),
    }
)
"""The modules in which torchvision defines these transforms. Subclasses in other modules may behave differently."""

_ALBUMENTATIONS = "albumentations.augmentations."

_TENSOR_CONVERSIONS = frozenset({"ToTensor", "PILToTensor", "MaybePILToTensor", "ToImage", "ToNumpy"})
"""The classes that convert Pillow images."""

_PILLOW_PIPELINES = ("torchvision.transforms.", "timm.data.")

_INTER_LINEAR = 1
"""OpenCV's number for bilinear interpolation."""


def replace_leading(transform: Callable[[Any], Any] | None, decode: Decode) -> Compose | None:
    """Replace the leading steps of another library's pipeline with shardio's transforms. The result accepts arrays.

    Args:
        transform: A dataset's transform.
        decode: Whether the transform accepts arrays or Pillow images.

    Returns:
        The pipeline, or None if shardio does not recognize the transform's first step.
    """
    steps = list(_flatten(transform))
    own = list[Callable[[Any], Any]]()
    for step in steps:
        if (found := recognize(step, decode)) is None:
            break
        own.append(found)
    if not own:
        return None
    return Compose([*own, *([as_pillow] if decode == "pil" else []), *steps[len(own) :]])


def is_made_for_pillow(transform: Callable[[Any], Any] | None) -> bool:
    """Return whether a torchvision or timm pipeline was made for the Pillow images of torchvision's datasets.

    In such a pipeline, the step that converts the image to a tensor is not the first one. Other pipelines may expect
    tensors, and shardio's own transforms do not accept Pillow images.
    """
    steps = list(_flatten(transform))
    if any(isinstance(step, Transform | Compose) for step in steps):
        return False
    kinds = (base for step in steps[1:] for base in type(step).__mro__)
    return any(kind.__name__ in _TENSOR_CONVERSIONS and kind.__module__.startswith(_PILLOW_PIPELINES) for kind in kinds)


def _flatten(transform: Any) -> Iterator[Any]:
    inner = steps_of(transform)
    if inner is None and _is_mere_sequence(transform):
        inner = transform.transforms
    if inner is not None:
        for each in inner:
            yield from _flatten(each)
    elif transform is not None:
        yield transform


def _is_mere_sequence(transform: Any) -> bool:
    """Return whether a transform is an Albumentations Compose that has no boxes or points and only calls its steps."""
    kind = type(transform)
    return bool(
        f"{kind.__module__}.{kind.__qualname__}" == "albumentations.core.composition.Compose"
        and transform.p == 1
        and not transform.processors
        and not getattr(transform, "save_applied_params", False)
    )


def recognize(theirs: Any, decode: Decode) -> Callable[[Any], Any] | None:
    """Return shardio's equivalent of another library's transform, or None if shardio has no equivalent."""
    kind = type(theirs)
    try:
        if decode == "pil":
            return _replace_torchvisions(theirs)
        if kind.__module__.startswith(_ALBUMENTATIONS):
            return _replace_albumentations(kind.__name__, theirs)
    except (AttributeError, TypeError, ValueError):  # shardio's transform does not support the settings.
        return None
    return None


def _replace_torchvisions(theirs: Any) -> Callable[[Any], Any] | None:
    kind = type(theirs)
    if kind.__module__ not in _TORCHVISION_MODULES:
        return None
    if (own := _EQUAL.get(kind.__name__)) is not None:
        return own.from_torchvision(theirs)
    if (choice := _CHOICES.get(kind.__name__)) is None:
        return None
    make: Any = choice
    chances = [getattr(theirs, name) for name in ("probabilities", "p") if hasattr(theirs, name)]
    found: Choice = make([_replace_part(each) for each in theirs.transforms], *chances[:1])
    return found


def _replace_part(theirs: Any) -> Any:
    steps = steps_of(theirs)
    found = _replace_torchvisions(theirs) if steps is None else Compose([_replace_part(each) for each in steps])
    if found is None:
        raise ValueError(f"there is no transform for {theirs}")
    return found


def _replace_albumentations(name: str, transform: Any) -> Transform | None:
    match name:
        case "RandomResizedCrop" if _is_plain(transform):
            return PlainRandomResizedCrop(transform.size, tuple(transform.scale), tuple(transform.ratio))
        case "Resize" if _is_plain(transform):
            return PlainResize((transform.height, transform.width))
        case "HorizontalFlip":
            return RandomHorizontalFlip(transform.p)
    return None


def _is_plain(transform: Any) -> bool:
    return bool(transform.p == 1 and transform.interpolation == _INTER_LINEAR and transform.area_for_downscale is None)
