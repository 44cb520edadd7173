"""The way from encoded images to pixels in the rows of a batch, a chunk of images at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardio.images.jpeg.regions import MIN_SCALED_SIDE, Box
from shardio.images.pictures import Picture
from shardio.images.pixels import Pixels
from shardio.images.plans import CropPlans
from shardio.images.resizing import flip, resize, sample
from shardio.images.scratch import scratch_pixels

SCALES = (8, 4, 2)
"""How many times smaller libjpeg can decode a JPEG, by a smaller inverse DCT of each block."""


class DecodeError(ValueError):
    """An image of a chunk cannot be decoded.

    Attributes:
        number: Its place in the chunk.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def decode_chunk(images: Sequence[Picture], plans: CropPlans, rows: Sequence[Pixels]) -> None:
    """Decode, crop, resize and mirror some images into the rows of a batch.

    Only what the crops need is decoded, and all heavy work releases the GIL. The pixels are those of a full decode
    that is cropped and then resized; but where a JPEG's box is at least twice, four or eight times as large as what
    it is resized to, and there is no antialiasing, of a full decode at 1/2, 1/4 or 1/8 of the size, sampled at the
    same places.

    Args:
        images: n pictures.
        plans: What to make of each.
        rows: n arrays uint8 [height, width, 3] to write to, of the plans' output sizes.

    Raises:
        DecodeError: If an image is truncated or damaged.
    """
    parts = zip(
        images, plans.box.tolist(), plans.size.tolist(), plans.window.tolist(), plans.flip.tolist(), rows, strict=True
    )
    for number, (image, box, (height, width), window, is_flipped, row) in enumerate(parts):
        picture = _Resized(image, Box(*box), height, width, plans.antialias)
        unflipped = scratch_pixels("unflipped", *row.shape[:2]) if is_flipped else row
        try:
            picture.draw(Box(*window), unflipped)
        except ValueError as error:
            raise DecodeError(number, str(error) or repr(error)) from error
        if is_flipped:
            flip(unflipped, out=row)


def decode_all(images: Sequence[Picture], plans: CropPlans) -> list[Pixels]:
    """Do what :func:`decode_chunk` does, into new arrays: rows of one batch if they are of one size."""
    sizes = plans.output_size.tolist()
    if sizes and all(size == sizes[0] for size in sizes):
        rows = list(np.empty((len(sizes), *sizes[0], 3), np.uint8))
    else:
        rows = [np.empty((height, width, 3), np.uint8) for height, width in sizes]
    decode_chunk(images, plans, rows)
    return rows


class _Resized(NamedTuple):
    """A box of an image, seen as resized to height and width."""

    image: Picture
    box: Box
    height: int
    width: int
    antialias: bool

    def draw(self, window: Box, out: Pixels) -> None:
        """Write a window of it to ``out``, with black where the window reaches beyond."""
        visible = _intersect(window, self.height, self.width)
        if visible != window:
            out[...] = 0
            top, left = visible.top - window.top, visible.left - window.left
            out = out[top : top + visible.height, left : left + visible.width]
        scale = self._choose_scale()
        if scale > 1:
            self._sample(visible, scale, out)
        elif (self.box.height, self.box.width) == (self.height, self.width):
            np.copyto(out, self.image.read(_inside(self.box, visible)))
        elif visible == (0, 0, self.height, self.width):
            resize(self.image.read(self.box), self.height, self.width, antialias=self.antialias, out=out)
        else:
            whole = scratch_pixels("resized", self.height, self.width)
            resize(self._read_sources(visible), self.height, self.width, antialias=self.antialias, out=whole)
            np.copyto(out, _view(whole, visible))

    def _choose_scale(self) -> int:
        if not self.image.can_scale or self.antialias or min(self.box.height, self.box.width) < MIN_SCALED_SIDE:
            return 1
        fits = (s for s in SCALES if self.box.height >= s * self.height and self.box.width >= s * self.width)
        return next(fits, 1)

    def _sample(self, visible: Box, scale: int, out: Pixels) -> None:
        """Write a part of it to ``out``, from the picture at 1/scale, in which the box need not begin at a pixel."""
        (height, width), (origin_top, origin_left) = self.image.size, self.image.origin(scale)
        rows = _Samples.lay(self.box.top, self.box.height, self.height, height, scale, origin_top)
        columns = _Samples.lay(self.box.left, self.box.width, self.width, width, scale, origin_left)
        (top, bottom), (left, right) = (
            rows.sources(visible.top, visible.height),
            columns.sources(visible.left, visible.width),
        )
        pixels = self.image.read(Box(top, left, bottom - top, right - left), scale)
        corner = rows.position(visible.top) - top, columns.position(visible.left) - left
        sample(pixels, corner, (rows.step, columns.step), out)

    def _read_sources(self, visible: Box) -> Pixels:
        """Return the box, in which all pixels are right that a part of the resized picture is made of.

        OpenCV and Pillow can only resize a whole picture: a part of it would be sampled at other places.
        """
        top, height = self._sources(visible.top, visible.height, self.box.height, self.height)
        left, width = self._sources(visible.left, visible.width, self.box.width, self.width)
        needed = Box(top, left, height, width)
        if needed == (0, 0, self.box.height, self.box.width):
            return self.image.read(self.box)
        canvas = scratch_pixels("canvas", self.box.height, self.box.width)
        np.copyto(_view(canvas, needed), self.image.read(_inside(self.box, needed)))
        return canvas

    def _sources(self, start: int, length: int, num_before: int, num_after: int) -> tuple[int, int]:
        """Return which of the pixels of a row before resizing a stretch of those after it depends on."""
        ratio = num_before / num_after
        reach = max(ratio, 1.0) if self.antialias else 1.0
        first = math.floor((start + 0.5) * ratio - 0.5 - reach)
        stop = math.ceil((start + length - 0.5) * ratio + 0.5 + reach)
        first, stop = max(first, 0), min(stop, num_before)
        return first, stop - first


class _Samples(NamedTuple):
    """Where the pixels of a row lie among those of a row of a smaller picture, counted from the first one's centre."""

    first: float
    step: float
    start: int
    stop: int

    @classmethod
    def lay(cls, start: int, length: int, num_after: int, total: int, scale: int, origin: float) -> _Samples:
        """Lay ``num_after`` pixels evenly over a stretch of a row of ``total`` pixels, seen at 1/scale."""
        before, step = origin + start / scale, length / scale / num_after
        stop = min(math.ceil(before + length / scale), -(-total // scale))
        return cls(before + step / 2 - 0.5, step, math.floor(before), stop)

    def position(self, number: int) -> float:
        return self.first + number * self.step

    def sources(self, start: int, length: int) -> tuple[int, int]:
        """Return the pixels of the smaller row, start and stop, that a stretch depends on; none beyond the box."""
        first, last = math.floor(self.position(start)), math.floor(self.position(start + length - 1))
        return max(first - 1, self.start), min(last + 3, self.stop)


def _intersect(window: Box, height: int, width: int) -> Box:
    """Return the part of a window that lies in a picture of a size."""
    top, left = max(window.top, 0), max(window.left, 0)
    bottom, right = min(window.top + window.height, height), min(window.left + window.width, width)
    return Box(top, left, bottom - top, right - left)


def _inside(outer: Box, inner: Box) -> Box:
    """Return where a part of a part lies in the whole."""
    return Box(outer.top + inner.top, outer.left + inner.left, inner.height, inner.width)


def _view(pixels: Pixels, box: Box) -> Pixels:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]
