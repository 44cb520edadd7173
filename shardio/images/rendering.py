"""Render a chunk's pictures into the rows of a batch by their crop plan, with the kernel if possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.crop_plan import CropPlan, PlannedCrop, Resampling, Rows, flip, resize, sample
from shardio.images.editing import Operations, edit_images, make_operations
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.head import read_head, why_irregular
from shardio.images.jpeg.regions import Box
from shardio.images.jpeg.standard import EOI, JPEG_START, marker_bytes
from shardio.images.kernel import find_kernel
from shardio.images.kernel.compiled.operation_records import NONE, VERTICAL_FLIP
from shardio.images.kernel.compiled.records import (
    GROUP_SIZE,
    LUMA_FACTORS,
    MAX_BYTES,
    MIRRORED,
    PLAN,
    TRANSPOSED,
    UPSIDE_DOWN,
)
from shardio.images.kernel.functions import RESAMPLINGS
from shardio.images.opening import JpegPicture
from shardio.images.pictures import DEFAULT_MAX_PIXELS, UPRIGHT, DecoderName, Picture, Pixels, scratch_pixels, sizes_of
from shardio.process import let_through

SCALES = (8, 4, 2)
"""Factors by which libjpeg can shrink a JPEG while decoding, by a smaller inverse DCT of each block."""

MAX_RESIZED_PIXELS = DEFAULT_MAX_PIXELS
"""The maximum number of pixels after resizing. Enlarging the shorter side of a long, thin image can make it huge."""

MAX_AVERAGED_PIXELS = 1 << 20
"""The most pixels of a box that is decoded at full size, though it shrinks to half or less without antialiasing.

Larger boxes are decoded at a fraction of their size. Decoding smaller ones at full size takes the kernel about as long.
"""

IMAGES_AT_ONCE = GROUP_SIZE
"""The number of images that the kernel decodes side by side. Rendering fewer in a call takes longer per image."""

_KERNEL_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in LUMA_FACTORS)

Render = Callable[[Pixels], object]
"""A function that writes pixels to uint8 [height, width, 3], or raises ValueError if the image is damaged."""


class DecodeError(ValueError):
    """The error for an image of a chunk that cannot be decoded.

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
        images: n images: uint8 [height, width, 3], or results of other libraries' transforms.
        decoder_names: The decoder of each image. The list is empty if the decoders are unknown.
    """

    images: list[Any]
    decoder_names: list[DecoderName]


def render_chunk(pictures: Sequence[Picture], plan: CropPlan, rows: Rows | None = None) -> RenderedImages:
    """Render one crop of each of some images; see :func:`render_crops`."""
    return render_crops([PlannedCrop(pictures, plan)], [rows])[0]


def render_crops(crops: Sequence[PlannedCrop], rows: Sequence[Rows | None]) -> list[RenderedImages]:
    """Decode some images; crop, resize, mirror and edit them, once for each of their crops.

    Only the parts that the crops need are decoded, and all heavy work releases the GIL. The pixels are those of a full
    decode that is then cropped and resized, with one exception: without antialiasing, a JPEG whose box has more than a
    million pixels, and is at least 2, 4 or 8 times as large as its new size, is decoded at 1/2, 1/4 or 1/8 of its size,
    then sampled at the same points.

    Args:
        crops: The crops of n images, at least one of each.
        rows: The destinations of each crop: n uint8 [height, width, 3] arrays of the plan's output sizes, or one array
            of them; None for new arrays.

    Returns:
        For each crop, the rows, and the decoder of each image.

    Raises:
        DecodeError: If an image is truncated or damaged, or would be too large when resized.
        MemoryError: If memory runs out. The images may be undamaged.
    """
    destinations = [_make_rows(crop.plan) if given is None else given for crop, given in zip(crops, rows, strict=True)]
    is_rendered = render_by_kernel(crops, destinations)
    rendered = []
    for crop, destination, is_done in zip(crops, destinations, is_rendered.T, strict=True):
        _render_by_libraries(crop, destination, np.flatnonzero(~is_done).tolist())
        if (operations := _operations_of(crop.plan)) is not None:
            edit_images(destination, operations)
        decoder_names: list[DecoderName] = [
            "kernel" if by_kernel else picture.decoder_name
            for picture, by_kernel in zip(crop.pictures, is_done.tolist(), strict=True)
        ]
        rendered.append(RenderedImages(list(destination), decoder_names))
    return rendered


def _render_by_libraries(crop: PlannedCrop, destinations: Rows, rows: list[int]) -> None:
    if not rows:
        return
    pictures, plan = crop
    boxes, sizes, windows = plan.box.tolist(), plan.size.tolist(), plan.window.tolist()
    flips = plan.flip.tolist()
    renders: list[tuple[int, Render]] = []
    # First all Python code, then all decoding, because each is faster while its memory is in the processor's caches.
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
    """Return the operations on the rendered images: vertical flips, then the plan's operations."""
    if plan.upside_down is None or not plan.upside_down.any():
        return plan.operations
    flips = make_operations(len(plan.upside_down), NONE)
    flips["code"][plan.upside_down] = VERTICAL_FLIP
    return flips if plan.operations is None else np.concatenate([flips, plan.operations], axis=1)


