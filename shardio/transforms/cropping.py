"""Padding and crops of a given size, with torchvision's names, arguments and distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.images import Boxes, CropPlan, DecodeError, Operations, Pixels, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words
from shardio.transforms.compose import Compose, MultiCrop
from shardio.transforms.drawing import draw_units, to_integers
from shardio.transforms.fills import Fill, check_fill
from shardio.transforms.geometry import CenterCrop, pair
from shardio.transforms.transform import Geometry
from shardio.values import check_choice

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Corner = Literal["top left", "top right", "bottom left", "bottom right"]


class _Padding(Geometry):
    """The base class of transforms that may show what is beyond an image's border.

    Args:
        fill: The colour of the pixels beyond the border, if it is constant: one number or three.
        padding_mode: What is beyond the border: "constant"; "edge" repeats the border's pixels; "reflect" mirrors the
            image at their centres; "symmetric" mirrors it at the border.
    """

    def __init__(self, fill: Fill, padding_mode: PaddingMode) -> None:
        self.fill, self.padding_mode = fill, check_choice("padding_mode", padding_mode, PaddingMode)
        self._colour = check_fill("fill", fill)

    @property
    def is_planned(self) -> bool:
        return self.padding_mode == "constant" and type(self).apply is _Padding.apply

    def needs_pixels(self, plan: CropPlan, parameters: Boxes) -> NDArray[np.bool_]:
        return plan.pads(parameters)

    def extend(self, plan: CropPlan, parameters: Boxes) -> CropPlan:
        extended = plan.crop(parameters)
        if not any(self._colour):
            return extended
        return extended.edit(_paint_outside(parameters, plan.output_size, self._colour))

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        if self.padding_mode == "constant":
            return super().apply(image, parameters)
        corner, size = np.array(parameters[:2]), np.array(parameters[2:])
        before = np.maximum(-corner, 0)
        after = np.maximum(corner + size - image.shape[:2], 0)
        padded = np.pad(image, (*zip(before, after, strict=True), (0, 0)), mode=self.padding_mode)
        top, left = corner + before
        return np.ascontiguousarray(padded[top : top + size[0], left : left + size[1]])

    def _show_padding(self) -> str:
        return f"fill={self.fill}, padding_mode={self.padding_mode!r}"


class Pad(_Padding):
    """Add pixels on all sides of the image.

    Args:
        padding: How many pixels: one number; two, for left and right, and for top and bottom; or four, for left, top,
            right and bottom.
        fill: The colour of these pixels, if it is constant: one number or three.
        padding_mode: What they show: "constant"; "edge" repeats the border's pixels; "reflect" mirrors the image at
            their centres; "symmetric" mirrors it at the border.
    """

    def __init__(self, padding: int | Sequence[int], fill: Fill = 0, padding_mode: PaddingMode = "constant") -> None:
        super().__init__(fill, padding_mode)
        self.padding = _check_padding(padding)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return what the results show of the images, int64 [n, 4]: top, left, height, width."""
        left, top, right, bottom = self.padding
        corners = np.broadcast_to(np.array([-top, -left], dtype=np.int64), sizes.shape)
        return np.concatenate([corners, sizes + np.array([top + bottom, left + right])], axis=1)

    def __repr__(self) -> str:
        return f"Pad(padding={self.padding}, {self._show_padding()})"


class RandomCrop(_Padding):
    """Crop a random part of a given size, after padding the image.

    Args:
        size: The crop's size in pixels: one number for a square, or (height, width).
        padding: How many pixels to add on the sides first, as in :class:`Pad`; None for none.
        pad_if_needed: Whether to also pad images that are smaller than the crop, on both sides by what is missing.
            If false, they are an error.
        fill: The colour of the added pixels, if it is constant: one number or three.
        padding_mode: What they show; see :class:`Pad`.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: Fill = 0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        super().__init__(fill, padding_mode)
        self.size, self.pad_if_needed = pair(size), pad_if_needed
        self.padding = _check_padding(0 if padding is None else padding)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width. They may reach beyond the image.

        Raises:
            DecodeError: If an image is smaller than the crop.
        """
        left, top, right, bottom = self.padding
        crop = np.array(self.size, dtype=np.int64)
        before = np.broadcast_to(np.array([top, left], dtype=np.int64), sizes.shape)
        padded: Sizes = sizes + np.array([top + bottom, left + right], dtype=np.int64)
        if self.pad_if_needed:
            missing = np.maximum(crop - padded, 0)
            before, padded = before + missing, np.asarray(padded + 2 * missing)
        else:
            _refuse_smaller(self, padded, self.size, "set pad_if_needed=True, or resize images first")
        corner = to_integers(draw_units(rng_keys, 2), padded - crop + 1) - before
        return np.concatenate([corner, np.broadcast_to(crop, sizes.shape)], axis=1)

    def __repr__(self) -> str:
        shown = f"size={self.size}, padding={self.padding}, pad_if_needed={self.pad_if_needed}"
        return f"RandomCrop({shown}, {self._show_padding()})"


