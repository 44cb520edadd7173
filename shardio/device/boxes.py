"""Boxes: rectangles of pixels in all images of a batch, or in one image."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PixelBox(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, images: torch.Tensor) -> torch.Tensor:
        """Return the part of images [..., H, W] that is in the box, in the same memory."""
        return images[..., self.top : self.top + self.height, self.left : self.left + self.width]
