"""Transform a sample's annotations along with its image: other images, masks, boxes, points, and labels of boxes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.images import (
    CropPlan,
    DecodedPicture,
    DecodeError,
    Operations,
    Picture,
    PlanRow,
    RenderedImages,
    edit_images,
    render_chunk,
)
from shardio.kernel import operations as codes
from shardio.values import count

__all__ = ["AnnotationError", "BoundingBoxes", "FieldKind", "KeyPoints", "Labels", "Mask", "Ragged", "move_annotations"]
__all__ += ["render_like"]

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
"""The numbers that define a box: two corners; one corner and the size; or the center and the size."""

History = Sequence[PlanRow]
"""The steps that render an image."""

Places = NDArray[np.float64]
"""float64 [...], in pixels from the image's left or upper edge."""

_NUM_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A mask: an array [height, width] or [height, width, channels], as large as the image.

    A mask's values are never mixed, because masks are resized by taking the nearest pixel, as with Pillow's NEAREST.

    Attributes:
        fill: The value of pixels outside the image, such as 255 for pixels that the loss ignores.
    """

    fill: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundingBoxes:
    """Boxes [k, 4] in pixels of the image. The boxes are clipped to the remaining part of the image.

    Attributes:
        format: The meaning of the four numbers of a box: "xyxy" for left, top, right, bottom; "xywh" for left, top,
            width, height; "cxcywh" for the center and the size.
        min_size: Boxes with a side shorter than this after clipping are dropped; 0 keeps all boxes.
        min_area: Boxes with an area smaller than this after clipping are dropped; 0 keeps all boxes.
    """

    format: BoxFormat = "xyxy"
    min_size: float = 0
    min_area: float = 0

    def __post_init__(self) -> None:
        if self.format not in get_args(BoxFormat):
            raise ValueError(f"format must be one of {', '.join(get_args(BoxFormat))}, got {self.format!r}")
        if not (self.min_size >= 0 and self.min_area >= 0):
            raise ValueError(f"min_size and min_area must not be negative, got {self.min_size} and {self.min_area}")

    @property
    def drops(self) -> bool:
        """Whether some boxes may be dropped."""
        return self.min_size > 0 or self.min_area > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPoints:
    """Points [..., 2 or more]: x and y in pixels of the image, and numbers that do not change, such as visibility.

    Points may move outside the image. Left and right points are not swapped when the image is mirrored.

    Attributes:
        boxes: The boxes to which the points [k, ...] belong. The points of dropped boxes are dropped. None keeps all
            points.
    """

    boxes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels [k, ...] of k boxes: numbers such as classes or areas. The labels of dropped boxes are dropped.

    Attributes:
        boxes: The boxes to which the labels belong; by default, the only boxes.
    """

    boxes: str | None = None


FieldKind = Literal["image"] | Mask | BoundingBoxes | KeyPoints | Labels
"""The kind of a field's values."""


class Ragged(np.ndarray[Any, Any]):
    """An array whose length may differ between samples. A batch always holds a list of such arrays."""


