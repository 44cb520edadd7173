"""The images of a chunk: opened and planned first, then rendered to pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardio.decoding.field_names import stored_fields_of
from shardio.errors import SampleError
from shardio.images import CropPlan, DecodeError, Pixels, PlannedCrop, RenderedImages, render_crops
from shardio.interruptions import let_through
from shardio.reading import StoredSamples
from shardio.transforms import Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedImages:
    """Opened images and the drawn parameters of their transforms. :meth:`render` makes their pixels.

    Attributes:
        name: The name of the images' field: ``image`` for those of any format.
        samples: The images' samples, for errors.
        calls: The calls of people's own callables.
        crops: The n images of each crop of a MultiCrop, or of the only one: pictures to render and how to render them,
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
            rows: For each crop, where to write the images, if they fit: uint8 [n, height, width, 3]; None for new
                arrays. By default, all are new.

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
        name: The name of the images' field: ``image`` for those of any format.
        open_one: Opens an image; raises ValueError if that fails.

    Raises:
        SampleError: If an image is missing, empty or damaged.
    """
    columns = [samples.columns[field] for field in stored_fields_of(name) if field in samples.columns]
    return [_open(samples, name, row, contents, open_one) for row, contents in enumerate(zip(*columns, strict=True))]


def _open(
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
