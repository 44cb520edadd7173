"""Transforms that consist of others."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardio.transforms import foreign
from shardio.transforms.annotations import FieldKind, check_field_kinds
from shardio.transforms.rendering import render_all
from shardio.transforms.transform import Transform, check_call, rng_keys_from_torch


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
        super().__init__(transforms)
        if not self.transforms:
            raise ValueError("MultiCrop needs at least one transform")


def inner_steps(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a Compose or in another library's sequence; None for a single transform."""
    return transform.transforms if isinstance(transform, Compose) else foreign.steps_of(transform)


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
