"""Turn a dataset's transform into one crop plan where possible.

shardio's transforms become a plan, so only the part of an image that the crop needs is decoded. The leading steps of
another library's pipeline are first replaced by equal transforms of shardio, which draw from the same distribution as a
function of the sample:

- torchvision, on Pillow images: crops, resizes, flips, rotations, colours and automatic augmentations. torchvision
  resizes such images by Pillow, whose pixels shardio gives with ``antialias=True``. (Pillow 13 resizes some crops down
  first and then across. shardio always resizes as earlier versions do, so these crops may differ by 1: see
  docs/decisions/pixels.md.) Not on tensors, where torchvision's own resize differs from Pillow's by 1 in 4 % of the
  values. GaussianBlur and RandomPerspective are not replaced, because some of their pixels differ by 1.
- Albumentations, on arrays: it resizes by OpenCV's INTER_LINEAR, which never averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from types import FunctionType
from typing import Any, Literal

import numpy as np

from shardio.images import CropPlan, DecodedPicture, DecodeError, DecoderName, Picture, Resampling, sizes_of
from shardio.order import Words
from shardio.transforms import foreign
from shardio.transforms.annotations import FieldKind
from shardio.transforms.automatic import AUGMENTATIONS, AutoAugment, RandAugment, TrivialAugmentWide
from shardio.transforms.colours import (
    COLOURS,
    ColorJitter,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from shardio.transforms.compose import (
    CHOICES,
    Choice,
    Combination,
    Compose,
    MultiCrop,
    RandomApply,
    RandomChoice,
    RandomOrder,
    check_transform,
    consists_of_operations,
    draw_operations,
    inner_steps,
    keys_of_inner,
    parts_of,
    render_all,
    render_each,
    render_pictures,
    render_some,
)
from shardio.transforms.foreign import Calls
from shardio.transforms.geometry import (
    GEOMETRIES,
    CenterCrop,
    FiveCrop,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from shardio.transforms.transform import Geometry, Transform, as_pixels
from shardio.transforms.warps import WARPS, RandomAffine, RandomRotation

Decode = Literal["array", "pil"]
"""The input of a dataset's transform: arrays or Pillow images."""

BUILTINS = GEOMETRIES | COLOURS | AUGMENTATIONS | WARPS
"""shardio's transforms of single images, without subclasses, which may run other code."""

_TORCHVISION_MODULES = frozenset(
    {
        *(f"torchvision.transforms.v2.{name}" for name in ("_auto_augment", "_color", "_container", "_geometry")),
        *(f"torchvision.transforms.{name}" for name in ("autoaugment", "transforms")),
    }
)
"""The modules in which torchvision defines these transforms. Subclasses elsewhere may do anything."""

_ALBUMENTATIONS = "albumentations.augmentations."

_TENSOR_CONVERSIONS = frozenset({"ToTensor", "PILToTensor", "MaybePILToTensor", "ToImage", "ToNumpy"})
"""The classes that convert Pillow images."""

_PILLOW_PIPELINES = ("torchvision.transforms.", "timm.data.")

_INTER_LINEAR = 1
"""OpenCV's number of this interpolation."""


def count_crops(transform: Callable[[Any], Any] | None) -> int | None:
    """Return the number of results of each image, or None for a transform that is not a MultiCrop."""
    return len(transform.transforms) if isinstance(transform, MultiCrop) else None


def is_builtin(transform: Callable[[Any], Any] | None) -> bool:
    """Return whether a transform runs only shardio's code.

    This holds for None, for instances of the types in BUILTINS (not of their subclasses), and for combinations of
    these.
    """
    if isinstance(transform, Combination) and type(transform) in {Compose, MultiCrop, FiveCrop, *CHOICES}:
        return all(map(is_builtin, transform.transforms))
    return transform is None or type(transform) in BUILTINS


def others_in(transform: Callable[[Any], Any] | None) -> list[Callable[[Any], Any]]:
    """Return the transforms that are not shardio's own, in the order of their calls, including nested ones."""
    return [step for each in _crops_of(transform) for step in _steps(each) if not _is_ours(step)]


