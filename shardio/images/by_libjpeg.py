"""JPEG decoding by libjpeg-turbo, which decodes only the parts that are read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import simplejpeg

from shardio.images.errors_of_pillow import errors_of_pillow
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.codec import decode_whole, prepare_part
from shardio.images.jpeg.head import JpegHead, read_head, why_irregular
from shardio.images.jpeg.regions import Box
from shardio.images.jpeg.standard import APP1, JPEG_START, USUAL_FACTORS
from shardio.images.orientation import UPRIGHT, Orientation, Turn, read_jpeg_turn
from shardio.images.pictures import Part, Picture, check_size
from shardio.images.pixels import Pixels


class JpegPicture(Picture):
    """A JPEG. Each part is decoded when it is read.

    Attributes:
        content: The bytes of the file.
        turn: How to turn the stored picture upright.
    """

    can_scale = True
    decoder_name = "libjpeg"

    def __init__(self, content: bytes, head: JpegHead, turn: Turn) -> None:
        self.content = content
        self.turn = turn
        self._head = head
        self._is_regular = why_irregular(head) is None
        self.size = turn.size(head.height, head.width)

    def origin(self, scale: int) -> tuple[float, float]:
        head = self._head
        return self.turn.corner(-head.height % scale / scale, -head.width % scale / scale)

    def part(self, box: Box, scale: int = 1) -> Part:
        head, turn = self._head, self.turn
        stored = turn.stored_box(box, -(-head.height // scale), -(-head.width // scale))
        decode = prepare_part(self.content, head, stored, scale, is_regular=self._is_regular)
        return decode if turn == UPRIGHT else lambda: turn.apply(decode())

    def prepare_copy(self, box: Box) -> Callable[[Pixels], object]:
        head = self._head
        if self.turn != UPRIGHT or box != (0, 0, head.height, head.width) or has_tiles(self.content):
            return super().prepare_copy(box)

        def decode(out: Pixels) -> None:
            is_direct = out.flags.c_contiguous
            pixels = decode_whole(self.content, head, out=out if is_direct else None)
            if not is_direct:
                np.copyto(out, pixels)

        return decode


def open_by_libjpeg(content: bytes, orientation: Orientation, max_pixels: int) -> Picture | None:
    """Open a JPEG. Return None for other formats and for JPEGs that only Pillow can convert to RGB.

    Raises:
        ValueError: If the JPEG is damaged or too large.
    """
    if not content.startswith(JPEG_START):
        return None
    try:
        head = read_head(content)
    except ValueError:
        with suppress(KeyError):
            simplejpeg.decode_jpeg_header(content)  # If libjpeg finds an error as well, raise that one.
        return None
    if not _can_convert(content, head):
        return None
    check_size(head.height, head.width, max_pixels)
    turn = UPRIGHT
    if orientation == "apply" and any(segment.marker == APP1 for segment in head.segments):
        with errors_of_pillow():
            turn = read_jpeg_turn(content)
    return JpegPicture(content, head, turn)


def _can_convert(content: bytes, head: JpegHead) -> bool:
    """Return whether simplejpeg can convert a JPEG to RGB. It needs 1 or 3 components and known sampling factors."""
    if len(head.factors) not in (1, 3) or not head.height or not head.width:
        return False
    if len(head.factors) == 1 or head.factors in USUAL_FACTORS:
        return True
    try:
        simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError):  # KeyError: factors that libjpeg knows, but simplejpeg does not.
        return False
    return True