class AnnotationError(ValueError):
    """The error for a value that cannot be transformed. The message continues a sentence that starts with ``name``."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


_KINDS: dict[str, FieldKind] = {
    "image": "image",
    "mask": Mask(),
    "boxes": BoundingBoxes(),
    "keypoints": KeyPoints(),
    "labels": Labels(),
}
"""The kinds with default settings, by name."""


def check_field_kinds(fields: object) -> dict[str, FieldKind]:
    """Return the kinds of the fields of a Compose, with the boxes to which labels belong.

    Raises:
        TypeError: If ``fields`` is not a mapping from names to kinds.
        ValueError: If a kind is unknown, if there is no image, or if a kind names boxes that are not in ``fields``.
    """
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise TypeError(f"fields must map fields to kinds, such as {{'image': 'image', 'png': 'mask'}}, got {fields!r}")
    kinds = {name: _check_kind(name, kind) for name, kind in fields.items()}
    if "image" not in kinds.values():
        raise ValueError(f"fields must name an image, because its size determines the crops: got {fields!r}")
    boxes = [name for name, kind in kinds.items() if isinstance(kind, BoundingBoxes)]
    for name, kind in kinds.items():
        if not isinstance(kind, Labels | KeyPoints):
            continue
        if kind.boxes is not None and kind.boxes not in boxes:
            raise ValueError(f"{name!r} belongs to the boxes {kind.boxes!r}, but fields has the boxes {boxes}")
        if isinstance(kind, Labels) and kind.boxes is None and boxes:
            if len(boxes) > 1:
                raise ValueError(f"{name!r} may belong to any of {boxes}: name the boxes, as in Labels(boxes=...)")
            kinds[name] = replace(kind, boxes=boxes[0])
    return kinds


def _check_kind(name: str, kind: object) -> FieldKind:
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    if isinstance(kind, Mask | BoundingBoxes | KeyPoints | Labels):
        return kind
    raise ValueError(
        f"the field {name!r} must be one of {', '.join(map(repr, _KINDS))}, or an object such as Mask(fill=255), "
        f"got {kind!r}"
    )


def move_annotations(
    kinds: Mapping[str, FieldKind], values: Mapping[str, Any], size: tuple[int, int], history: History
) -> dict[str, Any]:
    """Transform the annotations of one image.

    Args:
        kinds: The kind of each value, from :func:`check_field_kinds`.
        values: The values, other than images, by name. None stays None.
        size: The image's height and width.
        history: The steps that render the image.

    Returns:
        The transformed values: masks with their own dtype; boxes and points as Ragged float32, or float64 if the given
        value was a float64 array; labels as Ragged with their own dtype.

    Raises:
        AnnotationError: If a value is not valid for its kind.
    """
    moved = dict(values)
    kept = dict[str, NDArray[np.bool_]]()
    for name in sorted(values, key=lambda name: not isinstance(kinds[name], BoundingBoxes)):  # Boxes first.
        if values[name] is None:
            continue
        try:
            match kind := kinds[name]:
                case Mask():
                    moved[name] = _move_mask(kind, values[name], size, history)
                case BoundingBoxes():
                    moved[name], kept[name] = _move_boxes(kind, values[name], history)
                case KeyPoints():
                    moved[name] = _keep(_move_points(values[name], history), kind.boxes, kept)
                case Labels():
                    moved[name] = _keep(_as_numbers(values[name], "numbers [k, ...]"), kind.boxes, kept)
        except ValueError as error:
            raise AnnotationError(name, str(error)) from error
    return moved


def _move_mask(kind: Mask, value: Any, size: tuple[int, int], history: History) -> NDArray[Any]:
    mask = np.asarray(value)
    if mask.ndim not in (2, 3) or mask.dtype.kind not in "biuf":
        raise ValueError(f"must be a mask [height, width], got {mask.dtype} {list(mask.shape)}")
    if mask.shape[:2] != size:
        raise ValueError(
            f"is a mask of {mask.shape[1]}×{mask.shape[0]} pixels, but the image has {size[1]}×{size[0]}: masks must "
            "be as large as their image"
        )
    if np.asarray(kind.fill).astype(mask.dtype) != kind.fill:
        raise ValueError(f"is a mask of {mask.dtype}, which cannot hold fill={kind.fill}: choose another fill")
    for step in history:
        mask = move_mask(mask, step, kind.fill)
    return mask


def _move_boxes(kind: BoundingBoxes, value: Any, history: History) -> tuple[Ragged, NDArray[np.bool_]]:
    """Return the kept boxes, and which of the given boxes are kept, bool [k]."""
    given = _as_numbers(value, "boxes [k, 4]", 4)
    if given.ndim != 2 or given.shape[1] != 4:
        raise ValueError(f"must be boxes [k, 4], got {given.dtype} {list(given.shape)}")
    boxes = _TO_CORNERS[kind.format](given.astype(np.float64))
    for step in history:
        boxes = move_boxes(boxes, step)
    sides = boxes[:, 2:] - boxes[:, :2]
    is_kept = np.ones(len(boxes), np.bool_)
    if kind.drops:
        is_kept = (sides >= kind.min_size).all(axis=1) & (sides.prod(axis=1) >= kind.min_area)
    return _FROM_CORNERS[kind.format](boxes)[is_kept].astype(_float_of(value)).view(Ragged), is_kept


def _move_points(value: Any, history: History) -> Ragged:
    given = _as_numbers(value, "points [..., 2]", 2)
    if given.ndim < 2 or given.shape[-1] < 2:
        raise ValueError(f"must be points [..., 2 or more], got {given.dtype} {list(given.shape)}")
    moved = given.astype(np.float64)
    points = moved[..., :2].reshape(-1, 2)
    for step in history:
        points = move_points(points, step)
    moved[..., :2] = points.reshape(*given.shape[:-1], 2)
    return moved.astype(_float_of(value)).view(Ragged)


def _keep(values: NDArray[Any], boxes: str | None, kept: Mapping[str, NDArray[np.bool_]]) -> Ragged:
    if values.ndim == 0:
        raise ValueError(f"must have one row for each object, got a single {values.dtype}")
    is_kept = None if boxes is None else kept.get(boxes)
    if is_kept is None:
        return values.view(Ragged)
    if len(values) != len(is_kept):
        raise ValueError(
            f"must have {count(len(is_kept), 'row')}, one for each of the boxes {boxes!r}, got {list(values.shape)}"
        )
    return values[is_kept].view(Ragged)


def _as_numbers(value: Any, what: str, *widths: int) -> NDArray[Any]:
    """Return a value as an array of numbers. An empty list becomes int64 [0, *widths]."""
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError) as error:  # A value may have rows of different lengths.
        raise ValueError(f"must be {what}, got {type(value).__name__}: {error}") from error
    if numbers.shape == (0,):
        numbers = numbers.reshape(0, *widths)
        # An empty list becomes int64, as a list of integers does.
        return numbers if isinstance(value, np.ndarray) else numbers.astype(np.int64)
    if numbers.dtype.kind not in "biuf":
        raise ValueError(f"must be {what}, got {type(value).__name__} of {numbers.dtype}")
    return numbers.astype(numbers.dtype.newbyteorder("="), copy=False)


def _float_of(value: Any) -> type[np.floating[Any]]:
    return np.float64 if getattr(value, "dtype", None) == np.float64 else np.float32


def _from_size(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


def _from_center(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)


def _to_size(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _to_center(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)


_Conversion = Callable[[NDArray[np.float64]], NDArray[np.float64]]
_TO_CORNERS: dict[BoxFormat, _Conversion] = {"xyxy": np.copy, "xywh": _from_size, "cxcywh": _from_center}
_FROM_CORNERS: dict[BoxFormat, _Conversion] = {"xyxy": np.copy, "xywh": _to_size, "cxcywh": _to_center}


def render_like(images: list[Any], others: Sequence[Picture]) -> list[Any]:
    """Render images in the same way as other pictures were rendered, and return the results as pictures.

    Images with the same plan object are rendered together.
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
                pictures = render_rows_as_pictures([images[row] for row in rows], plan, np.arange(len(rows)))
            except DecodeError as error:
                raise DecodeError(rows[error.row], str(error)) from error
            for row, picture in zip(rows, pictures, strict=True):
                images[row] = picture
    return images


