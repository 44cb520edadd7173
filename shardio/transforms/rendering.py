"""Render the images of a chunk by their plan, before a step that needs their pixels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import (
    IMAGES_AT_ONCE,
    CropPlan,
    DecodedPicture,
    DecodeError,
    Picture,
    PlanRow,
    RenderedImages,
    render_chunk,
)
from shardio.transforms.calls import Calls

MAX_RENDERED_BYTES = 2**25
"""How many bytes of pixels are rendered before people's callables get them, at most, unless three images take more.

The kernel decodes three images side by side, and is fastest if it can choose three that take equally long.
"""


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
    """Render only these rows, so that the pixels of the other images do not depend on them."""
    if not rows.size:
        return images, plan
    pictures, images = _render_rows_as_pictures(images, plan, rows), list(images)
    for row, picture in zip(rows.tolist(), pictures, strict=True):
        images[row] = picture
    return images, plan.restart(rows)


def render_alike(images: list[Any], others: Sequence[Picture]) -> list[Any]:
    """Return images as pictures that have the history of other pictures: rendered by the same plans.

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
    """Render these rows as pictures that know how they were rendered."""
    rendered = _render_rows(images, plan, rows)
    return [
        DecodedPicture(pixels, decoder_name, (*images[row].history, PlanRow(plan, row)))
        for row, pixels, decoder_name in zip(rows.tolist(), rendered.images, rendered.decoder_names, strict=True)
    ]


def _render_rows(pictures: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> RenderedImages:
    """Render these rows of a chunk; an error names the row in the chunk."""
    try:
        return render_chunk([pictures[row] for row in rows], plan.take(rows))
    except DecodeError as error:
        raise DecodeError(int(rows[error.row]), str(error)) from error