def field_kinds_of(transform: Callable[[Any], Any] | None) -> dict[str, FieldKind]:
    """Return the kind of each field that a dataset's transform changes; empty if it transforms only the image.

    Raises:
        TypeError: If crop plans cannot express some of the steps, because these would transform only an image.
    """
    if not isinstance(transform, Compose) or transform.fields is None:
        return {}
    steps = (step for step, _ in _steps_with_keys(transform, np.zeros(1, np.uint64)))
    other = next((step for step in steps if _kind_of(step) not in ("geometry", "pixels")), None)
    if other is not None:
        raise TypeError(
            f"a Compose with fields consists of shardio's own transforms, but {other!r} would transform only the "
            "image: leave it out, or transform the sample in the dataset's transform_sample= instead, without fields"
        )
    return transform.fields


def _is_ours(step: Any) -> bool:
    module = getattr(step if isinstance(step, FunctionType) else type(step), "__module__", "")
    return module.partition(".")[0] == __name__.partition(".")[0]


def refuse_pillow(transform: Callable[[Any], Any] | None) -> None:
    """Raise TypeError if the first transform is one of shardio's, which do not accept Pillow images."""
    for step in [next(_steps(each), None) for each in _crops_of(transform)]:
        if not isinstance(step, Transform):
            continue
        raise TypeError(
            f"{step!r} takes uint8 [height, width, 3] arrays, but decode='pil' gives it Pillow images: "
            "use decode='array', the default, or transforms that accept Pillow images"
        )


def _crops_of(transform: Callable[[Any], Any] | None) -> Sequence[Any]:
    return transform.transforms if isinstance(transform, MultiCrop) else [transform]


def _steps(transform: Any) -> Iterator[Callable[[Any], Any]]:
    if (inner := parts_of(transform)) is not None:
        for each in inner:
            yield from _steps(each)
    elif transform is not None:
        yield transform


def apply_transform(transform: Callable[[Any], Any], images: Sequence[Any], rng_keys: Words) -> list[Any]:
    """Transform n images, each with its own rng key. Arguments and errors are as in :func:`plan_transform`."""
    return render_all(*plan_transform(transform, images, rng_keys))


def plan_crops(
    transform: Callable[[Any], Any] | None, images: Sequence[Any], rng_keys: Words, calls: Calls | None = None
) -> list[tuple[list[Any], CropPlan | None]]:
    """Draw the parameters of a dataset's transform for n images.

    Arguments, errors and results are as in :func:`plan_transform`, with one result for each crop of a MultiCrop.
    """
    if not isinstance(transform, MultiCrop):
        return [plan_transform(transform, images, rng_keys, calls)]
    keys = [keys_of_inner(rng_keys, i) for i in range(len(transform.transforms))]
    return [plan_transform(each, images, own, calls) for each, own in zip(transform.transforms, keys, strict=True)]


def plan_transform(
    transform: Callable[[Any], Any] | None, images: Sequence[Any], rng_keys: Words, calls: Calls | None = None
) -> tuple[list[Any], CropPlan | None]:
    """Draw a transform's parameters for n images, and render only the images whose pixels it needs.

    Args:
        transform: One of shardio's transforms, any other callable, or None.
        images: Pictures, uint8 [height, width, 3] arrays, or any objects that other callables accept.
        rng_keys: uint64 [n], one rng key for each image. Each transform of a Compose derives its own keys.
        calls: Calls the other callables. By default, it leaves their random generators as they are.

    Returns:
        The images and the plan that renders them; None instead of a plan if the images are finished.

    Raises:
        DecodeError: If a picture must be rendered and cannot be decoded.
    """
    images, calls = list(images), calls or Calls()
    num_known = len(calls.decoder_names)
    plan = CropPlan.whole(sizes_of(images)) if images and isinstance(images[0], Picture) else None
    steps = _steps_with_keys(transform, rng_keys)
    for kind, group in groupby(steps, key=lambda step_and_keys: _kind_of(step_and_keys[0])):
        if kind == "other":
            callables, keys = zip(*group, strict=True)
            # Rendered one after the other: whole images are large, but a callable's results may be small.
            images, plan = calls.call(callables, render_each(images, plan, calls), keys[0]), None
            continue
        for step, step_keys in group:
            if kind == "geometry":
                images, plan = _extend(step, *_begin(step, images, plan, calls.decoder_names[num_known:]), step_keys)
            elif kind == "pixels":
                images, plan = _edit(step, *_begin(step, images, plan, calls.decoder_names[num_known:]), step_keys)
            elif kind == "choice":
                images, plan = _apply_chosen(step, list(render_each(images, plan, calls)), step_keys, calls), None
            else:
                images, plan = _apply(step, list(render_each(images, plan, calls)), step_keys), None
    return images, plan


