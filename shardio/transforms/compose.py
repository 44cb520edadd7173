"""Combine transforms, draw their parameters, and render images before a step that needs their pixels.

shardio's transforms become one crop plan where possible, so only the part of an image that the crop needs is decoded.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import FunctionType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.images import (
    CropPlan,
    DecodedPicture,
    DecodeError,
    DecoderName,
    Operations,
    Picture,
    Sizes,
    make_operations,
    render_chunk,
    sizes_of,
)
from shardio.kernel.operations import NONE
from shardio.kernel.records import IMAGES_AT_ONCE
from shardio.order import Words, derive_rng_key
from shardio.transforms.annotations import FieldKind, check_field_kinds, render_rows, render_rows_as_pictures
from shardio.transforms.transform import (
    Calls,
    Geometry,
    PixelTransform,
    Transform,
    as_pixels,
    check_call,
    check_probability,
    draw_chance,
    draw_units,
    is_known,
    rng_keys_from_torch,
    steps_of,
)
from shardio.values import count

__all__ = ["Combination", "Compose", "MultiCrop", "RandomApply", "RandomChoice", "RandomOrder", "apply_transform"]
__all__ += ["count_crops", "field_kinds_of", "is_builtin", "is_planned", "others_in", "plan_crops", "plan_transform"]
__all__ += ["refuse_pillow"]

MAX_RENDERED_BYTES = 2**25
"""The maximum size of the pixels to render at a time for user callables, in bytes, unless three images need more.

