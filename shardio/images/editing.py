"""Apply operations to pixels, normalise them, and move masks, boxes and points with them.

The kernel's compiled functions do this, or Pillow and numpy without a kernel. Both give the same pixels.
:mod:`shardio.images.kernel.compiled.operation_records` lists the operations.

A mask's values are never mixed: it is resized as by Pillow's NEAREST. Boxes and points are moved by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.crop_plan import PlanRow
from shardio.images.kernel import find_functions
from shardio.images.kernel.compiled.operation_records import (
    BEGIN_MIXTURE,
    END_MIXTURE,
    FILL,
    INTERPOLATION,
    MOVING,
    NEAREST,
    OPERATION,
)
from shardio.images.pictures import Pixels

Operations = NDArray[np.void]
"""OPERATION [n, k]: the operations on n images, in order."""

Floats = NDArray[np.float32]

Places = NDArray[np.float64]
"""float64 [...], in pixels from the image's left or upper edge."""

_NUM_CHANNELS = 3


def make_operations(num_images: int, code: int, *numbers: object) -> Operations:
    """Return one operation for each image, OPERATION [n, 1].

    Args:
        num_images: n.
        code: The operation's code.
        numbers: Its numbers: for each, one for all images, or an array [n].
    """
    operations = np.zeros((num_images, 1), OPERATION)
    operations["code"] = code
    for index, number in enumerate(numbers):
        operations["numbers"][:, 0, index] = number
    return operations


def edit_images(rows: Pixels | Sequence[Pixels], operations: Operations) -> None:
    """Apply operations to images in place.

    Args:
        rows: The images: uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays.
        operations: OPERATION [n, k].
    """
    if not operations["code"].any():
        return
    edited = [np.ascontiguousarray(pixels) for pixels in rows]  # Most rows are contiguous and are not copied.
    functions = find_functions()
    if functions is not None:
        functions.edit_images(edited, np.ascontiguousarray(operations))
    else:
        from shardio.images.editing_by_pillow import edit_by_pillow

        edited = [edit_by_pillow(row, own) for row, own in zip(edited, operations, strict=True)]
    for pixels, row in zip(rows, edited, strict=True):
        if row is not pixels and not np.may_share_memory(row, pixels):
            np.copyto(pixels, row)


def normalize_image(pixels: Pixels, means: Floats, deviations: Floats) -> Floats:
    """Return (pixels / 255 - mean) / deviation, rounded to 32 bits after each step, float32 [3, height, width].

    Args:
        pixels: uint8 [height, width, 3].
        means: float32 [3], of red, green and blue.
        deviations: float32 [3].
    """
    functions = find_functions()
    if functions is not None:
        return functions.normalize_image(np.ascontiguousarray(pixels), means, deviations)
    scaled = pixels.transpose(2, 0, 1).astype(np.float32, order="C")
    scaled *= np.float32(1 / 255)
    return normalize_floats(scaled, means, deviations)


def normalize_floats(image: Floats, means: Floats, deviations: Floats) -> Floats:
    """Return (image - mean) / deviation, float32 [3, height, width], of an image of that form."""
    normalized: Floats = image - means[:, None, None]
    normalized /= deviations[:, None, None]
    return normalized


def move_mask(mask: NDArray[Any], step: PlanRow, fill: int) -> NDArray[Any]:
    """Return an image's mask after one step of rendering.

    Args:
        mask: [height, width, ...], as large as the image.
        step: The step.
        fill: The value where the result shows nothing of the image. It must fit in the mask's dtype.

    Returns:
        [height, width, ...], of the same dtype.
    """
    rows, columns = _sides_of(step)
    box = mask[:, columns.start : columns.start + columns.length]
    moved = columns._replace(start=0).take(rows.take(box, 0, fill), 1, fill)
    operations = _moving_operations(step)
    return _edit_mask(moved, operations, fill) if operations.size else moved


def move_points(points: Places, step: PlanRow) -> Places:
    """Return points after one step of rendering, float64 [n, 2]: x, y. They may leave the image."""
    rows, columns = _sides_of(step)
    moved = np.stack([columns.move_points(points[:, 0]), rows.move_points(points[:, 1])], axis=1)
    for operation in _moving_operations(step):
        moved = _move_by(operation, moved)
    return moved


def move_boxes(boxes: Places, step: PlanRow) -> Places:
    """Return boxes after one step of rendering, float64 [n, 4]: left, top, right, bottom.

    The boxes are clipped to the visible part of the image. A turned box becomes the smallest upright box around
    it.
    """
    rows, columns = _sides_of(step)
    left, right = columns.move_intervals(boxes[:, 0], boxes[:, 2])
    top, bottom = rows.move_intervals(boxes[:, 1], boxes[:, 3])
    for operation in _moving_operations(step):
        corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1)
        places = _move_by(operation, corners.reshape(-1, 2)).reshape(-1, 4, 2)
        horizontal, vertical = (
            _clip(places[..., 0], 0, columns.window_length),
            _clip(places[..., 1], 0, rows.window_length),
        )
        left, right, top, bottom = horizontal.min(1), horizontal.max(1), vertical.min(1), vertical.max(1)
    return np.stack([left, top, right, bottom], axis=1)


