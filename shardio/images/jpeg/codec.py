"""JPEG decoding: libjpeg-turbo, by simplejpeg, for a part of the picture and at a part of its size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shardio.images.jpeg.markers import EOI, RST0, JpegHead
from shardio.images.jpeg.regions import Box, cut_rows, cut_tiles
from shardio.images.jpeg.tile_table import read_tiles
from shardio.images.scratch import scratch_pixels

_EOI = bytes([0xFF, EOI])

_LEFT_OVER = re.compile(r"Corrupt JPEG data: [0-9]+ extraneous bytes before marker 0x(d[0-9])")
"""What libjpeg says when the frame ends before the scan does; the pixels are there."""


class _Cut(NamedTuple):
    """A smaller JPEG, which part of the picture it shows, and which marker ends what is left over."""

    content: bytes | bytearray
    shown: Box
    next_marker: int | None


def prepare_part(
    content: bytes, head: JpegHead, box: Box, scale: int, *, is_regular: bool
) -> Callable[[], NDArray[np.uint8]]:
    """Cut a smaller JPEG out of one, with a part of its picture; return what decodes it.

    Args:
        content: The file.
        head: Its head.
        box: The part, in pixels of the picture at 1/scale of its size.
        scale: 1, 2, 4 or 8.
        is_regular: Whether the image can be decoded in parts.

    Returns:
        A function that returns uint8 [box.height, box.width, 3], RGB, the pixels of a full decode; valid until its
        thread decodes again. It raises ValueError if the image is truncated or damaged where it was looked at.
    """
    # In pixels of the whole picture.
    asked = Box(box.top * scale, box.left * scale, box.height * scale, box.width * scale)
    cut = _cut(content, head, asked, scale) if is_regular else None

    def take(pixels: NDArray[np.uint8], shown: Box) -> NDArray[np.uint8]:
        top, left = (asked.top - shown.top) // scale, (asked.left - shown.left) // scale
        return pixels[top : top + box.height, left : left + box.width]

    def decode() -> NDArray[np.uint8]:
        if cut is not None and (pixels := _decode_cut(cut, scale)) is not None:
            return take(pixels, cut.shown)
        return take(decode_whole(content, head.height, head.width, scale), Box(0, 0, head.height, head.width))

    return decode


def decode_whole(content: bytes | bytearray, height: int, width: int, scale: int = 1) -> NDArray[np.uint8]:
    """Decode a JPEG of a known size to uint8 [height / scale, width / scale, 3], sizes rounded up.

    Raises:
        ValueError: If libjpeg-turbo finds anything wrong with it; the pixels are in the scratch memory nonetheless.
    """
    pixels = _destination(height, width, scale)
    least = (0, 0) if scale == 1 else pixels.shape
    decoded = simplejpeg.decode_jpeg(content, min_height=least[0], min_width=least[1], buffer=pixels)
    assert decoded.shape == pixels.shape, "the head was read as libjpeg reads it"
    return pixels


def _destination(height: int, width: int, scale: int) -> NDArray[np.uint8]:
    return scratch_pixels("decoded", -(-height // scale), -(-width // scale))


def _cut(content: bytes, head: JpegHead, asked: Box, scale: int) -> _Cut | None:
    """Cut the intervals around a box, or the rows down to its last; None if that would spare nothing."""
    tiles = read_tiles(content, head)
    if tiles is not None:
        return _Cut(*cut_tiles(content, head, tiles, asked, scale), next_marker=None)
    if not content.endswith(_EOI):
        return None  # Truncated, maybe below the box: decoding all of it will say so.
    rows, shown = cut_rows(content, head, asked, scale)
    return None if shown.height == head.height else _Cut(rows, shown, _marker_behind(head, shown.height))


def _marker_behind(head: JpegHead, height: int) -> int:
    """Return the marker at the end of the interval in which the scan goes on below a frame of another height."""
    rows, row_mcus = head.num_mcus
    if not head.restart_interval:
        return EOI
    interval = height // head.mcu_size[0] * row_mcus // head.restart_interval
    is_last = interval >= (rows * row_mcus - 1) // head.restart_interval
    return EOI if is_last else RST0 + interval % 8


def _decode_cut(cut: _Cut, scale: int) -> NDArray[np.uint8] | None:
    """Decode a cut; None if anything is wrong with it: decoding all of the image will say what."""
    _, _, height, width = cut.shown
    try:
        return decode_whole(cut.content, height, width, scale)
    except ValueError as error:
        said = _LEFT_OVER.fullmatch(str(error))
        is_expected = said is not None and int(said[1], 16) == cut.next_marker
        return _destination(height, width, scale) if is_expected else None
