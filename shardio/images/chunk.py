"""The way from encoded images to pixels in the rows of a batch, a chunk of images at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardio.images.by_kernel import draw_by_kernel
from shardio.images.drawing import Draw, prepare
from shardio.images.jpeg.regions import Box
from shardio.images.pictures import DecoderName, Picture
from shardio.images.pixels import Pixels
from shardio.images.plans import CropPlan
from shardio.images.resizing import flip
from shardio.images.scratch import scratch_pixels
from shardio.interruptions import let_through


class DecodeError(ValueError):
    """An image of a chunk cannot be decoded.

    Attributes:
        row: Its place in the chunk.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type[DecodeError], tuple[int, str]]:
        return type(self), (self.row, str(self))


def decode_chunk(images: Sequence[Picture], plans: CropPlan, rows: Pixels | Sequence[Pixels]) -> list[DecoderName]:
    """Decode, crop, resize and mirror some images into the rows of a batch.

    Only what the crops need is decoded, and all heavy work releases the GIL. The pixels are those of a full decode
    that is cropped and then resized; but where a JPEG's box is at least twice, four or eight times as large as what
    it is resized to, and there is no antialiasing, of a full decode at 1/2, 1/4 or 1/8 of the size, sampled at the
    same places.

    Args:
        images: n pictures.
        plans: What to make of each.
        rows: What to write to: uint8 [n, height, width, 3], or n arrays uint8 [height, width, 3] of the plans' output
        sizes.

    Returns:
        Who decoded each of them.

    Raises:
        DecodeError: If an image is truncated or damaged, or too large to be resized so.
        MemoryError: If memory runs out, which says nothing of the image.
    """
    is_drawn = draw_by_kernel(images, plans, rows)
    boxes, sizes, windows = plans.box.tolist(), plans.size.tolist(), plans.window.tolist()
    flips = plans.flip.tolist()
    draws: list[tuple[int, Draw]] = []
    # All Python first, then all decoding: each finds its memory in the processor's caches.
    for row in np.flatnonzero(~is_drawn).tolist():
        height, width = sizes[row]
        try:
            draw = prepare(images[row], Box(*boxes[row]), height, width, Box(*windows[row]), plans.antialias)
        except ValueError as error:
            let_through(error)
            raise DecodeError(row, str(error)) from error
        draws.append((row, draw))
    for row, draw in draws:
        destination = rows[row]
        unflipped = scratch_pixels("unflipped", *destination.shape[:2]) if flips[row] else destination
        try:
            draw(unflipped)
        except ValueError as error:
            let_through(error)
            raise DecodeError(row, str(error)) from error
        if flips[row]:
            flip(unflipped, out=destination)
    return ["kernel" if drawn else image.decoder_name for image, drawn in zip(images, is_drawn.tolist(), strict=True)]


def decode_all(images: Sequence[Picture], plans: CropPlan) -> list[Pixels]:
    """Do what :func:`decode_chunk` does, into new arrays."""
    rows = make_rows(plans)
    decode_chunk(images, plans, rows)
    return list(rows)


def make_rows(plans: CropPlan) -> Pixels | list[Pixels]:
    """Return new arrays for what comes out of some plans: rows of one batch if they are of one size."""
    sizes = plans.output_size.tolist()
    if sizes and all(size == sizes[0] for size in sizes):
        return np.empty((len(sizes), *sizes[0], 3), np.uint8)
    return [np.empty((height, width, 3), np.uint8) for height, width in sizes]