def _moving_operations(step: PlanRow) -> Operations:
    """Return the operations of a step that move pixels, OPERATION [k], without those in mixtures."""
    plan, row = step
    if plan.operations is None:
        return np.empty(0, np.void)
    operations: Operations = plan.operations[row]
    moving, is_mixture = list[bool](), False
    for code in operations["code"].tolist():
        is_mixture = code == BEGIN_MIXTURE or (is_mixture and code != END_MIXTURE)
        moving.append(code in MOVING and not is_mixture)
    return operations[moving]


def _move_by(operation: np.void, points: Places) -> Places:
    places = MOVING[int(operation["code"])]
    matrix = np.eye(3)
    matrix.reshape(-1)[: len(places)] = operation["numbers"][list(places)]
    moved = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ np.linalg.inv(matrix).T
    return np.asarray(moved[:, :2] / moved[:, 2:])


def _edit_mask(mask: NDArray[Any], operations: Operations, fill: int) -> NDArray[Any]:
    """Apply operations that move pixels to a mask.

    Operations move whole pixels, so the bytes of a value move as if they were colours, three at a time.
    """
    height, width = mask.shape[:2]
    fill_bytes = np.full(mask.shape[2:], fill, mask.dtype).reshape(-1).view(np.uint8)
    edited = mask.reshape(height, width, -1).view(np.uint8)  # uint8 [height, width, bytes of a pixel]
    for first in range(0, len(fill_bytes), _NUM_CHANNELS):
        part = edited[..., first : first + _NUM_CHANNELS]
        pixels = np.zeros((height, width, _NUM_CHANNELS), np.uint8)
        pixels[..., : part.shape[2]] = part
        own = operations.copy()
        own["numbers"][:, INTERPOLATION] = NEAREST
        own["numbers"][:, FILL][:, : part.shape[2]] = fill_bytes[first : first + _NUM_CHANNELS]
        edit_images([pixels], own[np.newaxis])
        part[...] = pixels[..., : part.shape[2]]
    return mask


class _Side(NamedTuple):
    """The effect of a plan on the rows, or on the columns, of one image.

    Attributes:
        start: The start of the box.
        length: Its length.
        new_length: The length that it is resized to.
        window_start: The start of the window in the resized box.
        window_length: Its length.
        is_mirrored: Whether the window is mirrored.
    """

    start: int
    length: int
    new_length: int
    window_start: int
    window_length: int
    is_mirrored: bool

    def take(self, mask: NDArray[Any], axis: int, fill: int) -> NDArray[Any]:
        first, stop = max(self.window_start, 0), min(self.window_start + self.window_length, self.new_length)
        shown = self.start + self._find_nearest()[first : max(stop, first)]
        num_before = min(first - self.window_start, self.window_length)
        padding = num_before, self.window_length - num_before - len(shown)
        if self.is_mirrored:
            shown, padding = shown[::-1], padding[::-1]
        taken = mask.take(shown, axis=axis)
        if not any(padding):
            return taken
        widths = [(0, 0)] * mask.ndim
        widths[axis] = padding
        return np.pad(taken, widths, constant_values=fill)

    def _find_nearest(self) -> NDArray[np.int64]:
        """Return the row or column of the box for each one of the resized box, int64 [new_length].

        Like Pillow, this adds up the steps in float64 (ImagingScaleAffine in Geometry.c).
        """
        steps = np.full(self.new_length, self.length / self.new_length)
        steps[0] /= 2
        return np.cumsum(steps).astype(np.int64)

    def move(self, places: Places) -> Places:
        """Return the places in the window, before it is mirrored, of places in the image."""
        return (places - self.start) * (self.new_length / self.length) - self.window_start

    def move_points(self, places: Places) -> Places:
        """Return points in the result. As in torchvision, mirroring exchanges the first and last pixel."""
        moved = self.move(places)
        return self.window_length - 1 - moved if self.is_mirrored else moved

    def move_intervals(self, low: Places, high: Places) -> tuple[Places, Places]:
        """Return the bounds of intervals in the result, limited to the part that shows the image."""
        shown_low = min(max(-self.window_start, 0), self.window_length)
        shown_high = max(min(self.new_length - self.window_start, self.window_length), shown_low)
        low, high = (_clip(self.move(each), shown_low, shown_high) for each in (low, high))
        return (self.window_length - high, self.window_length - low) if self.is_mirrored else (low, high)


def _clip(places: Places, low: float, high: float) -> Places:
    """Limit places. For few places, this takes a third of the time of np.clip."""
    return np.minimum(np.maximum(places, low), high)


def _sides_of(step: PlanRow) -> tuple[_Side, _Side]:
    plan, row = step
    top, left, height, width = plan.box[row].tolist()
    new_height, new_width = plan.size[row].tolist()
    window_top, window_left, window_height, window_width = plan.window[row].tolist()
    is_upside_down = plan.upside_down is not None and bool(plan.upside_down[row])
    return (
        _Side(top, height, new_height, window_top, window_height, is_mirrored=is_upside_down),
        _Side(left, width, new_width, window_left, window_width, is_mirrored=bool(plan.flip[row])),
    )
