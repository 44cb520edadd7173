"""Render the images of a chunk by their plan, before a step that needs their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import IMAGES_AT_ONCE, CropPlan, DecodedPicture, DecodeError, RenderedImages, render_chunk
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
    rendered = render_chunk(images, plan)
    return [DecodedPicture(*each) for each in zip(rendered.images, rendered.decoder_names, strict=True)]


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
    rendered, images = _render_rows(images, plan, rows), list(images)
    for row, pixels, decoder_name in zip(rows.tolist(), rendered.images, rendered.decoder_names, strict=True):
        images[row] = DecodedPicture(pixels, decoder_name)
    return images, plan.restart(rows)


def _render_rows(pictures: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> RenderedImages:
    """Render these rows of a chunk; an error names the row in the chunk."""
    try:
        return render_chunk([pictures[row] for row in rows], plan.take(rows))
    except DecodeError as error:
        raise DecodeError(int(rows[error.row]), str(error)) from error