def render_rows_as_pictures(images: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> list[Any]:
    rendered = render_rows(images, plan, rows)
    return [
        DecodedPicture(pixels, decoder_name, (*images[row].history, PlanRow(plan, row)))
        for row, pixels, decoder_name in zip(rows.tolist(), rendered.images, rendered.decoder_names, strict=True)
    ]


def render_rows(pictures: list[Any], plan: CropPlan, rows: NDArray[np.int64]) -> RenderedImages:
    """Render the given rows of a chunk. Errors refer to rows of the chunk."""
    try:
        return render_chunk([pictures[row] for row in rows], plan.take(rows))
    except DecodeError as error:
        raise DecodeError(int(rows[error.row]), str(error)) from error


def move_mask(mask: NDArray[Any], step: PlanRow, fill: int) -> NDArray[Any]:
    """Return an image's mask after one step of rendering.

    Args:
        mask: [height, width, ...], as large as the image.
        step: The step.
        fill: The value of pixels outside the image. This value must fit in the mask's dtype.

    Returns:
        [height, width, ...], with the same dtype.
    """
    rows, columns = _sides_of(step)
    box = mask[:, columns.start : columns.start + columns.length]
    moved = columns._replace(start=0).take(rows.take(box, 0, fill), 1, fill)
    operations = _moving_operations(step)
    return _edit_mask(moved, operations, fill) if operations.size else moved


def move_points(points: Places, step: PlanRow) -> Places:
    """Return points after one step of rendering, float64 [n, 2]: x, y. Points may be outside the image."""
    rows, columns = _sides_of(step)
    moved = np.stack([columns.move_points(points[:, 0]), rows.move_points(points[:, 1])], axis=1)
    for operation in _moving_operations(step):
        moved = _move_by(operation, moved)
    return moved


def move_boxes(boxes: Places, step: PlanRow) -> Places:
    """Return boxes after one step of rendering, float64 [n, 4]: left, top, right, bottom.

    The boxes are clipped to the visible part of the image. A rotated box becomes the smallest upright box around it.
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
    """Return the operations of a step that move pixels, OPERATION [k], except those within mixtures."""
    plan, row = step
    if plan.operations is None:
        return np.empty(0, np.void)
    operations: Operations = plan.operations[row]
    moving, is_mixture = list[bool](), False
    for code in operations["code"].tolist():
        is_mixture = code == codes.BEGIN_MIXTURE or (is_mixture and code != codes.END_MIXTURE)
        moving.append(code in codes.MOVING and not is_mixture)
    return operations[moving]


def _move_by(operation: np.void, points: Places) -> Places:
    places = codes.MOVING[int(operation["code"])]
    matrix = np.eye(3)
    matrix.reshape(-1)[: len(places)] = operation["numbers"][list(places)]
    moved = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ np.linalg.inv(matrix).T
    return np.asarray(moved[:, :2] / moved[:, 2:])


def _edit_mask(mask: NDArray[Any], operations: Operations, fill: int) -> NDArray[Any]:
    """Apply operations that move pixels to a mask.

    Operations move whole pixels, so a value's bytes can be moved as if they were colors, three at a time.
    """
    height, width = mask.shape[:2]
    fill_bytes = np.full(mask.shape[2:], fill, mask.dtype).reshape(-1).view(np.uint8)
    edited = mask.reshape(height, width, -1).view(np.uint8)  # uint8 [height, width, bytes per pixel]
    for first in range(0, len(fill_bytes), _NUM_CHANNELS):
        part = edited[..., first : first + _NUM_CHANNELS]
        pixels = np.zeros((height, width, _NUM_CHANNELS), np.uint8)
        pixels[..., : part.shape[2]] = part
        own = operations.copy()
        own["numbers"][:, codes.INTERPOLATION] = codes.NEAREST
        own["numbers"][:, codes.FILL][:, : part.shape[2]] = fill_bytes[first : first + _NUM_CHANNELS]
        edit_images([pixels], own[np.newaxis])
        part[...] = pixels[..., : part.shape[2]]
    return mask


class _Side(NamedTuple):
    """The effect of a plan on the rows, or on the columns, of one image.

    Attributes:
        start: The start of the box.
        length: The length of the box.
        new_length: The length that the box is resized to.
        window_start: The start of the window in the resized box.
        window_length: The length of the window.
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
        """Return the row or column of the box for each row or column of the resized box, int64 [new_length].

        Like Pillow, this method adds up the steps in float64 (ImagingScaleAffine in Geometry.c).
        """
        steps = np.full(self.new_length, self.length / self.new_length)
        steps[0] /= 2
        return np.cumsum(steps).astype(np.int64)

    def move(self, places: Places) -> Places:
        """Convert places in the image to places in the window, before mirroring."""
        return (places - self.start) * (self.new_length / self.length) - self.window_start

    def move_points(self, places: Places) -> Places:
        """Convert points in the image to points in the result. Mirroring swaps the first and last pixels."""
        moved = self.move(places)
        return self.window_length - 1 - moved if self.is_mirrored else moved

    def move_intervals(self, low: Places, high: Places) -> tuple[Places, Places]:
        """Convert intervals in the image to intervals in the result, clipped to the part that shows the image."""
        shown_low = min(max(-self.window_start, 0), self.window_length)
        shown_high = max(min(self.new_length - self.window_start, self.window_length), shown_low)
        low, high = (_clip(self.move(each), shown_low, shown_high) for each in (low, high))
        return (self.window_length - high, self.window_length - low) if self.is_mirrored else (low, high)


def _clip(places: Places, low: float, high: float) -> Places:
    """Clip coordinates to a range. For a few numbers, this function takes a third of the time that np.clip takes."""
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