class CornerCrop(Geometry):
    """Crop a corner of the image.

    Args:
        size: The crop's size in pixels: one number for a square, or (height, width).
        corner: "top left", "top right", "bottom left" or "bottom right".
    """

    def __init__(self, size: int | Sequence[int], corner: Corner) -> None:
        self.size, self.corner = pair(size), check_choice("corner", corner, Corner)

    def draw(self, sizes: Sizes, rng_keys: Words) -> Boxes:
        """Return the crops as int64 [n, 4]: top, left, height, width.

        Raises:
            DecodeError: If an image is smaller than the crop.
        """
        _refuse_smaller(self, sizes, self.size, "resize images first")
        is_last = np.array([self.corner.startswith("bottom"), self.corner.endswith("right")])
        crop = np.broadcast_to(np.array(self.size, dtype=np.int64), sizes.shape)
        return np.concatenate([np.where(is_last, sizes - crop, 0), crop], axis=1)

    def needs_pixels(self, plan: CropPlan, parameters: Boxes) -> NDArray[np.bool_]:
        return plan.pads(parameters)

    def extend(self, plan: CropPlan, parameters: Boxes) -> CropPlan:
        return plan.crop(parameters)

    def __repr__(self) -> str:
        return f"CornerCrop(size={self.size}, corner={self.corner!r})"


class FiveCrop(MultiCrop):
    """The four corners of an image and its centre, such as for evaluation by several crops.

    torchvision's is a step of a pipeline. A MultiCrop is a dataset's whole transform, so it takes the other steps.

    Args:
        size: The crops' size in pixels: one number for a square, or (height, width).
        before: The transforms before the crops. They draw other parameters for each crop, if they are random.
        after: The transforms of each crop.

    Example:
        >>> from shardio.transforms import FiveCrop, Resize
        >>> transform = FiveCrop(224, before=[Resize(256, antialias=True)])
    """

    def __init__(
        self,
        size: int | Sequence[int],
        before: Sequence[Callable[[Any], Any]] = (),
        after: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        crops = [*(CornerCrop(size, corner) for corner in get_args(Corner)), CenterCrop(size)]
        super().__init__([Compose([*before, crop, *after]) for crop in crops])


CROPS: frozenset[type] = frozenset({CornerCrop, Pad, RandomCrop})
"""The transforms of this module."""


def _check_padding(padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    """Return padding as left, top, right, bottom."""
    given = [padding] if isinstance(padding, int) else list(padding)
    sides = {1: given * 4, 2: given * 2, 4: given}.get(len(given))
    if sides is None or min(sides) < 0:
        raise ValueError(f"padding must be one, two or four integers that are not negative, got {padding!r}")
    left, top, right, bottom = sides
    return left, top, right, bottom


def _refuse_smaller(step: Geometry, sizes: Sizes, crop: tuple[int, int], remedy: str) -> None:
    """Raise DecodeError if an image is smaller than a crop."""
    is_smaller = (sizes < np.array(crop)).any(axis=1)
    if is_smaller.any():
        row = int(np.argmax(is_smaller))
        height, width = sizes[row].tolist()
        message = f"{step!r} needs at least {crop[1]}×{crop[0]} pixels, and the image has {width}×{height}: {remedy}"
        raise DecodeError(row, message)


def _paint_outside(boxes: Boxes, sizes: Sizes, colour: tuple[int, int, int]) -> Operations:
    """Return operations that paint the pixels of n boxes that are beyond images of these sizes, OPERATION [n, 4]."""
    height, width = boxes[:, 2], boxes[:, 3]
    top, left = np.clip(-boxes[:, 0], 0, height), np.clip(-boxes[:, 1], 0, width)
    bottom = np.clip(sizes[:, 0] - boxes[:, 0], 0, height)
    right = np.clip(sizes[:, 1] - boxes[:, 1], 0, width)
    parts = [
        (0, 0, top, width),
        (bottom, 0, height - bottom, width),
        (0, 0, height, left),
        (0, right, height, width - right),
    ]
    return np.concatenate([make_operations(len(boxes), codes.ERASE, *part, *colour) for part in parts], axis=1)