The kernel interleaves the decoding of three images, and is fastest if it can choose three images that take equal time.
"""


class Combination:
    """The base class of transforms that consist of other transforms. Subclasses cannot override ``__call__``.

    Args:
        transforms: The transforms.

    Raises:
        TypeError: If ``transforms`` is a single transform, or one of the transforms is not callable.
        ValueError: If there are no transforms, except in a Compose.
    """

    fields: dict[str, FieldKind] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_call(cls, Combination, "Move its code to a function in the list: Compose([..., function])")

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        name = type(self).__name__
        if not isinstance(transforms, Iterable):
            raise TypeError(f"{name} takes a list of transforms, got {transforms!r}: write {name}([...])")
        self.transforms = list(transforms)
        if not self.transforms and not isinstance(self, Compose):
            raise ValueError(f"{name} needs at least one transform")
        for transform in self.transforms:
            check_transform(transform)

    def __call__(self, image: Any) -> Any:
        if self.fields is not None:
            raise TypeError(
                "a Compose with fields transforms whole samples: pass it to a dataset, as transform=Compose(...), or "
                "leave fields out"
            )
        results = [render_all(*crop)[0] for crop in plan_crops(self, [image], rng_keys_from_torch(1))]
        return tuple(results) if isinstance(self, MultiCrop) else results[0]

    def __repr__(self) -> str:
        shown = {name: vars(self).get(name) for name in ("p", "fields")}
        settings = "".join(f", {name}={value}" for name, value in shown.items() if value is not None)
        return f"{type(self).__name__}({self.transforms}{settings})"


class Compose(Combination):
    """A sequence of transforms, applied in order. Subclasses cannot override ``__call__``.

    Args:
        transforms: shardio's transforms, which draw from the samples' rng keys, and any other callables, which draw
            random numbers in their own way. torchvision's transforms and other ``torch.nn.Module`` objects get a uint8
            tensor [3, H, W]. Albumentations' transforms get the array as ``image=``. All other callables get the array,
            or the previous transform's result. The last transform's result is the sample's image.
        fields: The fields of a sample to transform together, and the kind of each: "image", "mask", "boxes",
            "keypoints", "labels", or an object with settings, such as ``Mask(fill=255)``. ``json.boxes`` is the entry
            ``boxes`` of the field ``json``. All images of a sample must have the same size, and are transformed with
            the same parameters. All transforms must be shardio's own. By default, only the field ``image`` is
            transformed.

    Raises:
        TypeError: If ``transforms`` is a single transform, or one of the transforms is not callable.
        ValueError: If ``fields`` names an unknown kind, or none of the fields is an image.

    Example:
        >>> from shardio.transforms import ColorJitter, Compose, RandomHorizontalFlip, RandomResizedCrop
        >>> fields = {"image": "image", "mask.png": "mask", "json.boxes": "boxes"}
        >>> transform = Compose([RandomResizedCrop(512), RandomHorizontalFlip(), ColorJitter(0.4)], fields=fields)
    """

    def __init__(
        self, transforms: Sequence[Callable[[Any], Any]], *, fields: Mapping[str, str | FieldKind] | None = None
    ) -> None:
        super().__init__(transforms)
        self.fields = None if fields is None else check_field_kinds(fields)


class MultiCrop(Combination):
    """Make several results for each image, such as the two views of SimCLR or the ten crops of DINO.

    Each transform gets the image, and draws its own parameters. The file is read once. The kernel also decodes the file
    only once, for the crops of all transforms that are made up entirely of shardio's own transforms. Images that the
    kernel does not decode, such as PNG images, are decoded for each crop. A sample's image becomes a tuple of results,
    in the order of the transforms, and a batch's images become a list of tensors, one for each transform. So each
    transform must return images of equal size. A MultiCrop must be the whole transform of a dataset, so it cannot be
    part of a Compose.

    Args:
        transforms: One transform for each result; see :class:`Compose`. A transform may appear several times.

    Raises:
        TypeError: If ``transforms`` is not a sequence, or one of the transforms is not callable.
        ValueError: If there are no transforms.

    Example:
        >>> from shardio.transforms import Compose, MultiCrop, RandomHorizontalFlip, RandomResizedCrop
        >>> large = Compose([RandomResizedCrop(224, scale=(0.4, 1.0)), RandomHorizontalFlip()])
        >>> small = Compose([RandomResizedCrop(96, scale=(0.05, 0.4)), RandomHorizontalFlip()])
        >>> transform = MultiCrop([large] * 2 + [small] * 8)
    """


class Choice(Combination, ABC):
    """The base class of transforms that choose, for each image, which of several transforms to apply.

    If all transforms are shardio's and keep the sizes of images, a single call to the kernel applies them. Otherwise,
    whole images are decoded first.

    Args:
        transforms: The transforms to choose from: shardio's transforms, a :class:`Compose`, or any other callables.
    """

    @abstractmethod
    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        """Return the indices of the transforms to apply to n images, in order, int64 [n, k]; -1 for none."""


class RandomApply(Choice):
    """Apply all of the transforms, in order, with probability ``p``.

    Args:
        transforms: The transforms.
        p: The probability.

    Example:
        >>> from shardio.transforms import ColorJitter, RandomApply
        >>> transform = RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]], p: float = 0.5) -> None:
        super().__init__(transforms)
        self.p = check_probability(p)

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        numbers = np.arange(len(self.transforms))
        return np.where(draw_chance(rng_keys, self.p)[:, None], numbers, -1)


class RandomChoice(Choice):
    """Apply one of the transforms.

    Args:
        transforms: The transforms.
        p: The weight of each transform; weights need not add up to 1. By default, all weights are equal.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]], p: Sequence[float] | None = None) -> None:
        super().__init__(transforms)
        if p is not None and len(p) != len(self.transforms):
            raise ValueError(f"p must have {count(len(self.transforms), 'number')}, one for each transform, got {p!r}")
        weights = np.ones(len(self.transforms)) if p is None else np.array(p, dtype=np.float64)
        if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            raise ValueError(f"p must have no negative numbers, and at least one positive number, got {p!r}")
        self.p = (weights / weights.sum()).tolist()

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        bounds = np.cumsum(self.p)
        # The last bound may be slightly below 1. Draws above it choose the last transform with a positive weight.
        last = int(np.flatnonzero(self.p)[-1])
        return np.minimum(np.searchsorted(bounds, draw_units(rng_keys, 1), side="right"), last)


class RandomOrder(Choice):
    """Apply all of the transforms, in random order."""

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        return np.argsort(draw_units(rng_keys, len(self.transforms)), axis=1)


def check_transform(transform: object) -> None:
    """Raise TypeError if a transform is not callable, or is a class: calling a class would only create an instance."""
    if isinstance(transform, type) and (issubclass(transform, Transform | Combination) or is_known(transform)):
        raise TypeError(f"{transform.__name__} is a class, not a transform: write {transform.__name__}(...)")
    if isinstance(transform, MultiCrop):
        raise TypeError(
            "a MultiCrop cannot be part of a Compose or of another MultiCrop: pass it to the dataset, as "
            "transform=MultiCrop([...]), and compose the transforms inside it"
        )
    if isinstance(transform, Compose) and transform.fields is not None:
        raise TypeError(
            "a Compose with fields cannot be part of another Compose or of a MultiCrop: pass it to the dataset, as "
            "transform=Compose([...], fields=...)"
        )
    if not callable(transform):
        raise TypeError(f"a transform must be callable, got {reprlib.repr(transform)}")


def inner_steps(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a Compose or in another library's sequence, or None for a single transform."""
    return transform.transforms if isinstance(transform, Compose) else steps_of(transform)


