"""Pictures: opened images of known size that can be read in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg import Box

if TYPE_CHECKING:
    import PIL.Image

    from shardio.images.crop_plan import PlanRow


Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3], RGB."""

Orientation = Literal["ignore", "apply"]
"""Whether to apply the EXIF orientation. torchvision and Pillow ignore it by default."""

DEFAULT_MAX_PIXELS = 178_956_970
"""The default limit on an image's pixels. Pillow treats larger images as decompression bombs."""

DecoderName = Literal["kernel", "device", "cache", "libjpeg", "raw", "pillow", "pillow, clipped"]
"""The decoder of an image. :data:`DECODER_DESCRIPTIONS` describes each decoder."""

DECODER_DESCRIPTIONS: dict[DecoderName, str] = {
    "kernel": "the kernel",
    "device": "the device",
    "cache": "no decoder, because they were kept decoded",
    "libjpeg": "libjpeg-turbo",
    "raw": "no decoder, because their pixels are not compressed",
    "pillow": "Pillow",
    "pillow, clipped": "Pillow, which clips their values to 8 bits",
}
"""Each decoder's name in reports."""

CLIPPED_ADVICE = (
    "as images, they are converted to 8-bit RGB, which clips values to the range 0 to 255, as in torchvision: most "
    "pixels may become white or black. To keep their values, read them as a field, for example with fields=('png', "
    "'label'); or scale the values in the files first"
)
"""The effect of conversion on gray images that do not have 8 bits, and the remedy."""

Part = Callable[[], Pixels]
"""A function that reads a part of a picture.

It returns uint8 [height, width, 3], valid until the same thread reads the next part. It raises ValueError if the image
is truncated or damaged.
"""

_ORIENTATION_TAG = 0x0112  # Exif 2.32, table 4


class Turn(NamedTuple):
    """The turn that makes a stored picture upright: optional mirroring along each axis, then optional transposition."""

    upside_down: bool = False
    mirrored: bool = False
    transposed: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the upright picture."""
        return (width, height) if self.transposed else (height, width)

    def stored_box(self, box: Box, height: int, width: int) -> Box:
        """Convert a box in the upright picture to a box in the stored picture, whose size is ``height`` × ``width``."""
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
"""The turn for each value of the orientation tag. 1 and undefined values mean upright."""


def read_turn(image: PIL.Image.Image) -> Turn:
    """Return the turn that makes a Pillow image upright."""
    return _TURNS.get(image.getexif().get(_ORIENTATION_TAG, 1), UPRIGHT)


def turn_pillow(image: PIL.Image.Image, turn: Turn) -> PIL.Image.Image:
    """Turn a stored image of any mode upright, as :meth:`Turn.apply` turns pixels. The metadata stays unchanged."""
    from PIL.Image import Transpose

    for is_needed, method in (
        (turn.upside_down, Transpose.FLIP_TOP_BOTTOM),
        (turn.mirrored, Transpose.FLIP_LEFT_RIGHT),
        (turn.transposed, Transpose.TRANSPOSE),
    ):
        if is_needed:
            image = image.transpose(method)
    return image


class TooManyPixels(ValueError):  # noqa: N818  # The name states the problem, as NotTileable does.
    """The error for an image with more pixels than the caller allows."""


class Picture(ABC):
    """An opened image.

    Attributes:
        size: Height and width in pixels.
        decoder_name: The decoder that :meth:`part` uses, or that has already decoded the picture.
        kernel_name: The decoder's name if the kernel renders the picture.
        history: The steps that rendered the picture from a stored picture; empty if it is a stored picture.
    """

    size: tuple[int, int]
    decoder_name: DecoderName
    kernel_name: DecoderName = "kernel"
    history: tuple[PlanRow, ...] = ()

    @abstractmethod
    def part(self, box: Box) -> Part:
        """Return a function that reads a part of the picture."""

    def read(self, box: Box) -> Pixels:
        """Read a part of the picture. The pixels are valid until this thread reads the next part."""
        return self.part(box)()

    def prepare_copy(self, box: Box) -> Callable[[Pixels], object]:
        """Return a function that writes a part of the picture to uint8 [box.height, box.width, 3]."""
        part = self.part(box)
        return lambda out: np.copyto(out, part())


class DecodedPicture(Picture):
    """A picture in memory.

    Args:
        pixels: uint8 [height, width, 3].
        decoder_name: The decoder that produced the pixels. The default applies to arrays of unknown origin.
        history: The steps that rendered the picture.
    """

    def __init__(self, pixels: Pixels, decoder_name: DecoderName = "pillow", history: tuple[PlanRow, ...] = ()) -> None:
        self.pixels, self.decoder_name, self.history = pixels, decoder_name, history
        self.size = pixels.shape[0], pixels.shape[1]

    def part(self, box: Box) -> Part:
        pixels = self.pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        return lambda: pixels


def sizes_of(pictures: Sequence[Picture]) -> NDArray[np.int64]:
    """Return the heights and widths of n pictures, int64 [n, 2]."""
    return np.array([picture.size for picture in pictures], dtype=np.int64).reshape(-1, 2)


def fit_size(height: int, width: int, max_side: int | None, min_side: int | None) -> tuple[int, int] | None:
    """Return the size of an image after shrinking, or None if it does not change.

    Args:
        height: The height of the image.
        width: The width of the image.
        max_side: The maximum length of the longer side, or None for no limit.
        min_side: The maximum length of the shorter side, or None for no limit.
    """
    limits = ((max_side, max(height, width)), (min_side, min(height, width)))
    ratio = min(limit / side for limit, side in (*limits, (1, 1)) if limit is not None)
    return None if ratio >= 1 else (max(round(height * ratio), 1), max(round(width * ratio), 1))


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise TooManyPixels if an image of this size has more than ``max_pixels``."""
    if height * width > max_pixels:
        raise TooManyPixels(
            f"the image has {width}×{height} pixels, more than max_pixels={max_pixels}: raise max_pixels to allow it"
        )
