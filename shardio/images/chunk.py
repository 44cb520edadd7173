"""Render a chunk's pictures into the rows of a batch, following their crop plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardio.images.by_kernel import render_by_kernel
from shardio.images.crop_plan import CropPlan, PlannedCrop, Rows
from shardio.images.editing import Operations, edit_images, make_operations
from shardio.images.jpeg.regions import Box
from shardio.images.kernel.compiled.operation_records import NONE, VERTICAL_FLIP
from shardio.images.kernel.compiled.records import GROUP_SIZE
from shardio.images.pictures import DecoderName, Picture
from shardio.images.rendering import Render, prepare_render
from shardio.images.resizing import flip
from shardio.images.scratch import scratch_pixels
from shardio.interruptions import let_through

IMAGES_AT_ONCE = GROUP_SIZE
"""The number of images that the kernel decodes side by side. To render fewer in a call takes longer."""


class DecodeError(ValueError):
    """An image of a chunk cannot be decoded.

    Attributes:
        row: The image's row in the chunk.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type[DecodeError], tuple[int, str]]:
        return type(self), (self.row, str(self))


class RenderedImages(NamedTuple):
    """The rendered images of a chunk.

    Attributes:
        images: n images: uint8 [height, width, 3], or what other libraries' transforms returned.
        decoder_names: The decoder of each image. The list is empty if the decoders are unknown.
    """

    images: list[Any]
    decoder_names: list[DecoderName]


def render_chunk(pictures: Sequence[Picture], plan: CropPlan, rows: Rows | None = None) -> RenderedImages:
    """Render one crop of each of some images; see :func:`render_crops`."""
    return render_crops([PlannedCrop(pictures, plan)], [rows])[0]


def render_crops(crops: Sequence[PlannedCrop], rows: Sequence[Rows | None]) -> list[RenderedImages]:
    """Decode some images; crop, resize, mirror and edit them, once for each of their crops.

    Only what the crops need is decoded, and all heavy work releases the GIL. The pixels are those of a full decode
    that is then cropped and resized, with one exception: without antialiasing, a JPEG whose box has more than a million
    pixels, and is at least 2, 4 or 8 times as large as its new size, is decoded at 1/2, 1/4 or 1/8 of its size, then
    sampled at the same points.

    Args:
        crops: The crops of n images, at least one of each.
        rows: The destinations of each crop: n uint8 [height, width, 3] arrays of the plan's output sizes, or one array
            of them; None for new arrays.

    Returns:
        For each crop, the rows, and the decoder of each image.

    Raises:
        DecodeError: If an image is truncated or damaged, or would be too large when resized.
        MemoryError: If memory runs out, which does not mean that an image is damaged.
    """
    destinations = [_make_rows(crop.plan) if given is None else given for crop, given in zip(crops, rows, strict=True)]
    is_rendered = render_by_kernel(crops, destinations)
    rendered = []
    for crop, destination, is_done in zip(crops, destinations, is_rendered.T, strict=True):
        _render_rows(crop, destination, np.flatnonzero(~is_done).tolist())
        if (operations := _operations_of(crop.plan)) is not None:
            edit_images(destination, operations)
        decoder_names: list[DecoderName] = [
            "kernel" if by_kernel else picture.decoder_name
            for picture, by_kernel in zip(crop.pictures, is_done.tolist(), strict=True)
        ]
        rendered.append(RenderedImages(list(destination), decoder_names))
    return rendered


def _render_rows(crop: PlannedCrop, destinations: Rows, rows: list[int]) -> None:
    """Render the images in these rows by the libraries."""
    if not rows:
        return
    pictures, plan = crop
    boxes, sizes, windows = plan.box.tolist(), plan.size.tolist(), plan.window.tolist()
    flips = plan.flip.tolist()
    renders: list[tuple[int, Render]] = []
    # First all Python code, then all decoding, so that each finds its memory in the processor's caches.
    for row in rows:
        height, width = sizes[row]
        try:
            render = prepare_render(pictures[row], Box(*boxes[row]), height, width, Box(*windows[row]), plan.resampling)
        except ValueError as error:
            let_through(error)
            raise DecodeError(row, str(error)) from error
        renders.append((row, render))
    for row, render in renders:
        destination = destinations[row]
        unflipped = scratch_pixels("unflipped", *destination.shape[:2]) if flips[row] else destination
        try:
            render(unflipped)
        except ValueError as error:
            let_through(error)
            raise DecodeError(row, str(error)) from error
        if flips[row]:
            flip(unflipped, out=destination)


def _operations_of(plan: CropPlan) -> Operations | None:
    """Return what is done with the rendered images: vertical flips, then the plan's operations."""
    if plan.upside_down is None or not plan.upside_down.any():
        return plan.operations
    flips = make_operations(len(plan.upside_down), NONE)
    flips["code"][plan.upside_down] = VERTICAL_FLIP
    return flips if plan.operations is None else np.concatenate([flips, plan.operations], axis=1)


def _make_rows(plan: CropPlan) -> Rows:
    """Return new arrays for a plan's results: the rows of one array if all have one size."""
    sizes = plan.output_size.tolist()
    if sizes and all(size == sizes[0] for size in sizes):
        return np.empty((len(sizes), *sizes[0], 3), np.uint8)
    return [np.empty((height, width, 3), np.uint8) for height, width in sizes]
