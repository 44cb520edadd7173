"""EXIF orientation: how to turn a stored picture upright."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from shardio.images.jpeg.regions import Box
from shardio.images.pixels import Pixels

if TYPE_CHECKING:
    import PIL.Image

Orientation = Literal["ignore", "apply"]
"""Whether to apply the EXIF orientation. torchvision and Pillow ignore it by default."""

_TAG = 0x0112  # Exif 2.32, table 4


class Turn(NamedTuple):
    """How to turn a stored picture upright: mirror it along one or both axes, then transpose it."""

    upside_down: bool = False
    mirrored: bool = False
    transposed: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the upright picture."""
        return (width, height) if self.transposed else (height, width)

    def corner(self, below: float, right: float) -> tuple[float, float]:
        """Return how far the stored pixels extend above and to the left of the upright picture.

        Args:
            below: How far they extend below the stored picture.
            right: How far they extend to the right of it.
        """
        above, left = below * self.upside_down, right * self.mirrored
        return (left, above) if self.transposed else (above, left)

    def stored_box(self, box: Box, height: int, width: int) -> Box:
        """Convert a box of the upright picture to one of the stored picture, whose size is ``height`` × ``width``."""
        if self.transposed:
            box = Box(box.left, box.top, box.width, box.height)
        top = height - box.top - box.height if self.upside_down else box.top
        left = width - box.left - box.width if self.mirrored else box.left
        return Box(top, left, box.height, box.width)

    def apply(self, pixels: Pixels) -> Pixels:
        """Turn a part of the stored picture upright. Return a contiguous copy, or the part itself if it is upright."""
        if self == UPRIGHT:
            return pixels
        pixels = pixels[:: -1 if self.upside_down else 1, :: -1 if self.mirrored else 1]
        return np.ascontiguousarray(pixels.transpose(1, 0, 2) if self.transposed else pixels)


UPRIGHT = Turn()

_TURNS = {
    2: Turn(mirrored=True),
    3: Turn(upside_down=True, mirrored=True),
    4: Turn(upside_down=True),
    5: Turn(transposed=True),
    6: Turn(upside_down=True, transposed=True),
    7: Turn(upside_down=True, mirrored=True, transposed=True),
    8: Turn(mirrored=True, transposed=True),
}
"""The turn for each value of the tag. 1 and undefined values mean upright."""


def read_turn(image: PIL.Image.Image) -> Turn:
    """Return how to turn an image that Pillow opened."""
    return _TURNS.get(image.getexif().get(_TAG, 1), UPRIGHT)


def turn_pillow(image: PIL.Image.Image, turn: Turn) -> PIL.Image.Image:
    """Turn a stored image of any mode upright, as :meth:`Turn.apply` turns pixels. Metadata stays as it is."""
    from PIL.Image import Transpose

    for is_needed, method in (
        (turn.upside_down, Transpose.FLIP_TOP_BOTTOM),
        (turn.mirrored, Transpose.FLIP_LEFT_RIGHT),
        (turn.transposed, Transpose.TRANSPOSE),
    ):
        if is_needed:
            image = image.transpose(method)
    return image


def read_jpeg_turn(content: bytes) -> Turn:
    """Return how to turn the image in a JPEG."""
    import PIL.Image  # Not before an image needs it: see resizing.py.

    with PIL.Image.open(io.BytesIO(content)) as image:
        return read_turn(image)
