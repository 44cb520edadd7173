"""Plan the rendering of images before any image is decoded, and render images with OpenCV, Pillow and numpy.

Bilinear resizing gives the same pixels as OpenCV's INTER_LINEAR on x86 (resize.cpp). On other processors, some versions
of OpenCV round differently, so OpenCV is used only if it gives the same pixels in the current process. The kernel has
its own code for the same definition. Weights have 11 bits. Rows are first resized horizontally, keeping 7 more bits
than a pixel has. Then pairs of rows are blended. Antialiased resizing gives the same pixels as Pillow.

OpenCV and Pillow are imported when an image first needs them: without them, a worker process starts 50 ms sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg import Box
from shardio.images.pictures import DEFAULT_MAX_PIXELS, Picture, Pixels
from shardio.kernel.functions import scratch_pixels

if TYPE_CHECKING:
    import PIL.Image


MAX_RESIZED_PIXELS = DEFAULT_MAX_PIXELS
"""The maximum number of pixels after resizing. Enlarging the shorter side of a long, thin image can make it huge."""

Render = Callable[[Pixels], object]
"""A function that writes pixels to uint8 [height, width, 3], or raises ValueError if the image is damaged."""

_WEIGHT_SUM = np.float32(1 << 11)
"""The sum of two weights (resize.cpp, INTER_RESIZE_COEF_SCALE)."""

_CHECKED_SIZES = (
    ((37, 53), (20, 31)),
    ((61, 40), (33, 38)),
    ((50, 83), (45, 41)),
    ((48, 64), (15, 40)),
    ((23, 17), (61, 70)),
)
"""The sizes, before and after resizing, of the images that are used to check OpenCV. On ARM, OpenCV's pixels differ
from those on x86 if both sides shrink."""

Resampling = Literal["bilinear", "plain bilinear", "antialiased bilinear", "antialiased bicubic", "antialiased box"]
"""The resampling method. "plain bilinear" computes each new pixel from the nearest four pixels. "bilinear" does the
same, except that it averages over all pixels if both sides shrink to half or less (see CropPlan.is_halved). The other
methods (Pillow's BILINEAR, BICUBIC and BOX) average over all pixels when shrinking."""

Sizes = NDArray[np.int64]
"""int64 [n, 2]: the height and width of n images."""

Boxes = NDArray[np.int64]
"""int64 [n, 4]: the top, left, height and width of one part of each of n images."""

Rows = Pixels | Sequence[Pixels]
"""The destinations of n images: uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CropPlan:
    """Instructions for rendering n images: read a box of each, resize it, take a window, and flip and edit the window.

    Transforms extend the plan in order. No image is decoded between transforms that can extend the plan.

    Attributes:
        box: The part of each image to read, which does not reach beyond the image.
        size: The size that the box is resized to.
        window: The part of the resized box to return. Pixels outside the box are black.
        flip: bool [n], whether to mirror the window left to right.
        resampling: The method for resizing the box.
        upside_down: bool [n], whether to mirror the window top to bottom; None to mirror none of the windows.
        operations: OPERATION [n, k], the operations on the flipped window, in order; None if there are none.
    """

    box: Boxes
    size: Sizes
    window: Boxes
    flip: NDArray[np.bool_]
    resampling: Resampling = "bilinear"
    upside_down: NDArray[np.bool_] | None = None
    operations: NDArray[np.void] | None = None

    @classmethod
    def whole(cls, sizes: Sizes) -> CropPlan:
        """Return a plan that leaves images of these sizes as they are."""
        box = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        return cls(box=box, size=sizes, window=box, flip=np.zeros(len(sizes), dtype=np.bool_))

    @property
    def output_size(self) -> Sizes:
        """The size of each result."""
        return self.window[:, 2:]

    def fits(self, rows: Pixels) -> bool:
        """Return whether all results have the size of the rows, uint8 [n, height, width, 3]."""
        return bool((self.output_size == rows.shape[1:3]).all())

    def pads(self, boxes: Boxes) -> NDArray[np.bool_]:
        """Return which images are already cropped and would be padded by a crop to ``boxes``, bool [n].

        Such images must be rendered before the crop. Otherwise, the padding would show pixels that the first crop
        removed, instead of black.
        """
        is_part = _any_in_row((self.window[:, :2] != 0) | (self.window[:, 2:] != self.size))
        return is_part & _reach_beyond(boxes, self.output_size)

    def crop(self, boxes: Boxes) -> CropPlan:
        """Return a plan that also crops this plan's results."""
        mirrored_left = self.window[:, 3] - boxes[:, 1] - boxes[:, 3]
        left, top = np.where(self.flip, mirrored_left, boxes[:, 1]), boxes[:, 0]
        if self.upside_down is not None:
            top = np.where(self.upside_down, self.window[:, 2] - boxes[:, 0] - boxes[:, 2], top)
        corner = self.window[:, :2] + np.stack([top, left], axis=1)
        return replace(self, window=np.concatenate([corner, boxes[:, 2:]], axis=1))

    @property
    def is_final(self) -> NDArray[np.bool_]:
        """Whether each image is resized or padded, bool [n].

        An image that is resized or padded must be rendered before it is resized again.
        """
        return _any_in_row(self.size != self.box[:, 2:]) | _reach_beyond(self.window, self.size)

    @property
    def is_halved(self) -> NDArray[np.bool_]:
        """Whether each box shrinks to half its size or less without antialiasing, bool [n].

        For a box that shrinks this much, the nearest four pixels are too few, so "bilinear" averages over all pixels.
        """
        if self.resampling != "bilinear":
            return np.zeros(len(self.box), np.bool_)
        return np.asarray((self.box[:, 2:] >= 2 * self.size).all(axis=1))

    def resize(self, sizes: Sizes, resampling: Resampling = "bilinear") -> CropPlan:
        """Return a plan that also resizes this plan's results. :attr:`is_final` must be false for all images."""
        assert not self.is_final.any(), "a box that is resized or padded is rendered before it is resized again"
        box = np.concatenate([self.box[:, :2] + self.window[:, :2], self.window[:, 2:]], axis=1)
        whole = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        return replace(self, box=box, size=sizes, window=whole, resampling=resampling)

    def mirror(self, flips: NDArray[np.bool_]) -> CropPlan:
        """Return a plan that also flips some results horizontally: those for which ``flips`` is true."""
        return replace(self, flip=self.flip ^ flips)

    def mirror_vertically(self, flips: NDArray[np.bool_]) -> CropPlan:
        """Return a plan that also flips some results vertically: those for which ``flips`` is true."""
        return replace(self, upside_down=flips if self.upside_down is None else self.upside_down ^ flips)

    def edit(self, operations: NDArray[np.void]) -> CropPlan:
        """Return a plan that also applies operations, OPERATION [n, k], to the results."""
        before = [] if self.operations is None else [self.operations]
        return replace(self, operations=np.concatenate([*before, operations], axis=1))

    def take(self, rows: NDArray[np.int64]) -> CropPlan:
        """Return the plan for the images in ``rows``."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        taken: dict[str, Any] = {name: each[rows] for name, each in given.items() if isinstance(each, np.ndarray)}
        return replace(self, **taken)

    def restart(self, rows: NDArray[np.int64]) -> CropPlan:
        """Return a plan that leaves the images in ``rows`` as they are, because they have already been rendered."""
        assert self.operations is None, "edited images are always rendered together"
        whole = CropPlan.whole(self.output_size[rows])
        arrays: dict[str, Any] = {}
        for name in ("box", "size", "window", "flip", "upside_down"):
            if (given := getattr(self, name)) is not None:
                arrays[name] = given.copy()
                arrays[name][rows] = False if name == "upside_down" else getattr(whole, name)
        return replace(self, **arrays)


class PlanRow(NamedTuple):
    """Instructions for rendering one image: a plan and the image's row in it."""

    plan: CropPlan
    row: int


class PlannedCrop(NamedTuple):
    """One crop of each of n images.

    Attributes:
        pictures: The images.
        plan: The plan that renders the images.
    """

    pictures: Sequence[Picture]
    plan: CropPlan


def _reach_beyond(boxes: Boxes, sizes: Sizes) -> NDArray[np.bool_]:
    return _any_in_row((boxes[:, :2] < 0) | (boxes[:, :2] + boxes[:, 2:] > sizes))


def _any_in_row(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:  # bool [n, m] → [n]
    return np.asarray(mask.any(axis=1))


def prepare_render(picture: Picture, box: Box, height: int, width: int, window: Box, resampling: Resampling) -> Render:
    """Return a function that renders a window of a resized box, with black pixels beyond the box.

    Args:
        picture: The picture.
        box: The part of the picture to resize.
        height: The height that the box is resized to.
        width: The width that the box is resized to.
        window: The part of the resized box to render.
        resampling: The method for resizing the box.

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

    The whole box is resized, because :func:`resize` would sample a part of it at different points. Only the pixels for
    the visible part are decoded.
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


def _needed_pixels(start: int, length: int, num_before: int, num_after: int, resampling: Resampling) -> range:
    ratio = num_before / num_after
    scale = max(ratio, 1.0)
    reaches = {"antialiased bilinear": scale, "antialiased bicubic": 2 * scale, "antialiased box": scale / 2}
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


def use_one_thread() -> None:
    """Limit OpenCV to one thread in this process, because decode threads already keep all processors busy."""
    import cv2

    cv2.setNumThreads(0)


def resize(
    image: Pixels, height: int, width: int, resampling: Resampling = "bilinear", *, out: Pixels | None = None
) -> Pixels:
    """Resize an image.

    Args:
        image: uint8 [rows, columns, 3].
        height: The new number of rows.
        width: The new number of columns.
        resampling: The method.
        out: uint8 [height, width, 3] to write to, or None to return a new array.

    Returns:
        uint8 [height, width, 3]: ``out``, if it is given.
    """
    if image.shape[:2] == (height, width):
        resized = image
    elif resampling not in ("bilinear", "plain bilinear"):
        resized = np.asarray(_resize_by_pillow(image, height, width, resampling))
    elif not is_opencv_equal():
        resized = resize_bilinear(image, height, width)
    else:
        import cv2

        resized = cv2.resize(image, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)  # type: ignore[assignment]
    if out is None:
        return resized
    if resized is not out:
        np.copyto(out, resized)
    return out


def _resize_by_pillow(image: Pixels, height: int, width: int, resampling: Resampling) -> PIL.Image.Image:
    """Resize an image horizontally, round the values, and resize it vertically.

    Versions of Pillow before 13 always use this order. Pillow 13 chooses the order according to the sizes.
    """
    import PIL.Image

    filters = {
        "antialiased bilinear": PIL.Image.Resampling.BILINEAR,
        "antialiased bicubic": PIL.Image.Resampling.BICUBIC,
        "antialiased box": PIL.Image.Resampling.BOX,
    }
    across = PIL.Image.fromarray(image).resize((width, len(image)), filters[resampling])
    return across.resize((width, height), filters[resampling])


def flip(image: Pixels, out: Pixels) -> None:
    """Write an image, mirrored left to right, to ``out``; both are uint8 [height, width, 3]."""
    import cv2

    if cv2.flip(image, 1, dst=out) is not out:
        np.copyto(out, image[:, ::-1])


class Points(NamedTuple):
    """The n points along one side at which an image is sampled.

    Attributes:
        first: int64 [n], the first of the two pixels that each point lies between, possibly outside the image.
        weights: int32 [2, n], the weights of the two pixels.
    """

    first: NDArray[np.int64]
    weights: NDArray[np.int32]

    @classmethod
    def place(cls, positions: NDArray[np.floating[Any]], length: int | None = None) -> Points:
        """Return the points at these positions.

        Args:
            positions: float [n], in pixels from the center of the first pixel.
            length: The length of the side in pixels. If given, a point beyond the border gets its value from the
                border pixel only. If None, the point's weight is divided between two copies of that pixel, so
                the result is rounded differently.
        """
        exact = positions.astype(np.float32)
        first = np.floor(exact)
        part = exact - first
        if length is not None:
            part[(first < 0) | (first >= length - 1)] = 0
            first = first.clip(0, length - 1)
        weights = np.stack([np.float32(1) - part, part]) * _WEIGHT_SUM
        return cls(first.astype(np.int64), np.rint(weights).astype(np.int32))


def resize_bilinear(image: Pixels, height: int, width: int) -> Pixels:
    """Resize an image, uint8 [rows, columns, 3], to uint8 [height, width, 3]."""
    num_rows, num_columns = image.shape[:2]
    rows = Points.place(_positions(num_rows, height))
    columns = Points.place(_positions(num_columns, width), num_columns)
    left, right = (image.take(np.clip(columns.first + i, 0, num_columns - 1), axis=1) for i in range(2))
    near, far = np.repeat(columns.weights, 3, axis=1)  # All colors of a row are computed together.
    across = left.reshape(num_rows, -1) * near + right.reshape(num_rows, -1) * far >> 4
    upper, lower = (across.take(np.clip(rows.first + i, 0, num_rows - 1), axis=0) for i in range(2))
    near, far = rows.weights[:, :, np.newaxis]
    mixed = (upper * near >> 16) + (lower * far >> 16) + 2 >> 2
    pixels: Pixels = mixed.astype(np.uint8).reshape(height, width, 3)
    return pixels


@cache
def is_opencv_equal() -> bool:
    """Return whether OpenCV's pixels in this process match the definition in this module."""
    import cv2  # OpenCV is imported only when an image needs it.

    random = np.random.default_rng(0)
    for before, (height, width) in _CHECKED_SIZES:
        image = random.integers(0, 256, (*before, 3), np.uint8)
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        if not np.array_equal(resized, resize_bilinear(image, height, width)):
            return False
    return True


def _positions(num_before: int, num_after: int) -> NDArray[np.floating[Any]]:
    return (np.arange(num_after) + 0.5) * (1.0 / (num_after / num_before)) - 0.5