def _kind_of(step: Callable[[Any], Any]) -> Literal["geometry", "pixels", "choice", "transform", "other"]:
    if isinstance(step, Geometry) and step.is_planned:
        return "geometry"
    if consists_of_operations(step):
        return "pixels"
    if isinstance(step, Choice):
        return "choice"
    return "transform" if isinstance(step, Transform) else "other"


def _extend(step: Any, images: list[Any], plan: CropPlan, step_keys: Words) -> tuple[list[Any], CropPlan | None]:
    if plan.operations is not None:
        images = render_pictures(images, plan)
        plan = CropPlan.whole(sizes_of(images))
    parameters = step.draw(plan.output_size, step_keys)
    images, plan = render_some(images, plan, np.flatnonzero(step.needs_pixels(plan, parameters)))
    return images, step.extend(plan, parameters)


def _edit(step: Any, images: list[Any], plan: CropPlan, step_keys: Words) -> tuple[list[Any], CropPlan]:
    return images, plan.edit(draw_operations(step, plan.output_size, step_keys))


def _begin(
    step: Any, images: list[Any], plan: CropPlan | None, decoder_names: Sequence[DecoderName]
) -> tuple[list[Any], CropPlan]:
    """Return images and their plan, by default a plan that leaves the images as they are.

    ``decoder_names`` has fewer than n names if the decoders are unknown.
    """
    if plan is not None:
        return images, plan
    arrays = [as_pixels(step, image) for image in images]
    is_known = len(decoder_names) >= len(arrays)
    pictures = list(map(DecodedPicture, arrays, *[decoder_names] * is_known))
    return list(pictures), CropPlan.whole(sizes_of(pictures))


def _apply(step: Any, images: list[Any], step_keys: Words) -> list[Any]:
    arrays = [step.as_input(image) for image in images]
    sizes = np.array([array.shape[:2] for array in arrays], dtype=np.int64).reshape(-1, 2)
    parameters = step.draw(sizes, step_keys)
    return [step.apply(array, row) for array, row in zip(arrays, parameters, strict=True)]


def _apply_chosen(choice: Any, images: list[Any], rng_keys: Words, calls: Calls) -> list[Any]:
    numbers = choice.choose(rng_keys)
    for chosen in numbers.T:
        for number, transform in enumerate(choice.transforms):
            rows = np.flatnonzero(chosen == number)
            if not rows.size:
                continue
            keys = keys_of_inner(rng_keys, number)[rows]
            try:
                changed = render_all(*plan_transform(transform, [images[row] for row in rows], keys, calls))
            except DecodeError as error:
                raise DecodeError(int(rows[error.row]), str(error)) from error
            except BaseException:  # User code may raise anything. Its row in this group becomes its row in the chunk.
                if calls.failed_row is not None:
                    calls.failed_row = int(rows[calls.failed_row])
                raise
            for row, image in zip(rows.tolist(), changed, strict=True):
                images[row] = image
    return images


def _steps_with_keys(transform: Any, rng_keys: Words) -> Iterator[tuple[Callable[[Any], Any], Words]]:
    """Yield the transforms of nested sequences, each with its own rng keys. A choice counts as one transform."""
    if (inner := inner_steps(transform)) is not None:
        for index, each in enumerate(inner):
            yield from _steps_with_keys(each, keys_of_inner(rng_keys, index))
    elif transform is not None:
        check_transform(transform)
        yield transform, rng_keys


