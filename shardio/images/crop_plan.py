"""Crop plans: how to render images, determined before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.pictures import Picture
from shardio.images.pixels import Pixels
from shardio.images.resizing import Resampling

Sizes = NDArray[np.int64]
"""int64 [n, 2]: the height and width of n images."""

Boxes = NDArray[np.int64]
"""int64 [n, 4]: top, left, height, width of a part of each of n images."""


Rows = Pixels | Sequence[Pixels]
"""The destinations of n images: uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CropPlan:
    """How to render n images: take a box of each, resize it, take a window of the result, flip and edit the window.

    Transforms extend the plan in order. As long as they can, nothing is decoded between them.

    Attributes:
        box: The part of each image to read. It does not reach beyond the image.
        size: The size that the box is resized to.
        window: The part of the resized box to return. Pixels outside the box are black.
        flip: bool [n], whether to mirror the window left to right.
        resampling: How the box is resized.
        upside_down: bool [n], whether to mirror the window top to bottom; None if none is.
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
        """Return whether every result has the size of the rows, uint8 [n, height, width, 3]."""
        return bool((self.output_size == rows.shape[1:3]).all())

    def pads(self, boxes: Boxes) -> NDArray[np.bool_]:
        """Return whether cropping by ``boxes`` would pad a part of an image, bool [n].

        Such images must be rendered first. Otherwise their surrounding pixels would appear instead of black ones.
        """
        is_part = _any((self.window[:, :2] != 0) | (self.window[:, 2:] != self.size))
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
        """Whether each image is resized or padded, bool [n]. If so, it must be rendered before it is resized again."""
        return _any(self.size != self.box[:, 2:]) | _reach_beyond(self.window, self.size)

    @property
    def is_halved(self) -> NDArray[np.bool_]:
        """Whether each box shrinks to half its size or less without antialiasing, bool [n].

        The nearest four pixels would be too few. So "bilinear" averages over all pixels of such a box, or of a smaller
        inverse DCT of it: see :func:`shardio.images.rendering.prepare_render`.
        """
        if self.resampling != "bilinear":
            return np.zeros(len(self.box), np.bool_)
        return np.asarray((self.box[:, 2:] >= 2 * self.size).all(axis=1))

    def resize(self, sizes: Sizes, resampling: Resampling = "bilinear") -> CropPlan:
        """Return a plan that also resizes this plan's results. None of them may be final."""
        assert not self.is_final.any(), "a box that is resized or padded is rendered before it is resized again"
        box = np.concatenate([self.box[:, :2] + self.window[:, :2], self.window[:, 2:]], axis=1)
        whole = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        return replace(self, box=box, size=sizes, window=whole, resampling=resampling)

    def mirror(self, flips: NDArray[np.bool_]) -> CropPlan:
        """Return a plan that also mirrors the results for which ``flips`` is true."""
        return replace(self, flip=self.flip ^ flips)

    def mirror_vertically(self, flips: NDArray[np.bool_]) -> CropPlan:
        """Return a plan that also turns the results for which ``flips`` is true upside down."""
        return replace(self, upside_down=flips if self.upside_down is None else self.upside_down ^ flips)

    def edit(self, operations: NDArray[np.void]) -> CropPlan:
        """Return a plan that also applies operations, OPERATION [n, k], to the results."""
        before = [] if self.operations is None else [self.operations]
        return replace(self, operations=np.concatenate([*before, operations], axis=1))

    def take(self, rows: NDArray[np.int64]) -> CropPlan:
        """Return the plan of some of the images."""
        upside_down = None if self.upside_down is None else self.upside_down[rows]
        operations = None if self.operations is None else self.operations[rows]
        box, size, window, flip = self.box[rows], self.size[rows], self.window[rows], self.flip[rows]
        taken = replace(self, box=box, size=size, window=window, flip=flip)
        return replace(taken, upside_down=upside_down, operations=operations)

    def restart(self, rows: NDArray[np.int64]) -> CropPlan:
        """Return a plan that leaves some of the images as they are, because they have been rendered."""
        assert self.operations is None, "all edited images are rendered at once"
        box, size, window, flip = self.box.copy(), self.size.copy(), self.window.copy(), self.flip.copy()
        whole = CropPlan.whole(self.output_size[rows])
        box[rows], size[rows], window[rows], flip[rows] = whole.box, whole.size, whole.window, whole.flip
        restarted = replace(self, box=box, size=size, window=window, flip=flip)
        if self.upside_down is None:
            return restarted
        upside_down = self.upside_down.copy()
        upside_down[rows] = False
        return replace(restarted, upside_down=upside_down)


class PlanRow(NamedTuple):
    """How one image is rendered: its row of a plan."""

    plan: CropPlan
    row: int


class PlannedCrop(NamedTuple):
    """One crop of each of n images.

    Attributes:
        pictures: The images.
        plan: How to render them.
    """

    pictures: Sequence[Picture]
    plan: CropPlan


def _reach_beyond(boxes: Boxes, sizes: Sizes) -> NDArray[np.bool_]:
    """Return whether boxes reach beyond images of these sizes, bool [n]."""
    return _any((boxes[:, :2] < 0) | (boxes[:, :2] + boxes[:, 2:] > sizes))


def _any(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether any value of each row is true, for bool [n, m]."""
    return np.asarray(mask.any(axis=1))
