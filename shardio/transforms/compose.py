"""Lists of transforms, applied to a chunk of images. As many transforms as possible are combined into one crop plan."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import FunctionType
from typing import Any, Literal

import numpy as np

from shardio.images import (
    CropPlan,
    DecodedPicture,
    Picture,
    sizes_of,
)
from shardio.order import Words, derive_rng_key
from shardio.transforms import foreign
from shardio.transforms.annotations import FieldKind, check_field_kinds
from shardio.transforms.auto_augment import AUGMENTATIONS
from shardio.transforms.calls import Calls
from shardio.transforms.colours import COLOURS
from shardio.transforms.geometry import GEOMETRIES
from shardio.transforms.pixel_transform import PixelTransform
from shardio.transforms.rendering import render_all, render_each, render_pictures, render_some
from shardio.transforms.transform import (
    Geometry,
    Transform,
    as_pixels,
    check_call,
    rng_keys_from_torch,
)

BUILTINS = GEOMETRIES | COLOURS | AUGMENTATIONS
"""shardio's transforms of single images. Subclasses may run other code, so they are not among them."""


class Compose:
    """A sequence of transforms, applied in order. Subclasses cannot override ``__call__``.

    Args:
        transforms: shardio's transforms, which draw from the samples' rng keys, and any other callables, which use
            their own randomness. torchvision's transforms and other ``torch.nn.Module`` objects get a uint8 tensor
            [3, H, W]. Albumentations' transforms get the array as ``image=``. All others get the array, or the
            previous transform's result. The last transform's result is the sample's image.
        fields: The fields of a sample that are transformed alike, and what each holds: "image", "mask", "boxes",
            "keypoints", "labels", or an object with settings, such as ``Mask(fill=255)``. ``json.boxes`` is the entry
            ``boxes`` of the field ``json``. All images of a sample have one size, and get the same geometry and
            colours. All transforms must be shardio's own. By default, only the field ``image`` is transformed.

    Raises:
        TypeError: If ``transforms`` is a single transform, or one of the transforms is not callable.
        ValueError: If ``fields`` has an unknown kind, or no image.

    Example:
        >>> from shardio.transforms import ColorJitter, Compose, RandomHorizontalFlip, RandomResizedCrop
        >>> fields = {"image": "image", "mask.png": "mask", "json.boxes": "boxes"}
        >>> transform = Compose([RandomResizedCrop(512), RandomHorizontalFlip(), ColorJitter(0.4)], fields=fields)
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_call(cls, Compose, "Move its code to a function in the list: Compose([..., function])")

    def __init__(
        self, transforms: Sequence[Callable[[Any], Any]], *, fields: Mapping[str, str | FieldKind] | None = None
    ) -> None:
        if not isinstance(transforms, Iterable):
            raise TypeError(f"Compose takes a list of transforms, got {transforms!r}: write Compose([...])")
        self.transforms = list(transforms)
        for transform in self.transforms:
            _check_transform(transform)
        self.fields = None if fields is None else check_field_kinds(fields)

    def __call__(self, image: Any) -> Any:
        """Transform one image with parameters from torch's global generator."""
        if self.fields is not None:
            raise TypeError(
                "a Compose with fields transforms whole samples: pass it to a dataset, as transform=Compose(...), or "
                "leave fields out"
            )
        return apply_transform(self, [image], rng_keys_from_torch(1))[0]

    def __repr__(self) -> str:
        fields = "" if self.fields is None else f", fields={self.fields}"
        return f"Compose([{', '.join(map(repr, self.transforms))}]{fields})"


class MultiCrop:
    """Several results for each image, such as the two views of SimCLR or the ten crops of DINO.

    Each transform gets the image, and draws parameters of its own. The file is read once. The kernel also decodes it
    once, for the crops of all transforms that consist of shardio's own. Images that the kernel does not decode (other
    formats, and JPEGs whose crops together cover more than a million pixels) are decoded for each crop. A sample's
    image is a tuple of results, in the order of the transforms. A batch's images are a list of tensors, one for each
    transform, so each transform must return images of one size. A MultiCrop is a dataset's whole transform: it cannot
    be part of a Compose.

    Args:
        transforms: What to make of each image; see :class:`Compose`. A transform may appear several times.

    Raises:
        TypeError: If ``transforms`` is not a sequence, or one of the transforms is not callable.
        ValueError: If there are no transforms.

    Example:
        >>> from shardio.transforms import Compose, MultiCrop, RandomHorizontalFlip, RandomResizedCrop
        >>> large = Compose([RandomResizedCrop(224, scale=(0.4, 1.0)), RandomHorizontalFlip()])
        >>> small = Compose([RandomResizedCrop(96, scale=(0.05, 0.4)), RandomHorizontalFlip()])
        >>> transform = MultiCrop([large] * 2 + [small] * 8)
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        if not isinstance(transforms, Iterable):
            raise TypeError(f"MultiCrop takes a list of transforms, got {transforms!r}: write MultiCrop([...])")
        self.transforms = list(transforms)
        if not self.transforms:
            raise ValueError("MultiCrop needs at least one transform")
        for transform in self.transforms:
            _check_transform(transform)

    def __call__(self, image: Any) -> tuple[Any, ...]:
        """Transform one image with parameters from torch's global generator."""
        keys = rng_keys_from_torch(len(self.transforms))
        return tuple(apply_transform(each, [image], keys[i : i + 1])[0] for i, each in enumerate(self.transforms))

    def __repr__(self) -> str:
        return f"MultiCrop([{', '.join(map(repr, self.transforms))}])"