def _make_rows(plan: CropPlan) -> Rows:
    """Return new arrays for a plan's results: the rows of one array if all results have one size."""
    sizes = plan.output_size.tolist()
    if sizes and all(size == sizes[0] for size in sizes):
        return np.empty((len(sizes), *sizes[0], 3), np.uint8)
    return [np.empty((height, width, 3), np.uint8) for height, width in sizes]


def is_too_large_to_average(num_pixels: Any) -> Any:
    """Return whether a box of so many pixels that shrinks to half its size or less is decoded at a smaller size.

    Args:
        num_pixels: An int or an array.

    Returns:
        A bool or an array.
    """
    return num_pixels > MAX_AVERAGED_PIXELS


def prepare_render(picture: Picture, box: Box, height: int, width: int, window: Box, resampling: Resampling) -> Render:
    """Return a function that renders a window of a resized box, with black pixels beyond the box.

    Args:
        picture: The picture.
        box: The part of it to resize.
        height: The height that the box is resized to.
        width: The width that the box is resized to.
        window: The part of the resized box to render.
        resampling: The way to resize it.

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
        render(_part_of(out, visible._replace(top=visible.top - window.top, left=visible.left - window.left)))

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
    for the visible part are decoded.
    """
    rows = _needed_pixels(visible.top, visible.height, box.height, height, resampling)
    columns = _needed_pixels(visible.left, visible.width, box.width, width, resampling)
    needed = Box(rows.start, columns.start, len(rows), len(columns))
    part = picture.part(_inside(box, needed))

    def render(out: Pixels) -> None:
        before = scratch_pixels("before resizing", box.height, box.width)
        np.copyto(_part_of(before, needed), part())
        after = scratch_pixels("after resizing", height, width)
        resize(before, height, width, resampling, out=after)
        np.copyto(out, _part_of(after, visible))

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
        """Return the pixels inside the box that determine a run of points."""
        first, last = math.floor(self.point(start)), math.floor(self.point(start + length - 1))
        return range(max(first - 1, self.start), min(last + 3, self.stop))


def _choose_scale(box: Box, height: int, width: int) -> int:
    for scale in SCALES:
        if box.height >= scale * height and box.width >= scale * width:
            return scale
    return 1


def _needed_pixels(start: int, length: int, num_before: int, num_after: int, resampling: Resampling) -> range:
    """Return the pixels of a side that determine a part of the resized side."""
    ratio = num_before / num_after
    reaches = {"antialiased bilinear": max(ratio, 1.0), "antialiased bicubic": 2 * max(ratio, 1.0)}
    reach = reaches.get(resampling, 1.0)
    first = math.floor((start + 0.5) * ratio - 0.5 - reach)
    stop = math.ceil((start + length - 0.5) * ratio + 0.5 + reach)
    return range(max(first, 0), min(stop, num_before))


def _intersect(window: Box, height: int, width: int) -> Box:
    top, left = max(window.top, 0), max(window.left, 0)
    bottom, right = min(window.top + window.height, height), min(window.left + window.width, width)
    return Box(top, left, bottom - top, right - left)


def _inside(outer: Box, inner: Box) -> Box:
    return Box(outer.top + inner.top, outer.left + inner.left, inner.height, inner.width)


def _part_of(pixels: Pixels, box: Box) -> Pixels:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def why_not_by_kernel(content: bytes) -> str | None:
    """Return why the kernel cannot render an image, or None if it can.

    This checks only the file's head and its end. The kernel also skips damaged files, files with very rare heads, such
    as JFIF 2, and some crops of any file: regions above a million pixels, and crops that :func:`_is_for_libraries`
    names. There are few different answers, all short, so that a caller can count them.

    Args:
        content: The image's file.
    """
    if not content.startswith(JPEG_START):
        return "not a JPEG"
    try:
        head = read_head(content)
    except ValueError:
        return "unusual head"
    if (why := why_irregular(head)) is not None:
        return why
    if len(head.factors) > 1 and head.factors not in _KERNEL_FACTORS:
        return "unusual sampling factors"
    if not content.endswith(marker_bytes(EOI)):
        return "no end-of-image marker"
    if len(content) - head.scan_start > MAX_BYTES and not has_tiles(content):
        return f"more than {MAX_BYTES >> 20} MiB and not tiled"
    return None


