"""JPEG decoding: libjpeg-turbo, by simplejpeg, for a part of the picture and at a part of its size."""

from __future__ import annotations

import re

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shardio.images.jpeg.markers import JpegHead
from shardio.images.jpeg.regions import Box, cut_rows, cut_tiles
from shardio.images.jpeg.tile_table import read_tiles
from shardio.images.scratch import scratch_pixels

_LEFT_OVER = re.compile(r"Corrupt JPEG data: [0-9]+ extraneous bytes before marker 0xd[0-9]")
"""What libjpeg says when the frame ends before the scan does; the pixels are there."""


def decode_box(content: bytes, head: JpegHead, box: Box, scale: int, *, is_regular: bool) -> NDArray[np.uint8]:
    """Decode a part of a JPEG's picture.

    Args:
        content: The file.
        head: Its head.
        box: The part, in pixels of the picture at 1/scale of its size.
        scale: 1, 2, 4 or 8.
        is_regular: Whether the image can be decoded in parts.

    Returns:
        uint8 [box.height, box.width, 3], RGB, the pixels of a full decode; valid until this thread decodes again.

    Raises:
        ValueError: If the image is truncated or damaged where it was looked at.
    """
    # In pixels of the whole picture.
    asked = Box(box.top * scale, box.left * scale, box.height * scale, box.width * scale)
    if is_regular and (pixels := _decode_tiles(content, head, asked, scale)) is not None:
        return pixels
    if is_regular and (pixels := _decode_rows(content, head, asked, scale)) is not None:
        return pixels
    pixels = decode_whole(content, head.height, head.width, scale)
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def decode_whole(content: bytes | bytearray, height: int, width: int, scale: int = 1) -> NDArray[np.uint8]:
    """Decode a JPEG of a known size to uint8 [height / scale, width / scale, 3], sizes rounded up.

    Raises:
        ValueError: If libjpeg-turbo finds anything wrong with it; the pixels are in the scratch memory nonetheless.
    """
    pixels = _destination(height, width, scale)
    smallest = {} if scale == 1 else {"min_height": pixels.shape[0], "min_width": pixels.shape[1]}
    decoded = simplejpeg.decode_jpeg(content, buffer=pixels, **smallest)
    assert decoded.shape == pixels.shape, "the head was read as libjpeg reads it"
    return pixels


def _destination(height: int, width: int, scale: int) -> NDArray[np.uint8]:
    return scratch_pixels("decoded", -(-height // scale), -(-width // scale))


def _decode_tiles(content: bytes, head: JpegHead, asked: Box, scale: int) -> NDArray[np.uint8] | None:
    """Decode the restart intervals around a box; None where there are none, or they are not what they should be."""
    tiles = read_tiles(content, head)
    if tiles is None:
        return None
    cut, shown = cut_tiles(content, head, tiles, asked, scale)
    try:
        pixels = decode_whole(cut, shown.height, shown.width, scale)
    except ValueError:
        return None  # Decoding all of it will say what is wrong.
    return _part(pixels, shown, asked, scale)


def _decode_rows(content: bytes, head: JpegHead, asked: Box, scale: int) -> NDArray[np.uint8] | None:
    """Decode the rows down to a box's last; None if that spares nothing, or if the data is not what it should be."""
    if not content.endswith(b"\xff\xd9"):
        return None  # Truncated, maybe below the box: decoding all of it will say so.
    cut, shown = cut_rows(content, head, asked, scale)
    if shown.height == head.height:
        return None
    try:
        pixels = decode_whole(cut, shown.height, shown.width, scale)
    except ValueError as error:
        if not _LEFT_OVER.fullmatch(str(error)):
            return None
        pixels = _destination(shown.height, shown.width, scale)
    return _part(pixels, shown, asked, scale)


def _part(pixels: NDArray[np.uint8], shown: Box, asked: Box, scale: int) -> NDArray[np.uint8]:
    top, left = (asked.top - shown.top) // scale, (asked.left - shown.left) // scale
    return pixels[top : top + asked.height // scale, left : left + asked.width // scale]
