"""The fields that one transform transforms alike: where their values are, and how they follow a sample's image."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardio.decoding.field_values import Missing
from shardio.decoding.planned_images import PlannedImages, undecodable
from shardio.errors import SampleError
from shardio.images import DecodeError, Picture, PlanRow, holds_images
from shardio.reading import StoredSamples
from shardio.transforms import AnnotationError, FieldKind, move_annotations, render_alike


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedValue:
    """A value that a transform transforms.

    Attributes:
        reference: Its name in the transform.
        name: The value of the sample that it is, or is in.
        entry: The key of the value's entry that it is; None if it is the value itself.
        kind: What it holds.
    """

    reference: str
    name: str
    entry: str | None
    kind: FieldKind


def locate_values(
    kinds: Mapping[str, FieldKind], names: Sequence[str], own_decoders: Collection[str]
) -> list[LocatedValue]:
    """Find the values that a transform transforms.

    A reference is the name of a value, or else a name, a dot, and the key of an entry.

    Args:
        kinds: What each value holds, by its reference.
        names: The names of a sample's values.
        own_decoders: The names of those that the user's own decoders make.

    Raises:
        ValueError: If there is no such value, or an image is not one that shardio can decode.
    """
    located = []
    for reference, kind in kinds.items():
        parents = [name for name in names if reference.startswith(f"{name}.")]
        name = reference if reference in names else max(parents, key=len, default=None)
        if name is None:
            raise ValueError(
                f"the transform has the field {reference!r}, but fields={tuple(names)!r} does not name it: add it to "
                "the dataset's fields, or remove it from those of the transform"
            )
        entry = None if name == reference else reference.removeprefix(f"{name}.")
        is_image = entry is None and holds_images(name) and name not in own_decoders
        if kind == "image" and not is_image:
            raise ValueError(
                f"the transform has the image {reference!r}, but an image is 'image' or a field that shardio decodes, "
                "such as 'left.jpg'"
            )
        if name in ("image", "label", "key") and kind != "image":
            raise ValueError(f"the transform takes {reference!r} for {kind!r}, but the dataset's {name!r} is none")
        located.append(LocatedValue(reference=reference, name=name, entry=entry, kind=kind))
    return located


def follow_images(leader: PlannedImages, name: str, pictures: list[Any]) -> PlannedImages:
    """Plan images as other images of the same samples were planned, by the same parameters.

    Args:
        leader: The other images, planned by one transform that extends plans.
        name: The field of the images.
        pictures: The images, of the same sizes.

    Raises:
        SampleError: If an image must be rendered and cannot be decoded.
    """
    others, plan = leader.crops[0]
    try:
        return replace(leader, name=name, crops=[(render_alike(pictures, others), plan)])
    except DecodeError as error:
        raise undecodable(leader.samples, name, error.row, error) from error


def check_sizes(samples: StoredSamples, pictures_by_name: Mapping[str, Sequence[Picture]]) -> None:
    """Raise SampleError if images of a sample differ in size."""
    (leader, pictures), *others = pictures_by_name.items()
    for name, follower in others:
        for row, (one, other) in enumerate(zip(pictures, follower, strict=True)):
            if one.size == other.size:
                continue
            key, where = samples.describe(row)
            shown = " and ".join(f"{width}×{height}" for height, width in (one.size, other.size))
            message = (
                f"the images {leader!r} and {name!r} of sample {key} in {where} have {shown} pixels: images that are "
                "transformed alike must have one size"
            )
            raise SampleError(message, row=row, key=key, where=where, stage="decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFields:
    """The opened and planned images of samples, which their other fields follow.

    Attributes:
        images: The images by field. The others follow the first.
        followers: The values that follow them.
        sizes: The height and width of each sample's images.
        missing: What a sample may lack.
    """

    images: Mapping[str, PlannedImages]
    followers: Sequence[LocatedValue] = ()
    sizes: Sequence[tuple[int, int]] = ()
    missing: Missing = "error"

    def move(self, columns: Mapping[str, Sequence[Any]], samples: StoredSamples) -> dict[str, list[Any]]:
        """Transform the values that follow the images.

        Args:
            columns: The n values of each other field, by name.
            samples: The n samples.

        Returns:
            All columns, with the transformed values.

        Raises:
            SampleError: If a value is not what the transform takes it for.
        """
        moved = {name: list(column) for name, column in columns.items()}
        if not self.followers or not samples:
            return moved
        kinds = {each.reference: each.kind for each in self.followers}
        pictures, plan = next(iter(self.images.values())).crops[0]
        assert plan is not None, "all steps of a Compose with fields extend plans"
        for row in range(len(samples)):
            history = (*pictures[row].history, PlanRow(plan, row))
            try:
                values = {each.reference: self._get(each, columns[each.name][row]) for each in self.followers}
                values = move_annotations(kinds, values, self.sizes[row], history)
            except AnnotationError as error:
                raise self._describe(error, samples, row) from error
            for each in self.followers:
                column, value = moved[each.name], values[each.reference]
                if value is not None:
                    column[row] = value if each.entry is None else {**column[row], each.entry: value}
        return moved

    def _get(self, located: LocatedValue, value: Any) -> Any:
        """Return a located value, given the value that it is or is in; None if it is missing and may be."""
        if located.entry is None or (value is None and self.missing is None):
            return value
        if not isinstance(value, Mapping):
            raise AnnotationError(
                located.reference, f"must be an entry of {located.name!r}, got {type(value).__name__}"
            )
        if located.entry not in value and self.missing == "error":
            entries = ", ".join(map(repr, value))
            raise AnnotationError(
                located.reference, f"is missing: {located.name!r} has the entries {entries or 'none'}"
            )
        return value.get(located.entry)

    def _describe(self, error: AnnotationError, samples: StoredSamples, row: int) -> SampleError:
        name = next(each.name for each in self.followers if each.reference == error.name)
        key, where = samples.describe(row, (name,))
        message = f"field {error.name!r} of sample {key} in {where} {error}"
        return SampleError(message, row=row, key=key, where=where, stage="decode")
