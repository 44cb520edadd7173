"""Plan the images, masks, boxes and points of a chunk together, then render them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardio.decoding.codecs import Missing
from shardio.errors import SampleError
from shardio.images import (
    IMAGE_FIELDS,
    CropPlan,
    DecodeError,
    Picture,
    Pixels,
    PlannedCrop,
    PlanRow,
    RenderedImages,
    holds_images,
    render_crops,
)
from shardio.process import let_through
from shardio.reading import StoredSamples
from shardio.shards import LABEL_FIELD
from shardio.transforms import AnnotationError, Calls, FieldKind, move_annotations, render_same

_STORED_FIELDS: dict[str, tuple[str, ...]] = {"image": IMAGE_FIELDS, "label": (LABEL_FIELD,), "key": ()}
"""The stored fields of values that are not named after their field."""


def stored_fields_of(name: str) -> tuple[str, ...]:
    """Return the stored fields that may hold a value."""
    return _STORED_FIELDS.get(name, (name,))


def check_present(names: Sequence[str], present: Sequence[str], where: str) -> None:
    """Check the names of values, given the fields that a dataset's samples have.

    Raises:
        ValueError: If a field is missing.
    """
    for name in names:
        choices = stored_fields_of(name) or present
        if not set(choices) & set(present):
            derived = [value for value, stored in _STORED_FIELDS.items() if not stored or set(stored) & set(present)]
            raise ValueError(
                f"no sample of {where} has the field {name!r}: choose fields=... from "
                f"{', '.join((*sorted(derived), *present))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedImages:
    """Opened images and the drawn parameters of their transforms. :meth:`render` makes their pixels.

    Attributes:
        name: The name of the images' field: ``image`` for images of any format.
        samples: The images' samples, for errors.
        calls: The calls of user callables.
        crops: For each crop of a MultiCrop, or for the only crop, the n images: pictures and the plan to render them,
            or finished images without a plan.
    """

    name: str = "image"
    samples: StoredSamples
    calls: Calls
    crops: Sequence[tuple[list[Any], CropPlan | None]]

    def fits(self, index: int, rows: Pixels | None) -> bool:
        """Return whether a crop of the images can be rendered into rows, uint8 [n, height, width, 3]."""
        plan = self.crops[index][1]
        return rows is not None and plan is not None and plan.fits(rows)

    def render(self, rows: Sequence[Pixels | None] | None = None) -> list[RenderedImages]:
        """Render the images.

        Args:
            rows: The destination of each crop's images, uint8 [n, height, width, 3], which the images fit; None for
                new arrays. By default, all arrays are new.

        Returns:
            For each crop, the images, and the name of the decoder of each.

        Raises:
            SampleError: If an image is damaged.
        """
        planned = [index for index, (_, plan) in enumerate(self.crops) if plan is not None]
        rendered = [RenderedImages(images, []) for images, _ in self.crops]
        if rendered[0].images and self.crops[0][1] is None:
            rendered[0] = RenderedImages(rendered[0].images, self.calls.decoder_names[: len(rendered[0].images)])
        if planned:
            crops = [PlannedCrop(images, plan) for images, plan in self.crops if plan is not None]
            try:
                made = render_crops(crops, [None if rows is None else rows[index] for index in planned])
            except DecodeError as error:
                raise undecodable(self.samples, self.name, error.row, error) from error
            for index, images in zip(planned, made, strict=True):
                rendered[index] = images
        return rendered


def open_images(samples: StoredSamples, name: str, open_one: Callable[[bytes], Any]) -> list[Any]:
    """Open an image of each sample: the first of its fields that is not empty.

    Args:
        samples: n samples.
        name: The name of the images' field: ``image`` for images of any format.
        open_one: Opens an image; raises ValueError if that fails.

    Raises:
        SampleError: If an image is missing, empty or damaged.
    """
    columns = [samples.columns[field] for field in stored_fields_of(name) if field in samples.columns]
    return [
        _open_image(samples, name, row, contents, open_one) for row, contents in enumerate(zip(*columns, strict=True))
    ]


def _open_image(
    samples: StoredSamples, name: str, row: int, contents: Sequence[bytes | None], open_one: Callable[[bytes], Any]
) -> Any:
    content = next(filter(None, contents), None)
    if content is None and b"" in contents:
        raise undecodable(samples, name, row, "it is empty (0 bytes)")
    if content is None:
        key, where = samples.describe(row)
        fields = stored_fields_of(name)
        lacking = f"none of the fields {', '.join(fields)}" if len(fields) > 1 else f"it lacks the field {name!r}"
        message = f"sample {key} in {where} has no image: {lacking}{samples.remedy}"
        raise SampleError(message, row=row, key=key, where=where)
    try:
        return open_one(content)
    except ValueError as error:
        let_through(error)
        raise undecodable(samples, name, row, error) from error


def undecodable(samples: StoredSamples, name: str, row: int, why: ValueError | str) -> SampleError:
    """Return the error for a sample with an image that cannot be decoded."""
    fields = [field for field in stored_fields_of(name) if field in samples.columns]
    present = [field for field in fields if samples.columns[field][row] is not None]
    opened = [field for field in present if samples.columns[field][row]] or present
    key, where = samples.describe(row, opened[:1])
    image = "the image" if name == "image" else f"the image {name!r}"
    message = f"{image} of sample {key} in {where} cannot be decoded: {str(why) or repr(why)}"
    return SampleError(message, row=row, key=key, where=where, stage="decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedValue:
    """A value that a transform transforms.

    Attributes:
        reference: Its name in the transform.
        name: The name of the sample's value that contains it.
        entry: Its key in this value; None if it is the whole value.
        kind: Its kind.
    """

    reference: str
    name: str
    entry: str | None
    kind: FieldKind


def locate_values(
    kinds: Mapping[str, FieldKind], names: Sequence[str], own_decoders: Collection[str]
) -> list[LocatedValue]:
    """Find the values that a transform transforms.

    A reference is the name of a value, or a name, a dot, and the key of an entry.

    Args:
        kinds: The kind of each value, by its reference.
        names: The names of a sample's values.
        own_decoders: The names of the values that user decoders make.

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
    """Plan images with the same parameters as other images of the same samples.

    Args:
        leader: The other images, planned by one transform that extends plans.
        name: The field of the images.
        pictures: The images, of the same sizes.

    Raises:
        SampleError: If an image must be rendered and cannot be decoded.
    """
    others, plan = leader.crops[0]
    try:
        return replace(leader, name=name, crops=[(render_same(pictures, others), plan)])
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
        followers: The values that follow the images.
        sizes: The height and width of each sample's images.
        missing: The result for a missing value: an error, or None.
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
            SampleError: If a value does not fit its kind.
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
        """Return a located value, given the value that contains it; None if it is missing and may be."""
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
