"""Pictures: images of which parts can be read, whether they are decoded yet or not."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import numpy as np
import PIL.Image
import simplejpeg

from shardio.images.errors_of_pillow import errors_of_pillow
from shardio.images.jpeg.codec import prepare_part
from shardio.images.jpeg.head import JpegHead, read_head, why_irregular
from shardio.images.jpeg.regions import Box
from shardio.images.jpeg.standard import APP1, JPEG_START
from shardio.images.orientation import UPRIGHT, Orientation, Turn, read_jpeg_turn, read_turn
from shardio.images.pixels import Pixels

DEFAULT_MAX_PIXELS = 178_956_970
"""Pixels of an image; above it Pillow, too, takes a file for a decompression bomb."""

_USUAL_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in [(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (1, 4)])
"""Sampling factors of 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:4:1."""

DecoderName = Literal["kernel", "libjpeg", "pillow"]
"""Who decodes an image: shardio's own kernel, libjpeg-turbo, or Pillow."""

Part = Callable[[], Pixels]
"""Reads a part of a picture: returns uint8 [height, width, 3], valid until its thread reads the next one.

It raises ValueError if the image is truncated or damaged.
"""


class TooManyPixels(ValueError):  # noqa: N818  # It names what there is, as NotTileable does.
    """An image has more pixels than the caller allows."""


class Picture(ABC):
    """An image of which parts can be read.

    Attributes:
        size: Height and width in pixels.
        can_scale: Whether :meth:`part` can give the picture smaller than it is.
        decoder_name: Who decodes it in :meth:`part`, or has decoded it before.
    """

    size: tuple[int, int]
    can_scale: bool
    decoder_name: DecoderName

    @abstractmethod
    def part(self, box: Box, scale: int = 1) -> Part:
        """Return what reads a part of the picture.

        Args:
            box: The part, in pixels of the picture at 1/scale of its size (rounded up).
            scale: 1, 2, 4 or 8 where ``can_scale``, else 1.
        """

    def read(self, box: Box, scale: int = 1) -> Pixels:
        """Read a part of the picture: :meth:`part`, at once; valid until this thread reads the next one."""
        return self.part(box, scale)()

    def origin(self, scale: int) -> tuple[float, float]:
        """Return where the picture's top left corner lies in the picture at 1/scale of its size, in its pixels.

        A picture whose size is no multiple of the scale has too large a last pixel; turned, that is the first.
        """
        return 0.0, 0.0


class DecodedPicture(Picture):
    """A picture that lies in memory, uint8 [height, width, 3]; where nobody says otherwise, Pillow has decoded it."""

    can_scale = False

    def __init__(self, pixels: Pixels, decoder_name: DecoderName = "pillow") -> None:
        self.pixels, self.decoder_name = pixels, decoder_name
        self.size = pixels.shape[0], pixels.shape[1]

    def part(self, box: Box, scale: int = 1) -> Part:
        assert scale == 1, "decoded pixels are not scaled"
        pixels = self.pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        return lambda: pixels


class JpegPicture(Picture):
    """A JPEG that is decoded where it is read.

    Attributes:
        content: Its file.
    """

    can_scale = True
    decoder_name = "libjpeg"

    def __init__(self, content: bytes, head: JpegHead, turn: Turn) -> None:
        self.content = content
        self._head, self._turn = head, turn
        self._is_regular = why_irregular(head) is None
        self.size = turn.size(head.height, head.width)

    @property
    def is_upright(self) -> bool:
        """Whether it is stored as it is seen."""
        return self._turn == UPRIGHT

    def origin(self, scale: int) -> tuple[float, float]:
        head = self._head
        return self._turn.corner(-head.height % scale / scale, -head.width % scale / scale)

    def part(self, box: Box, scale: int = 1) -> Part:
        head, turn = self._head, self._turn
        stored = turn.stored_box(box, -(-head.height // scale), -(-head.width // scale))
        decode = prepare_part(self.content, head, stored, scale, is_regular=self._is_regular)
        return decode if turn == UPRIGHT else lambda: turn.apply(decode())


class PillowPicture(Picture):
    """An image of any format, which Pillow decodes, whole, where it is read."""

    can_scale = False
    decoder_name = "pillow"

    def __init__(self, content: bytes, height: int, width: int) -> None:
        self._content = content
        self.size = height, width

    def part(self, box: Box, scale: int = 1) -> Part:
        assert scale == 1, "Pillow decodes pictures as they are"
        return lambda: self._decode()[box.top : box.top + box.height, box.left : box.left + box.width]

    def _decode(self) -> Pixels:
        with errors_of_pillow(), PIL.Image.open(io.BytesIO(self._content)) as image:
            pixels = np.array(image.convert("RGB"))
        if pixels.shape[:2] != self.size:
            raise ValueError(f"the header says {self.size} pixels, height and width, and there are {pixels.shape[:2]}")
        return pixels


def open_image(content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """Open an image of any common format.

    JPEGs are read by libjpeg-turbo, which must find nothing wrong with them, and only where they are asked for;
    CMYK ones and all other formats by Pillow, whole, as its ``convert("RGB")`` does.

    Args:
        content: The bytes of an image file.
        orientation: Whether to honour the EXIF orientation. TIFFs are always turned, by Pillow.
        max_pixels: An image of more pixels is an error.

    Raises:
        ValueError: If the image is damaged, too large, or of a format that nobody here reads.
    """
    if content.startswith(JPEG_START) and (picture := _open_jpeg(content, orientation, max_pixels)) is not None:
        return picture
    with errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as image:
        _check_size(image.height, image.width, max_pixels)
        if orientation == "ignore" and image.format != "TIFF":
            return PillowPicture(content, image.height, image.width)
        # Which way a picture is turned, and so its size, is known for certain when it has been read to its end.
        pixels = np.array(image.convert("RGB"))
        return DecodedPicture(pixels if orientation == "ignore" else read_turn(image).apply(pixels))


def _open_jpeg(content: bytes, orientation: Orientation, max_pixels: int) -> Picture | None:
    """Open a JPEG; None if it is one for Pillow: with four components, or with a head that is not understood."""
    try:
        head = read_head(content)
    except ValueError:
        with suppress(KeyError):
            simplejpeg.decode_jpeg_header(content)  # Says what is wrong in libjpeg's words, if it thinks so, too.
        return None
    if not _is_for_libjpeg(content, head):
        return None
    _check_size(head.height, head.width, max_pixels)
    turn = UPRIGHT
    if orientation == "apply" and any(segment.marker == APP1 for segment in head.segments):
        with errors_of_pillow():
            turn = read_jpeg_turn(content)
    return JpegPicture(content, head, turn)


def _is_for_libjpeg(content: bytes, head: JpegHead) -> bool:
    """Say whether simplejpeg reads a JPEG as RGB: one or three components, with usual sampling factors."""
    if len(head.factors) not in (1, 3) or not head.height or not head.width:
        return False
    if len(head.factors) == 1 or head.factors in _USUAL_FACTORS:
        return True
    try:
        simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError):  # KeyError: for factors that libjpeg knows and simplejpeg has no name for.
        return False
    return True


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise TooManyPixels(
            f"the image has {width}×{height} pixels, more than max_pixels={max_pixels}: raise max_pixels if it may"
        )