def parts_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a choice or a sequence, or None for a single transform."""
    return transform.transforms if isinstance(transform, Choice) else inner_steps(transform)


def keys_of_inner(rng_keys: Words, number: int) -> Words:
    """Return an inner transform's rng keys, uint64 [n], given its index and the rng keys of the outer transform."""
    return derive_rng_key(rng_keys, np.array([number], dtype=np.uint64))


def consists_of_operations(transform: Any) -> bool:
    """Return whether a transform and all of its parts do nothing but draw operations on pixels."""
    if (parts := parts_of(transform)) is not None:
        return all(map(consists_of_operations, parts))
    return isinstance(transform, PixelTransform) and transform.is_planned


def draw_operations(transform: Any, sizes: Sizes, rng_keys: Words) -> Operations:
    """Draw the operations on n images, OPERATION [n, k].

    Args:
        transform: A transform for which :func:`consists_of_operations` is true.
        sizes: int64 [n, 2], the images' heights and widths.
        rng_keys: uint64 [n].
    """
    if isinstance(transform, PixelTransform):
        operations: Operations = transform.draw(sizes, rng_keys)
        return operations
    parts = parts_of(transform) or []
    drawn = [draw_operations(each, sizes, keys_of_inner(rng_keys, i)) for i, each in enumerate(parts)]
    nothing = make_operations(len(sizes), NONE)
    if not isinstance(transform, Choice):
        return np.concatenate([nothing[:, :0], *drawn], axis=1)
    length = max(operations.shape[1] for operations in drawn)
    # [n, transform, operation]; the last transform does nothing, so the index -1 means none.
    choices = np.stack([_lengthen(each, length) for each in (*drawn, nothing)], axis=1)
    rows = np.arange(len(sizes))[:, None]
    return choices[rows, transform.choose(rng_keys)].reshape(len(sizes), -1)


def _lengthen(operations: Operations, length: int) -> Operations:
    lengthened = np.zeros((len(operations), length), operations.dtype)
    lengthened[:, : operations.shape[1]] = operations
    return lengthened


def render_all(images: list[Any], plan: CropPlan | None) -> list[Any]:
    """Return the finished images."""
    return images if plan is None else render_chunk(images, plan).images


