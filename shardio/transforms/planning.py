"""Apply lists of transforms to a chunk of images. As many transforms as possible are combined into one crop plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from types import FunctionType
from typing import Any, Literal

import numpy as np

from shardio.images import (
    CropPlan,
    DecodedPicture,
    DecodeError,
    DecoderName,
    Picture,
    sizes_of,
)
from shardio.order import Words
from shardio.transforms.annotations import FieldKind
from shardio.transforms.aug_mix import AugMix
from shardio.transforms.auto_augment import AUGMENTATIONS
from shardio.transforms.blurring import GaussianBlur
from shardio.transforms.calls import Calls
from shardio.transforms.choices import CHOICES, Choice, consists_of_operations, draw_operations, keys_of_inner, parts_of
from shardio.transforms.colours import COLOURS
from shardio.transforms.compose import Combination, Compose, MultiCrop, check_transform, inner_steps
from shardio.transforms.conversion import CONVERSIONS
from shardio.transforms.cropping import CROPS, FiveCrop
from shardio.transforms.erasing import RandomErasing
from shardio.transforms.geometry import GEOMETRIES
from shardio.transforms.rendering import render_all, render_each, render_pictures, render_some
from shardio.transforms.transform import Geometry, Transform, as_pixels
from shardio.transforms.warps import WARPS

BUILTINS = GEOMETRIES | CROPS | COLOURS | AUGMENTATIONS | CONVERSIONS | WARPS | {AugMix, GaussianBlur, RandomErasing}
"""shardio's transforms of single images. Subclasses may run other code, so they are not among them."""


def count_crops(transform: Callable[[Any], Any] | None) -> int | None:
    """Return how many results each image has, or None for a transform that is not a MultiCrop."""
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
    """Return the transforms that are not shardio's own, in the order of their calls, from nested sequences, too."""
    return [step for each in _crops_of(transform) for step in _steps(each) if not _is_ours(step)]


def field_kinds_of(transform: Callable[[Any], Any] | None) -> dict[str, FieldKind]:
    """Return what each field holds that a dataset's transform transforms; none if it transforms only the image.

    Raises:
        TypeError: If it has steps that crop plans cannot express, because these would transform only an image.
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
    """Return whether a function, or a transform's class, is defined by shardio."""
    module = getattr(step if isinstance(step, FunctionType) else type(step), "__module__", "")
    return module.partition(".")[0] == __name__.partition(".")[0]


def apply_transform(transform: Callable[[Any], Any], images: Sequence[Any], rng_keys: Words) -> list[Any]:
    """Transform n images, each with its own rng key. Arguments and errors are those of :func:`plan_transform`."""
    return render_all(*plan_transform(transform, images, rng_keys))


def plan_crops(
    transform: Callable[[Any], Any] | None, images: Sequence[Any], rng_keys: Words, calls: Calls | None = None
) -> list[tuple[list[Any], CropPlan | None]]:
    """Draw the parameters of a dataset's transform for n images.

    Arguments, errors and results are those of :func:`plan_transform`, with one result for each crop of a MultiCrop.
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
        rng_keys: uint64 [n], one rng key for each image. Each transform of a Compose derives its own keys from them.
        calls: Calls the other callables. By default, their random generators are left as they are.

    Returns:
        The images, and the plan to render them by. The plan is None if the images are finished.

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
            # Not all at once: whole images are large, but a callable's results may be small.
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
    """Draw a geometry's parameters and extend the plan by them."""
    if plan.operations is not None:
        images = render_pictures(images, plan)
        plan = CropPlan.whole(sizes_of(images))
    parameters = step.draw(plan.output_size, step_keys)
    images, plan = render_some(images, plan, np.flatnonzero(step.needs_pixels(plan, parameters)))
    return images, step.extend(plan, parameters)


def _edit(step: Any, images: list[Any], plan: CropPlan, step_keys: Words) -> tuple[list[Any], CropPlan]:
    """Draw the operations of a transform of pixels and add them to the plan."""
    return images, plan.edit(draw_operations(step, plan.output_size, step_keys))


def _begin(
    step: Any, images: list[Any], plan: CropPlan | None, decoder_names: Sequence[DecoderName]
) -> tuple[list[Any], CropPlan]:
    """Return images and their plan; a plan that leaves them as they are if they have none.

    Args:
        step: The transform that needs the plan.
        images: n images.
        plan: Their plan.
        decoder_names: The decoders of the n images; fewer names if the decoders are unknown.
    """
    if plan is not None:
        return images, plan
    arrays = [as_pixels(step, image) for image in images]
    is_known = len(decoder_names) >= len(arrays)
    pictures = list(map(DecodedPicture, arrays, *[decoder_names] * is_known))
    return list(pictures), CropPlan.whole(sizes_of(pictures))


def _apply(step: Any, images: list[Any], step_keys: Words) -> list[Any]:
    """Draw the parameters of any other of shardio's transforms and apply it."""
    arrays = [step.as_input(image) for image in images]
    sizes = np.array([array.shape[:2] for array in arrays], dtype=np.int64).reshape(-1, 2)
    parameters = step.draw(sizes, step_keys)
    return [step.apply(array, row) for array, row in zip(arrays, parameters, strict=True)]


def _apply_chosen(choice: Any, images: list[Any], rng_keys: Words, calls: Calls) -> list[Any]:
    """Apply the chosen transforms to each image."""
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
            except BaseException:  # Re-raised, whatever people's code raises: only the row becomes the chunk's.
                if calls.failed_row is not None:
                    calls.failed_row = int(rows[calls.failed_row])
                raise
            for row, image in zip(rows.tolist(), changed, strict=True):
                images[row] = image
    return images


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
    """Return the transforms of a MultiCrop, or the transform itself."""
    return transform.transforms if isinstance(transform, MultiCrop) else [transform]


def _steps(transform: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the single transforms of nested sequences and choices."""
    if (inner := parts_of(transform)) is not None:
        for each in inner:
            yield from _steps(each)
    elif transform is not None:
        yield transform


def _steps_with_keys(transform: Any, rng_keys: Words) -> Iterator[tuple[Callable[[Any], Any], Words]]:
    """Yield the transforms of nested sequences, each with its own rng keys. A choice is one of them."""
    if (inner := inner_steps(transform)) is not None:
        for index, each in enumerate(inner):
            yield from _steps_with_keys(each, keys_of_inner(rng_keys, index))
    elif transform is not None:
        check_transform(transform)
        yield transform, rng_keys