def render_by_kernel(crops: Sequence[PlannedCrop], rows: Sequence[Rows]) -> NDArray[np.bool_]:
    """Render the crops that the kernel can render, if a kernel is available.

    Args:
        crops: The crops of n images, at least one of each. The kernel renders all crops of one picture together.
        rows: The destinations of each crop.

    Returns:
        bool [n, crops], true for rendered crops.
    """
    pictures = crops[0].pictures
    is_rendered = np.zeros((len(pictures), len(crops)), np.bool_)
    kernel = find_kernel() if len(pictures) else None
    if kernel is None:
        return is_rendered
    is_for_kernel = np.stack(
        [_find_suitable(crop, pictures, given) for crop, given in zip(crops, rows, strict=True)], 1
    )
    if len(crops) == 1:
        is_for_kernel[:, 0] &= ~_is_for_libjpeg(crops[0])
    is_used: list[bool] = np.asarray(is_for_kernel.any(axis=1)).tolist()
    contents = [
        picture.content if used and isinstance(picture, JpegPicture) else b""
        for picture, used in zip(pictures, is_used, strict=True)
    ]
    if not any(is_used):
        return is_rendered
    records = np.stack([as_records(crop.plan) for crop in crops], axis=1)
    records["height"][~is_for_kernel] = 0
    # Sorted by the part of an untiled file that must be read, so that images decoded side by side take equally long.
    bottom = np.max([crop.plan.box[:, 0] + crop.plan.box[:, 2] for crop in crops], axis=0)
    order = np.argsort(bottom / [picture.size[0] for picture in pictures] * [len(content) for content in contents])
    turns = np.array([_encode_turn(picture) for picture in pictures])
    flat = rows[0] if len(rows) == 1 else [pixels for of_image in zip(*rows, strict=True) for pixels in of_image]
    is_done = kernel.decode(contents, records.reshape(-1), order, flat, turns)
    return is_for_kernel & is_done[:, np.newaxis]


def _find_suitable(crop: PlannedCrop, pictures: Sequence[Picture], rows: Rows) -> NDArray[np.bool_]:
    """Return which images of a crop the kernel may render together with the first crop's pictures, bool [n]."""
    is_suitable = ~_is_for_libraries(crop.plan)
    is_suitable &= [
        isinstance(picture, JpegPicture) and picture is first
        for picture, first in zip(crop.pictures, pictures, strict=True)
    ]
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        return is_suitable
    is_suitable &= [pixels.flags.c_contiguous for pixels in rows]
    return is_suitable


def _is_for_libjpeg(crop: PlannedCrop) -> NDArray[np.bool_]:
    """Return which images libjpeg-turbo decodes faster: whole ones that are neither tiled nor resized, bool [n].

    The kernel saves time on pixels outside a crop, and on resizing pixels that are still in the processor's caches.
    """
    sizes = sizes_of(crop.pictures)
    is_whole: NDArray[np.bool_] = (
        (crop.plan.size == sizes) & (crop.plan.box[:, 2:] == sizes) & (crop.plan.output_size == sizes)
    ).all(axis=1)
    for row in np.flatnonzero(is_whole).tolist():
        picture = crop.pictures[row]
        is_whole[row] = isinstance(picture, JpegPicture) and not has_tiles(picture.content)
    return is_whole


def _is_for_libraries(plan: CropPlan) -> NDArray[np.bool_]:
    """Return which images the kernel must leave to the libraries, whatever their files are, bool [n].

    :func:`prepare_render` renders some from a smaller inverse DCT, and refuses others.
    """
    is_huge = plan.size.prod(axis=1) > MAX_RESIZED_PIXELS
    return np.asarray(is_huge | plan.is_halved & is_too_large_to_average(plan.box[:, 2:].prod(axis=1)))


def _encode_turn(picture: Picture) -> int:
    """Return a picture's turn in the kernel's form, IMAGE.turn."""
    if not isinstance(picture, JpegPicture) or picture.turn == UPRIGHT:
        return 0
    is_upside_down, is_mirrored, is_transposed = picture.turn
    return UPSIDE_DOWN * is_upside_down + MIRRORED * is_mirrored + TRANSPOSED * is_transposed


def as_records(plan: CropPlan) -> NDArray[np.void]:
    """Return a plan in the kernel's form, PLAN [n]."""
    records = np.empty(len(plan.box), PLAN)
    records["top"], records["left"], records["height"], records["width"] = plan.box.T
    records["new_height"], records["new_width"] = plan.size.T
    records["window_top"], records["window_left"] = plan.window[:, :2].T
    records["is_flipped"] = plan.flip
    averaged = RESAMPLINGS["antialiased bilinear"]
    records["resampling"] = np.where(plan.is_halved, averaged, RESAMPLINGS[plan.resampling])
    return records
