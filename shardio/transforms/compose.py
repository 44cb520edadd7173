"""Transforms that consist of others: in sequence, at random, or one of them.

The functions at the end render images before a step that needs their pixels.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import (
    IMAGES_AT_ONCE,
    CropPlan,
    DecodedPicture,
    DecodeError,
    Operations,
    Picture,
    PlanRow,
    RenderedImages,
    Sizes,
    make_operations,
    render_chunk,
)
from shardio.images.kernel.compiled.operation_records import NONE
from shardio.order import Words, derive_rng_key
from shardio.transforms import foreign
from shardio.transforms.annotations import FieldKind, check_field_kinds
from shardio.transforms.foreign import Calls
from shardio.transforms.transform import (
    PixelTransform,
    Transform,
    check_call,
    check_probability,
    draw_chance,
    draw_units,
    rng_keys_from_torch,
)

MAX_RENDERED_BYTES = 2**25
"""The most bytes of pixels to render at a time for user callables, unless three images take more.

The kernel decodes three images side by side, and is fastest if it can choose three that take equally long.
"""


class Combination:
    """The base class of transforms that consist of others. Subclasses cannot override ``__call__``.

    Args:
        transforms: The transforms.

    Raises:
        TypeError: If ``transforms`` is a single transform, or one of the transforms is not callable.
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
        for transform in self.transforms:
            check_transform(transform)

    def __call__(self, image: Any) -> Any:
        """Transform one image with parameters from torch's global generator."""
        from shardio.transforms.planning import plan_crops  # It imports this module.

        if self.fields is not None:
            raise TypeError(
                "a Compose with fields transforms whole samples: pass it to a dataset, as transform=Compose(...), or "
                "leave fields out"
            )
        results = [render_all(*crop)[0] for crop in plan_crops(self, [image], rng_keys_from_torch(1))]
        return tuple(results) if isinstance(self, MultiCrop) else results[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.transforms))}])"


class Compose(Combination):
    """A sequence of transforms, applied in order. Subclasses cannot override ``__call__``.

    Args:
        transforms: shardio's transforms, which draw from the samples' rng keys, and any other callables, which use
            their own randomness. torchvision's transforms and other ``torch.nn.Module`` objects get a uint8 tensor
            [3, H, W]. Albumentations' transforms get the array as ``image=``. All others get the array, or the
            previous transform's result. The last transform's result is the sample's image.
        fields: The fields of a sample to transform together, and the kind of each: "image", "mask", "boxes",
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

    def __init__(
        self, transforms: Sequence[Callable[[Any], Any]], *, fields: Mapping[str, str | FieldKind] | None = None
    ) -> None:
        super().__init__(transforms)
        self.fields = None if fields is None else check_field_kinds(fields)

    def __repr__(self) -> str:
        fields = "" if self.fields is None else f", fields={self.fields}"
        return f"Compose([{', '.join(map(repr, self.transforms))}]{fields})"


class MultiCrop(Combination):
    """Several results for each image, such as the two views of SimCLR or the ten crops of DINO.

    Each transform gets the image, and draws parameters of its own. The file is read once. The kernel also decodes it
    once, for the crops of all transforms that consist of shardio's own. Images that the kernel does not decode (other
    formats, and JPEGs whose crops together cover more than a million pixels) are decoded for each crop. A sample's
    image is a tuple of results, in the order of the transforms. A batch's images are a list of tensors, one for each
    transform, so each transform must return images of one size. A MultiCrop is a dataset's whole transform: it cannot
    be part of a Compose.

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

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(transforms)
        if not self.transforms:
            raise ValueError("MultiCrop needs at least one transform")


class Choice(Combination, ABC):
    """The base class of transforms that choose for each image which of their transforms to apply.

    If all transforms are shardio's and keep an image's size, one compiled call applies them. Otherwise, images are
    first decoded as a whole.

    Args:
        transforms: The choices: shardio's transforms, a :class:`Compose`, or any other callables.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(transforms)
        if not self.transforms:
            raise ValueError(f"{type(self).__name__} needs at least one transform")

    @abstractmethod
    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        """Return the numbers of the transforms to apply to n images, in order, int64 [n, k]; -1 for none."""


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

    def __repr__(self) -> str:
        return f"RandomApply({self.transforms}, p={self.p})"


class RandomChoice(Choice):
    """Apply one of the transforms.

    Args:
        transforms: The transforms.
        p: The weight of each transform; weights need not add up to 1. By default, all are equally likely.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]], p: Sequence[float] | None = None) -> None:
        super().__init__(transforms)
        if p is not None and len(p) != len(self.transforms):
            raise ValueError(f"p must have one number for each of {len(self.transforms)} transforms, got {p!r}")
        weights = np.ones(len(self.transforms)) if p is None else np.array(p, dtype=np.float64)
        if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            raise ValueError(f"p must have numbers that are not negative, and one that is positive, got {p!r}")
        self.p = (weights / weights.sum()).tolist()

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        bounds = np.cumsum(self.p)
        # The sum may be slightly below 1. A number above it chooses the last transform with a weight.
        last = int(np.flatnonzero(self.p)[-1])
        return np.minimum(np.searchsorted(bounds, draw_units(rng_keys, 1), side="right"), last)

    def __repr__(self) -> str:
        return f"RandomChoice({self.transforms}, p={self.p})"


