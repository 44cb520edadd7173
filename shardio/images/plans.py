"""Crop plans: which part of each image becomes which pixels, known before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Sizes = NDArray[np.int64]
"""int64 [n, 2]: the height and width of n images."""

Boxes = NDArray[np.int64]
"""int64 [n, 4]: top, left, height, width of a part of each of n images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CropPlans:
    """What is to be made of n images: take a box of each, resize it, take a window of that, mirror it.

    Transforms add themselves one by one; as long as that works, nothing has to be decoded between them.

    Attributes:
        box: A part of the image, inside of it.
        size: What the box is resized to.
        window: A part of the resized box; where it reaches beyond that, pixels are black.
        flip: bool [n], whether the window is mirrored left to right.
        antialias: Whether resizing weighs all pixels of the box.
    """

    box: Boxes
    size: Sizes
    window: Boxes
    flip: NDArray[np.bool_]
    antialias: bool = False

    @classmethod
    def whole(cls, sizes: Sizes) -> CropPlans:
        """Return plans that leave images of these sizes as they are."""
        box = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        return cls(box=box, size=sizes, window=box, flip=np.zeros(len(sizes), dtype=np.bool_))

    @property
    def output_size(self) -> Sizes:
        """The sizes of what comes out."""
        return self.window[:, 2:]

    def crop(self, boxes: Boxes) -> CropPlans:
        """Return plans that go on to crop what these would give."""
        mirrored_left = self.window[:, 3] - boxes[:, 1] - boxes[:, 3]
        left = np.where(self.flip, mirrored_left, boxes[:, 1])
        corner = self.window[:, :2] + np.stack([boxes[:, 0], left], axis=1)
        return replace(self, window=np.concatenate([corner, boxes[:, 2:]], axis=1))

    def resize(self, sizes: Sizes, *, antialias: bool) -> CropPlans | None:
        """Return plans that go on to resize; None if pixels are needed first: they are resized already, or padded."""
        is_resized = (self.size != self.box[:, 2:]).any()
        is_padded = (self.window[:, :2] < 0).any() or (self.window[:, :2] + self.window[:, 2:] > self.size).any()
        if is_resized or is_padded:
            return None
        box = np.concatenate([self.box[:, :2] + self.window[:, :2], self.window[:, 2:]], axis=1)
        whole = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        return replace(self, box=box, size=sizes, window=whole, antialias=antialias)

    def mirror(self, flips: NDArray[np.bool_]) -> CropPlans:
        """Return plans that go on to mirror those images for which ``flips`` says so."""
        return replace(self, flip=self.flip ^ flips)
