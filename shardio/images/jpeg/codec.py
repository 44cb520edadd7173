"""JPEG decoding by libjpeg-turbo (through simplejpeg): a part of the image, at a fraction of its size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shardio.images.jpeg.head import JpegHead
from shardio.images.jpeg.regions import Box, cut_rows, cut_tiles
from shardio.images.jpeg.standard import EOI, RST0, marker_bytes
from shardio.images.jpeg.tile_table import read_tiles
from shardio.images.jpeg.verdict import write_harmless
from shardio.images.scratch import scratch_pixels

_LEFTOVER = re.compile(r"Corrupt JPEG data: [0-9]+ extraneous bytes before marker 0x(d[0-9])")
"""libjpeg's warning when the frame ends before the scan does. The pixels are decoded nevertheless."""


class _Cut(NamedTuple):
    """A smaller JPEG, the part of the image that it shows, and the marker that ends the leftover bytes of its scan."""

    content: bytes | bytearray
    shown: Box
    next_marker: int | None


def prepare_part(
    content: bytes, head: JpegHead, box: Box, scale: int, *, is_regular: bool
) -> Callable[[], NDArray[np.uint8]]:
    """Cut out a smaller JPEG that shows a part of the image, and return a function that decodes it.

    Args:
        content: The file.
        head: Its head.
        box: The part, in pixels of the image at 1/scale of its size.
        scale: 1, 2, 4 or 8.
        is_regular: Whether parts of the image can be decoded on their own.

    Returns:
        A function that returns uint8 [box.height, box.width, 3], RGB: the pixels of a full decode. They are valid until
        the thread decodes again. The function raises ValueError if the image is truncated, or damaged where it is read.
    """
    # In pixels of the image at its full size.
    requested = Box(box.top * scale, box.left * scale, box.height * scale, box.width * scale)
    cut = _cut(content, head, requested, scale) if is_regular else None

    def crop(pixels: NDArray[np.uint8], shown: Box) -> NDArray[np.uint8]:
        top, left = (requested.top - shown.top) // scale, (requested.left - shown.left) // scale
        return pixels[top : top + box.height, left : left + box.width]

    def decode() -> NDArray[np.uint8]:
        if cut is not None and (pixels := _decode_cut(cut, scale)) is not None:
            return crop(pixels, cut.shown)
        return crop(decode_whole(content, head, scale), Box(0, 0, head.height, head.width))

    return decode


def decode_whole(
    content: bytes, head: JpegHead, scale: int = 1, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Decode a JPEG to uint8 [height / scale, width / scale, 3], sizes rounded up.

    Args:
        content: The file.
        head: Its head.
        scale: 1, 2, 4 or 8.
        out: Where to write the pixels, without gaps between the rows; by default, to scratch memory.

    Raises:
        ValueError: If libjpeg-turbo reports an error, or a warning that is not harmless: see
            :mod:`shardio.images.jpeg.verdict`.
    """
    pixels = _destination(head.height, head.width, scale) if out is None else out
    try:
        _decode_to(pixels, content, scale)
    except ValueError:
        if (harmless := write_harmless(content, head)) is None:
            raise
        _decode_to(pixels, harmless, scale, strict=False)
    return pixels


def _decode_to(pixels: NDArray[np.uint8], content: bytes | bytearray, scale: int, *, strict: bool = True) -> None:
    """Decode a JPEG of a known size.

    Raises:
        ValueError: If libjpeg-turbo reports an error or, if ``strict``, a warning. After a warning of the scan, the
            pixels are complete.
    """
    min_height, min_width = (0, 0) if scale == 1 else pixels.shape[:2]
    decoded = simplejpeg.decode_jpeg(content, min_height=min_height, min_width=min_width, buffer=pixels, strict=strict)
    assert decoded.shape == pixels.shape, "shardio and libjpeg read the same size from the head"


def _destination(height: int, width: int, scale: int) -> NDArray[np.uint8]:
    return scratch_pixels("decoded", -(-height // scale), -(-width // scale))


def _cut(content: bytes, head: JpegHead, requested: Box, scale: int) -> _Cut | None:
    """Cut out the intervals around a box, or the rows down to its last one. Return None if that saves nothing."""
    tiles = read_tiles(content, head)
    if tiles is not None:
        return _Cut(*cut_tiles(content, head, tiles, requested, scale), next_marker=None)
    if not content.endswith(marker_bytes(EOI)):
        return None  # The file may be truncated below the box. A full decode detects that.
    rows, shown = cut_rows(content, head, requested, scale)
    return None if shown.height == head.height else _Cut(rows, shown, _marker_after(head, shown.height))


def _marker_after(head: JpegHead, height: int) -> int:
    """Return the marker that ends the first interval that continues below a frame of a smaller height."""
    rows, row_mcus = head.num_mcus
    if not head.restart_interval:
        return EOI
    interval = height // head.mcu_size[0] * row_mcus // head.restart_interval
    is_last = interval >= (rows * row_mcus - 1) // head.restart_interval
    return EOI if is_last else RST0 + interval % 8


def _decode_cut(cut: _Cut, scale: int) -> NDArray[np.uint8] | None:
    """Decode a cut. Return None if anything is wrong with it: a full decode then reports the error."""
    pixels = _destination(cut.shown.height, cut.shown.width, scale)
    try:
        _decode_to(pixels, cut.content, scale)
    except ValueError as error:
        leftover = _LEFTOVER.fullmatch(str(error))
        is_expected = leftover is not None and int(leftover[1], 16) == cut.next_marker
        return pixels if is_expected else None
    return pixels