def render_each(images: list[Any], plan: CropPlan | None, calls: Calls) -> Iterator[Any]:
    """Yield the finished images, rendering only as many at a time as :data:`MAX_RENDERED_BYTES` allows."""
    if plan is None:
        yield from images
        return
    largest = 3 * int(plan.output_size.prod(axis=1).max(initial=1))
    num_at_once = max(IMAGES_AT_ONCE, MAX_RENDERED_BYTES // largest)
    for start in range(0, len(images), num_at_once):
        rendered = render_rows(images, plan, np.arange(start, min(start + num_at_once, len(images))))
        calls.decoder_names += rendered.decoder_names
        yield from rendered.images


def render_some(images: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> tuple[list[Any], CropPlan]:
    """Render only the given rows, because an image's pixels must not depend on the other images of a chunk."""
    if not rows.size:
        return images, plan
    pictures, images = render_rows_as_pictures(images, plan, rows), list(images)
    for row, picture in zip(rows.tolist(), pictures, strict=True):
        images[row] = picture
    return images, plan.restart(rows)


def count_crops(transform: Callable[[Any], Any] | None) -> int | None:
    """Return the number of results for each image, or None for a transform that is not a MultiCrop."""
    return len(transform.transforms) if isinstance(transform, MultiCrop) else None


def is_builtin(transform: Callable[[Any], Any] | None) -> bool:
    """Return whether a transform (or None) runs only shardio's code; False for subclasses in other packages."""
    if isinstance(transform, Combination) and _is_ours(transform):
        return all(map(is_builtin, transform.transforms))
    return transform is None or _is_ours(transform)


def is_planned(transform: Callable[[Any], Any] | None) -> bool:
    """Return whether a crop plan expresses a whole transform, so that all images can be planned before any decoding."""
    return all(_kind_of(step) in ("geometry", "pixels") for crop in _crops_of(transform) for step in _flat(crop))


def _flat(transform: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the transforms of nested sequences. A choice counts as one transform."""
    return (step for step, _ in _steps_with_keys(transform, np.zeros(1, np.uint64)))


def others_in(transform: Callable[[Any], Any] | None) -> list[Callable[[Any], Any]]:
    """Return the transforms that are not shardio's own, in the order of their calls, including nested ones."""
    return [step for each in _crops_of(transform) for step in _steps(each) if not _is_ours(step)]


def field_kinds_of(transform: Callable[[Any], Any] | None) -> dict[str, FieldKind]:
    """Return the kind of each field that a dataset's transform changes, or {} if it changes only the image.

    Raises:
        TypeError: If a crop plan cannot express a step, which would therefore transform only the image.
    """
    if not isinstance(transform, Compose) or transform.fields is None:
        return {}
    other = next((step for step in _flat(transform) if _kind_of(step) not in ("geometry", "pixels")), None)
    if other is not None:
        raise TypeError(
            f"a Compose with fields takes only shardio's own transforms, but {other!r} would transform only the "
            "image: leave it out, or transform the sample in the dataset's transform_sample= instead, without fields"
        )
    return transform.fields


def _is_ours(step: Any) -> bool:
    module = getattr(step if isinstance(step, FunctionType) else type(step), "__module__", "")
    return module.partition(".")[0] == __name__.partition(".")[0]


def refuse_pillow(transform: Callable[[Any], Any] | None) -> None:
    """Raise TypeError if the first transform is shardio's, because shardio's transforms do not accept Pillow images."""
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
        calls: The object that calls other callables. By default, their random generators are not seeded.

    Returns:
        The images, and the plan that renders them, or None if they are finished.

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
            # Render images as they are needed: whole images are large, but a callable's results may be small.
            images, plan = calls.call(callables, render_each(images, plan, calls), keys[0]), None
            continue
        for step, step_keys in group:
            if kind == "geometry":
                images, plan = _extend(step, *_begin(step, images, plan, calls.decoder_names[num_known:]), step_keys)
            elif kind == "pixels":
                images, plan = _begin(step, images, plan, calls.decoder_names[num_known:])
                plan = plan.edit(draw_operations(step, plan.output_size, step_keys))
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
        images = render_rows_as_pictures(images, plan, np.arange(len(images)))
        plan = CropPlan.whole(sizes_of(images))
    parameters = step.draw(plan.output_size, step_keys)
    images, plan = render_some(images, plan, np.flatnonzero(step.needs_pixels(plan, parameters)))
    return images, step.extend(plan, parameters)


def _begin(
    step: Any, images: list[Any], plan: CropPlan | None, decoder_names: Sequence[DecoderName]
) -> tuple[list[Any], CropPlan]:
    """Return pictures and their plan. The default plan leaves the pictures as they are.

    If ``decoder_names`` has fewer than n names, the decoders are unknown.
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
            except BaseException:  # User code may raise anything.
                if calls.failed_row is not None:
                    # Convert the failed row from an index into ``rows`` to a row of the chunk.
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