def count_crops(transform: Callable[[Any], Any] | None) -> int | None:
    """Return how many results each image has, or None for a transform that is not a MultiCrop."""
    return len(transform.transforms) if isinstance(transform, MultiCrop) else None


def is_builtin(transform: Callable[[Any], Any] | None) -> bool:
    """Return whether a transform runs only shardio's code.

    This holds for None, for instances of the types in BUILTINS (not of their subclasses), and for a Compose or a
    MultiCrop of these.
    """
    if type(transform) is Compose or type(transform) is MultiCrop:
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
    other = next((step for step in _steps(transform) if _kind_of(step) not in ("geometry", "pixels")), None)
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
    keys = [derive_rng_key(rng_keys, np.array([i], dtype=np.uint64)) for i in range(len(transform.transforms))]
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
                images, plan = _extend(step, images, plan, step_keys)
            elif kind == "pixels":
                images, plan = _edit(step, images, plan, step_keys)
            else:
                images, plan = _apply(step, render_all(images, plan), step_keys), None
    return images, plan


def _kind_of(step: Callable[[Any], Any]) -> Literal["geometry", "pixels", "transform", "other"]:
    if isinstance(step, Geometry) and type(step).apply is Geometry.apply:
        return "geometry"
    if isinstance(step, PixelTransform) and type(step).apply is PixelTransform.apply:
        return "pixels"
    return "transform" if isinstance(step, Transform) else "other"


def _extend(step: Any, images: list[Any], plan: CropPlan | None, step_keys: Words) -> tuple[list[Any], CropPlan | None]:
    """Draw a geometry's parameters and extend the plan by them."""
    images, plan = _begin(step, images, plan)
    if plan.operations is not None:
        images = render_pictures(images, plan)
        plan = CropPlan.whole(sizes_of(images))
    parameters = step.draw(plan.output_size, step_keys)
    images, plan = render_some(images, plan, np.flatnonzero(step.needs_pixels(plan, parameters)))
    return images, step.extend(plan, parameters)


def _edit(step: Any, images: list[Any], plan: CropPlan | None, step_keys: Words) -> tuple[list[Any], CropPlan]:
    """Draw the operations of a transform of pixels and add them to the plan."""
    images, plan = _begin(step, images, plan)
    return images, plan.edit(step.draw(plan.output_size, step_keys))


def _begin(step: Any, images: list[Any], plan: CropPlan | None) -> tuple[list[Any], CropPlan]:
    """Return images and their plan; a plan that leaves them as they are if they have none."""
    if plan is not None:
        return images, plan
    pictures = [DecodedPicture(as_pixels(step, image)) for image in images]
    return list(pictures), CropPlan.whole(sizes_of(pictures))


def _apply(step: Any, images: list[Any], step_keys: Words) -> list[Any]:
    """Draw the parameters of any other of shardio's transforms and apply it."""
    arrays = [as_pixels(step, image) for image in images]
    sizes = np.array([array.shape[:2] for array in arrays], dtype=np.int64).reshape(-1, 2)
    parameters = step.draw(sizes, step_keys)
    return [step.apply(array, row) for array, row in zip(arrays, parameters, strict=True)]


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


def _inner_steps(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a Compose or in another library's sequence; None for a single transform."""
    return transform.transforms if isinstance(transform, Compose) else foreign.steps_of(transform)


def _steps(transform: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the single transforms of nested sequences."""
    if (inner := _inner_steps(transform)) is not None:
        for each in inner:
            yield from _steps(each)
    elif transform is not None:
        yield transform


def _steps_with_keys(transform: Any, rng_keys: Words) -> Iterator[tuple[Callable[[Any], Any], Words]]:
    """Yield the single transforms of nested sequences, each with its own rng keys."""
    if (inner := _inner_steps(transform)) is not None:
        for index, each in enumerate(inner):
            yield from _steps_with_keys(each, derive_rng_key(rng_keys, np.array([index], dtype=np.uint64)))
    elif transform is not None:
        _check_transform(transform)
        yield transform, rng_keys


def _check_transform(transform: object) -> None:
    """Raise TypeError if a transform is not callable, or is a class, which a call would only instantiate."""
    if isinstance(transform, type) and (
        issubclass(transform, Transform | Compose | MultiCrop) or foreign.is_known(transform)
    ):
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