def replace_leading(transform: Callable[[Any], Any] | None, decode: Decode) -> Compose | None:
    """Return a pipeline that replaces the leading steps of another library's by shardio's transforms, and takes arrays.

    Args:
        transform: A dataset's transform.
        decode: Whether it takes arrays or Pillow images.

    Returns:
        The pipeline; None if shardio does not recognise the transform's first step.
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
    """Return whether a pipeline of torchvision or timm was made for the Pillow images of torchvision's datasets.

    Such a pipeline converts the image to a tensor in a later step. A pipeline that never does so may expect tensors,
    and shardio's own transforms do not take Pillow images.
    """
    steps = list(_flatten(transform))
    if any(isinstance(step, Transform | Compose) for step in steps):
        return False
    kinds = (base for step in steps[1:] for base in type(step).__mro__)
    return any(kind.__name__ in _TENSOR_CONVERSIONS and kind.__module__.startswith(_PILLOW_PIPELINES) for kind in kinds)


def _flatten(transform: Any) -> Iterator[Any]:
    inner = foreign.steps_of(transform)
    if inner is None and _is_mere_sequence(transform):
        inner = transform.transforms
    if inner is not None:
        for each in inner:
            yield from _flatten(each)
    elif transform is not None:
        yield transform


def _is_mere_sequence(transform: Any) -> bool:
    """Return whether this is Albumentations' Compose, without boxes or points, which calls transforms in order."""
    kind = type(transform)
    return bool(
        f"{kind.__module__}.{kind.__qualname__}" == "albumentations.core.composition.Compose"
        and transform.p == 1
        and not transform.processors
        and not getattr(transform, "save_applied_params", False)
    )


def recognise(transform: Any, decode: Decode) -> Callable[[Any], Any] | None:
    """Return shardio's equal of another library's transform; None if there is none."""
    kind = type(transform)
    try:
        if decode == "pil":
            return replace_torchvision(transform)
        if kind.__module__.startswith(_ALBUMENTATIONS):
            return _replace_albumentations(kind.__name__, transform)
    except (AttributeError, TypeError, ValueError):  # Settings that shardio's transform does not have.
        return None
    return None


def replace_torchvision(theirs: Any) -> Callable[[Any], Any] | None:
    """Return shardio's equal of a torchvision transform, or None if there is none.

    Raises:
        AttributeError, TypeError, ValueError: If shardio's transform does not have its settings.
    """
    if type(theirs).__module__ not in _TORCHVISION_MODULES:
        return None
    make = _REPLACEMENTS.get(type(theirs).__name__)
    return None if make is None else make(theirs)


def _resize(theirs: Any) -> Resize:
    return Resize(theirs.size, theirs.interpolation, theirs.max_size, antialias=True)


def _random_resized_crop(theirs: Any) -> RandomResizedCrop:
    resampling = {"interpolation": theirs.interpolation, "antialias": True}
    return RandomResizedCrop(theirs.size, tuple(theirs.scale), tuple(theirs.ratio), **resampling)


def _random_crop(theirs: Any) -> RandomCrop:
    padding = theirs.padding
    if padding is not None and ".v2." in type(theirs).__module__:
        left, right, top, bottom = padding  # v2 stores them in another order than it takes them.
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


def _replace_inner(theirs: Any) -> list[Any]:
    return [_replace_part(each) for each in theirs.transforms]


def _replace_part(theirs: Any) -> Any:
    steps = foreign.steps_of(theirs)
    found = replace_torchvision(theirs) if steps is None else Compose([_replace_part(each) for each in steps])
    if found is None:
        raise ValueError(f"there is no transform for {theirs}")
    return found


_REPLACEMENTS: dict[str, Callable[[Any], Callable[[Any], Any] | None]] = {
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
    "RandomApply": lambda theirs: RandomApply(_replace_inner(theirs), theirs.p),
    "RandomChoice": lambda theirs: RandomChoice(
        _replace_inner(theirs), theirs.probabilities if hasattr(theirs, "probabilities") else theirs.p
    ),
    "RandomOrder": lambda theirs: RandomOrder(_replace_inner(theirs)),
}
"""Functions that make shardio's transform, by the name of torchvision's class."""


class PlainRandomResizedCrop(RandomResizedCrop):
    """A RandomResizedCrop that never averages, however much it shrinks: OpenCV's INTER_LINEAR."""

    _resampling: Resampling = "plain bilinear"


class PlainResize(Resize):
    """A Resize that never averages, however much it shrinks: OpenCV's INTER_LINEAR."""

    _resampling: Resampling = "plain bilinear"


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
    """Return whether a transform of Albumentations is always applied, and always resizes by INTER_LINEAR."""
    return bool(transform.p == 1 and transform.interpolation == _INTER_LINEAR and transform.area_for_downscale is None)
