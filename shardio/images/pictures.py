"""Pictures, which are opened images. Their size is known and parts of them can be read; most are not decoded yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.regions import Box
from shardio.images.pixels import Pixels

if TYPE_CHECKING:
    from shardio.images.crop_plan import PlanRow

DEFAULT_MAX_PIXELS = 178_956_970
"""The default limit on an image's pixels. Pillow treats larger images as decompression bombs."""

DecoderName = Literal["kernel", "libjpeg", "pillow", "pillow, clipped"]
"""The decoder of an image. :data:`DECODER_DESCRIPTIONS` says what each name means."""

DECODER_DESCRIPTIONS: dict[DecoderName, str] = {
    "kernel": "the kernel",
    "libjpeg": "libjpeg-turbo",
    "pillow": "Pillow",
    "pillow, clipped": "Pillow, which clips their values to 8 bits",
}
"""Each decoder's name in reports. `by_kernel.py`, `by_libjpeg.py` and `by_pillow.py` contain the decoders."""

CLIPPED_ADVICE = (
    "as images they become RGB of 8 bits, which clips values to 0 to 255 as torchvision does, so that most pixels may "
    "be white or black: read them as a field, such as fields=('png', 'label'), which keeps their values, or scale the "
    "files before"
)
"""The effect on gray images of other types than 8 bits, and the remedy."""

Part = Callable[[], Pixels]
"""A function that reads a part of a picture.

It returns uint8 [height, width, 3], valid until the same thread reads the next part. It raises ValueError if the image
is truncated or damaged.
"""


class TooManyPixels(ValueError):  # noqa: N818  # It names the finding, as NotTileable does.
    """An image has more pixels than the caller allows."""


class Picture(ABC):
    """An opened image.

    Attributes:
        size: Height and width in pixels.
        can_scale: Whether :meth:`part` can read the picture at a smaller scale.
        decoder_name: The decoder that :meth:`part` uses, or that has decoded the picture already.
        history: How the picture was rendered from a stored one, step by step; empty if it is stored itself.
    """

    size: tuple[int, int]
    can_scale: bool
    decoder_name: DecoderName
    history: tuple[PlanRow, ...] = ()

    @abstractmethod
    def part(self, box: Box, scale: int = 1) -> Part:
        """Return a function that reads a part of the picture.

        Args:
            box: The part, in pixels of the picture at 1/scale of its size (rounded up).
            scale: 1, 2, 4 or 8 if ``can_scale``, else 1.
        """

    def read(self, box: Box, scale: int = 1) -> Pixels:
        """Read a part of the picture. The pixels are valid until this thread reads the next part."""
        return self.part(box, scale)()

    def prepare_copy(self, box: Box) -> Callable[[Pixels], object]:
        """Return a function that writes a part of the picture to uint8 [box.height, box.width, 3]."""
        part = self.part(box)
        return lambda out: np.copyto(out, part())

    def origin(self, scale: int) -> tuple[float, float]:
        """Return the position of the picture's top left corner, in pixels of the picture at 1/scale of its size.

        If the size is not a multiple of the scale, the last scaled pixel reaches beyond the picture. In a turned
        picture, that pixel may be the first.
        """
        return 0.0, 0.0


class DecodedPicture(Picture):
    """A picture in memory.

    Args:
        pixels: uint8 [height, width, 3].
        decoder_name: The decoder that produced it. The default is for arrays of unknown origin.
        history: How it was rendered, step by step.
    """

    can_scale = False

    def __init__(self, pixels: Pixels, decoder_name: DecoderName = "pillow", history: tuple[PlanRow, ...] = ()) -> None:
        self.pixels, self.decoder_name, self.history = pixels, decoder_name, history
        self.size = pixels.shape[0], pixels.shape[1]

    def part(self, box: Box, scale: int = 1) -> Part:
        assert scale == 1, "decoded pixels are not scaled"
        pixels = self.pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        return lambda: pixels


def sizes_of(pictures: Sequence[Picture]) -> NDArray[np.int64]:
    """Return the heights and widths of n pictures, int64 [n, 2]."""
    return np.array([picture.size for picture in pictures], dtype=np.int64).reshape(-1, 2)


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise TooManyPixels if an image of this size has more than ``max_pixels``."""
    if height * width > max_pixels:
        raise TooManyPixels(
            f"the image has {width}×{height} pixels, more than max_pixels={max_pixels}: raise max_pixels to allow it"
        )
