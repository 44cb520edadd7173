"""From a JPEG and a part of its picture to a smaller JPEG that holds the part, with the same pixels.

The smaller file is the frame with another size, the tables, and those restart intervals that the part touches; or,
without tiles, the same scan under a frame that ends below the part.

What a pixel depends on: its own blocks, and where chroma is subsampled also the chroma samples beside them, by
which libjpeg's "fancy" upsampling interpolates (libjpeg-turbo, jdsample.c). So a part is taken with a margin of one
chroma sample; at the picture's own borders nothing is beyond, in the part as in the whole.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from shardio.images.jpeg.markers import APP0, APP14, DHT, DQT, DRI, EOI, SOI, SOS, JpegHead
from shardio.images.jpeg.tile_table import Tiles, restart_codes

_KEPT = frozenset({APP0, APP14, DQT, DHT, DRI, SOS})
"""Beside the frame header: APP0 (JFIF) and APP14 (Adobe) decide the colour space, all other metadata is left out."""

MIN_SCALED_SIDE = 8
"""Pixels. libjpeg is told a scale by the size that it leads to, which is clear if one side is at least this long."""

_SOI = bytes([0xFF, SOI])
_SIZE = struct.Struct(">HH")


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cut_tiles(content: bytes, head: JpegHead, tiles: Tiles, box: Box, scale: int) -> tuple[bytearray, Box]:
    """Return a JPEG of the restart intervals around ``box``, and which part of the picture it shows.

    Args:
        content: The tiled JPEG.
        head: Its head.
        tiles: Its intervals.
        box: The part that must come out right.
        scale: The picture will be decoded at 1/scale of its size: 1, 2, 4 or 8.
    """
    mcu_height, mcu_width = head.mcu_size
    margin, margin_down = _margin(head, scale)
    tile_width = tiles.interval * mcu_width
    # Chroma of at most two samples a row is upsampled by another rule (jdsample.c: downsampled_width > 2).
    narrowest = 2 * margin + 1 if scale == 1 else max(2 * margin + 1, MIN_SCALED_SIDE)
    lowest = 1 if scale == 1 else MIN_SCALED_SIDE
    first_row, stop_row = _cover(box.top, box.height, mcu_height, head.height, margin_down, lowest)
    first, stop = _cover(box.left, box.width, tile_width, head.width, margin, narrowest)
    top, left = first_row * mcu_height, first * tile_width
    bottom, right = min(stop_row * mcu_height, head.height), min(stop * tile_width, head.width)
    shown = Box(top, left, bottom - top, right - left)
    starts, stops = tiles.starts[first_row:stop_row, first:stop], tiles.stops[first_row:stop_row, first:stop]
    parts = _write_head(content, head, shown.height, shown.width)
    view = memoryview(content)
    parts += [view[start:end] for start, end in zip(starts[:, 0].tolist(), stops[:, -1].tolist(), strict=True)]
    cut = bytearray().join(parts)
    # Behind each interval stands its marker; they are numbered anew, and the last one becomes EOI.
    ends = (stops - starts).cumsum()
    ends += len(cut) - ends[-1] - 1
    np.frombuffer(cut, np.uint8)[ends] = restart_codes(len(ends))
    cut[-1] = EOI
    return cut, shown


def cut_rows(content: bytes, head: JpegHead, box: Box, scale: int) -> tuple[bytes, Box]:
    """Return a JPEG whose frame ends below ``box``, and which part of the picture it shows.

    The scan stays whole: what follows the last row's data is left over.
    """
    mcu_height, _ = head.mcu_size
    _, stop_row = _cover(box.top, box.height, mcu_height, head.height, _margin(head, scale)[1], 1)
    height = min(stop_row * mcu_height, head.height)
    head_parts = _write_head(content, head, height, head.width)
    return b"".join([*head_parts, memoryview(content)[head.scan_start :]]), Box(0, 0, height, head.width)


def _margin(head: JpegHead, scale: int) -> tuple[int, int]:
    """Return the size of one chroma sample in pixels, across and down; 0 where chroma is not subsampled."""
    (across, down), (is_across, is_down) = head.sampling, head.is_subsampled
    return scale * across * is_across, scale * down * is_down


def _cover(start: int, length: int, unit: int, total: int, margin: int, least: int) -> tuple[int, int]:
    """Return which units of a row cover a stretch.

    Args:
        start: Where the stretch begins.
        length: Its length.
        unit: The length of a unit; the last one ends where the row does.
        total: The length of the row.
        margin: What is to be covered on both sides of the stretch, too, as far as the row goes.
        least: The units are to be this long together, as far as the row goes.

    Returns:
        The first unit, and the one after the last.
    """
    first = max(start - margin, 0) // unit
    stop = min(-(-(start + length + margin) // unit), -(-total // unit))
    while min(stop * unit, total) - first * unit < least and (first or stop * unit < total):
        first, stop = (first - 1, stop) if first else (first, stop + 1)
    return first, stop


def _write_head(content: bytes, head: JpegHead, height: int, width: int) -> list[bytes | memoryview]:
    """Return the parts of a file's head for a picture of another size."""
    parts: list[bytes | memoryview] = [_SOI]
    for marker, start, stop in head.segments:
        if start == head.frame_start:
            parts += [content[start : start + 5], _SIZE.pack(height, width), content[start + 9 : stop]]
        elif marker in _KEPT:
            parts.append(content[start:stop])
    return parts