class RandomOrder(Choice):
    """Apply all of the transforms, in random order."""

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        return np.argsort(draw_units(rng_keys, len(self.transforms)), axis=1)


CHOICES: frozenset[type] = frozenset({RandomApply, RandomChoice, RandomOrder})
"""The transforms of this module."""


def check_transform(transform: object) -> None:
    """Raise TypeError if a transform is not callable, or is a class, which a call would only instantiate."""
    if isinstance(transform, type) and (issubclass(transform, Transform | Combination) or foreign.is_known(transform)):
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
    """Return the transforms in a Compose or in another library's sequence; None for a single transform."""
    return transform.transforms if isinstance(transform, Compose) else foreign.steps_of(transform)


def parts_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a choice or a sequence; None for a single transform."""
    return transform.transforms if isinstance(transform, Choice) else inner_steps(transform)


def keys_of_inner(rng_keys: Words, number: int) -> Words:
    """Return the rng keys, uint64 [n], of one of a transform's inner transforms."""
    return derive_rng_key(rng_keys, np.array([number], dtype=np.uint64))


def consists_of_operations(transform: Any) -> bool:
    """Return whether a transform only draws operations on pixels, as do all of its parts."""
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
    # [n, number of the transform, operation]; the last transform does nothing, so -1 means none.
    choices = np.stack([_lengthen(each, length) for each in (*drawn, nothing)], axis=1)
    rows = np.arange(len(sizes))[:, None]
    return choices[rows, transform.choose(rng_keys)].reshape(len(sizes), -1)


def _lengthen(operations: Operations, length: int) -> Operations:
    """Return operations, OPERATION [n, k], followed by some that do nothing: OPERATION [n, length]."""
    lengthened = np.zeros((len(operations), length), operations.dtype)
    lengthened[:, : operations.shape[1]] = operations
    return lengthened


def render_all(images: list[Any], plan: CropPlan | None) -> list[Any]:
    """Return the finished images."""
    return images if plan is None else render_chunk(images, plan).images


def render_pictures(images: list[Any], plan: CropPlan) -> list[Any]:
    """Return the finished images as pictures."""
    return _render_rows_as_pictures(images, plan, np.arange(len(images)))


def render_each(images: list[Any], plan: CropPlan | None, calls: Calls) -> Iterator[Any]:
    """Yield the finished images. Only as many as :data:`MAX_RENDERED_BYTES` allows are in memory at the same time."""
    if plan is None:
        yield from images
        return
    largest = 3 * int(plan.output_size.prod(axis=1).max(initial=1))
    num_at_once = max(IMAGES_AT_ONCE, MAX_RENDERED_BYTES // largest)
    for start in range(0, len(images), num_at_once):
        rendered = _render_rows(images, plan, np.arange(start, min(start + num_at_once, len(images))))
        calls.decoder_names += rendered.decoder_names
        yield from rendered.images


def render_some(images: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> tuple[list[Any], CropPlan]:
    """Render only these rows: the pixels of the other images must not depend on them."""
    if not rows.size:
        return images, plan
    pictures, images = _render_rows_as_pictures(images, plan, rows), list(images)
    for row, picture in zip(rows.tolist(), pictures, strict=True):
        images[row] = picture
    return images, plan.restart(rows)


def render_alike(images: list[Any], others: Sequence[Picture]) -> list[Any]:
    """Return images as pictures, rendered by the same plans as other pictures.

    Images whose plan was the same object are rendered together.
    """
    images = list(images)
    for step in range(max((len(other.history) for other in others), default=0)):
        rows_by_plan = defaultdict[int, list[int]](list)
        for row, other in enumerate(others):
            if step < len(other.history):
                rows_by_plan[id(other.history[step].plan)].append(row)
        for rows in rows_by_plan.values():
            steps = [others[row].history[step] for row in rows]
            plan = steps[0].plan.take(np.array([each.row for each in steps]))
            try:
                pictures = render_pictures([images[row] for row in rows], plan)
            except DecodeError as error:
                raise DecodeError(rows[error.row], str(error)) from error
            for row, picture in zip(rows, pictures, strict=True):
                images[row] = picture
    return images


def _render_rows_as_pictures(images: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> list[Any]:
    rendered = _render_rows(images, plan, rows)
    return [
        DecodedPicture(pixels, decoder_name, (*images[row].history, PlanRow(plan, row)))
        for row, pixels, decoder_name in zip(rows.tolist(), rendered.images, rendered.decoder_names, strict=True)
    ]


def _render_rows(pictures: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> RenderedImages:
    """Render these rows of a chunk. An error names the row in the chunk."""
    try:
        return render_chunk([pictures[row] for row in rows], plan.take(rows))
    except DecodeError as error:
        raise DecodeError(int(rows[error.row]), str(error)) from error
