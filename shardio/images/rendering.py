"""Prepare the rendering of one image by its crop plan: what to read, at which scale, and how to resize it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardio.images.bilinear import sample
from shardio.images.jpeg.regions import Box
from shardio.images.pictures import DEFAULT_MAX_PIXELS, Picture
from shardio.images.pixels import Pixels
from shardio.images.resizing import Resampling, resize
from shardio.images.scratch import scratch_pixels

SCALES = (8, 4, 2)
"""Factors by which libjpeg can shrink a JPEG while decoding, by a smaller inverse DCT of each block."""

MAX_RESIZED_PIXELS = DEFAULT_MAX_PIXELS
"""The maximum number of pixels after resizing. Enlarging the shorter side of a long, thin image can make it huge."""

MAX_AVERAGED_PIXELS = 1 << 20
"""A larger box that shrinks to half its size or less is decoded at a fraction of its size, unless it is antialiased.

The kernel decodes boxes up to this size at their full size, and that takes about as long."""

Render = Callable[[Pixels], object]
"""A function that writes pixels to uint8 [height, width, 3], or raises ValueError if the image is damaged."""


def is_too_large_to_average(num_pixels: Any) -> Any:
    """Return whether a box of so many pixels that shrinks to half its size or less is decoded at a smaller size.

    Args:
        num_pixels: An int or an array.

    Returns:
        A bool or an array.
    """
    return num_pixels > MAX_AVERAGED_PIXELS


def prepare_render(picture: Picture, box: Box, height: int, width: int, window: Box, resampling: Resampling) -> Render:
    """Return a function that renders a window of a resized box, black where the window extends beyond it.

    Args:
        picture: The picture.
        box: The part of it to resize.
        height: The height that the box is resized to.
        width: The width that the box is resized to.
        window: The part of the resized box to render.
        resampling: How to resize it.

    Raises:
        ValueError: If the resized box is too large.
    """
    if height * width > MAX_RESIZED_PIXELS:
        raise ValueError(
            f"a part of {box.width}×{box.height} pixels cannot be resized to {width}×{height}: at most "
            f"{MAX_RESIZED_PIXELS} pixels are allowed"
        )
    visible = _intersect(window, height, width)
    if visible.height <= 0 or visible.width <= 0:
        return lambda out: out.fill(0)
    render = _prepare_visible(picture, box, height, width, visible, resampling)
    if visible == window:
        return render

    def render_padded(out: Pixels) -> None:
        out[...] = 0
        render(_view(out, visible._replace(top=visible.top - window.top, left=visible.left - window.left)))

    return render_padded


def _prepare_visible(
    picture: Picture, box: Box, height: int, width: int, visible: Box, resampling: Resampling
) -> Render:
    if resampling == "bilinear" and (scale := _choose_scale(box, height, width)) > 1:
        if picture.can_scale and is_too_large_to_average(box.height * box.width):
            return _prepare_scaled(picture, box, height, width, visible, scale)
        resampling = "antialiased bilinear"
    if (box.height, box.width) == (height, width):
        return picture.prepare_copy(_inside(box, visible))
    if visible == (0, 0, height, width):
        whole = picture.part(box)
        return lambda out: resize(whole(), height, width, resampling, out=out)
    return _prepare_window(picture, box, height, width, visible, resampling)


def _prepare_window(
    picture: Picture, box: Box, height: int, width: int, visible: Box, resampling: Resampling
) -> Render:
    """Return a function that renders a part of the resized box.

    :func:`resize` would sample a part of an image at other points. So it gets the whole box, in which only the pixels
    that the visible part depends on are decoded.
    """
    rows = _sources(visible.top, visible.height, box.height, height, resampling)
    columns = _sources(visible.left, visible.width, box.width, width, resampling)
    needed = Box(rows.start, columns.start, len(rows), len(columns))
    part = picture.part(_inside(box, needed))

    def render(out: Pixels) -> None:
        before = scratch_pixels("before resizing", box.height, box.width)
        np.copyto(_view(before, needed), part())
        after = scratch_pixels("after resizing", height, width)
        resize(before, height, width, resampling, out=after)
        np.copyto(out, _view(after, visible))

    return render


def _prepare_scaled(picture: Picture, box: Box, height: int, width: int, visible: Box, scale: int) -> Render:
    """Return a function that renders a part of the resized box from the picture at 1/scale of its size.

    The box may begin between pixels of the scaled picture, so the picture is sampled at the exact points.
    """
    (picture_height, picture_width), (origin_top, origin_left) = picture.size, picture.origin(scale)
    rows = _Samples.lay(box.top, box.height, height, picture_height, scale, origin_top)
    columns = _Samples.lay(box.left, box.width, width, picture_width, scale, origin_left)
    needed_rows = rows.sources(visible.top, visible.height)
    needed_columns = columns.sources(visible.left, visible.width)
    needed = Box(needed_rows.start, needed_columns.start, len(needed_rows), len(needed_columns))
    part = picture.part(needed, scale)
    corner = rows.point(visible.top) - needed.top, columns.point(visible.left) - needed.left
    steps = rows.step, columns.step
    return lambda out: np.copyto(out, sample(part(), corner, steps, visible.height, visible.width))


class _Samples(NamedTuple):
    """Evenly spaced points along a side of a scaled picture, in its pixels from the centre of the first pixel."""

    first: float
    step: float
    start: int
    stop: int

    @classmethod
    def lay(cls, start: int, length: int, num_after: int, total: int, scale: int, origin: float) -> _Samples:
        """Space ``num_after`` points evenly over a part of a side of ``total`` pixels, at 1/scale of its size."""
        before, step = origin + start / scale, length / scale / num_after
        stop = min(math.ceil(before + length / scale), -(-total // scale))
        return cls(before + step / 2 - 0.5, step, math.floor(before), stop)

    def point(self, index: int) -> float:
        return self.first + index * self.step

    def sources(self, start: int, length: int) -> range:
        """Return the pixels inside the box that a run of points depends on."""
        first, last = math.floor(self.point(start)), math.floor(self.point(start + length - 1))
        return range(max(first - 1, self.start), min(last + 3, self.stop))


def _choose_scale(box: Box, height: int, width: int) -> int:
    """Return the largest scale at which a box is still at least as large as its new size."""
    for scale in SCALES:
        if box.height >= scale * height and box.width >= scale * width:
            return scale
    return 1


def _sources(start: int, length: int, num_before: int, num_after: int, resampling: Resampling) -> range:
    """Return the pixels of a side that a part of the resized side depends on."""
    ratio = num_before / num_after
    reaches = {"antialiased bilinear": max(ratio, 1.0), "antialiased bicubic": 2 * max(ratio, 1.0)}
    reach = reaches.get(resampling, 1.0)
    first = math.floor((start + 0.5) * ratio - 0.5 - reach)
    stop = math.ceil((start + length - 0.5) * ratio + 0.5 + reach)
    return range(max(first, 0), min(stop, num_before))


def _intersect(window: Box, height: int, width: int) -> Box:
    """Return the part of a window that is inside an image of this size."""
    top, left = max(window.top, 0), max(window.left, 0)
    bottom, right = min(window.top + window.height, height), min(window.left + window.width, width)
    return Box(top, left, bottom - top, right - left)


def _inside(outer: Box, inner: Box) -> Box:
    """Convert a box relative to ``outer`` to one relative to the whole picture."""
    return Box(outer.top + inner.top, outer.left + inner.left, inner.height, inner.width)


def _view(pixels: Pixels, box: Box) -> Pixels:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]
