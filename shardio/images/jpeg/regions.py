"""Cut a smaller JPEG out of a JPEG. It shows a part of the image, with the same pixels.

The smaller file consists of a frame header with another size, the tables, and the restart intervals that the part
touches. Without tiles, it contains the whole scan, but its frame ends below the part.

A pixel depends on its own blocks. Where chroma is subsampled, it also depends on the adjacent chroma samples, from
which libjpeg's "fancy" upsampling interpolates (libjpeg-turbo, jdsample.c). So a part is cut out with a margin of one
chroma sample. At the image's own borders, no margin is needed.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from shardio.images.jpeg.head import JpegHead
from shardio.images.jpeg.standard import APP0, APP14, DHT, DQT, DRI, EOI, SOI, SOS, marker_bytes
from shardio.images.jpeg.tile_table import Tiles, restart_codes

_KEPT = frozenset({APP0, APP14, DQT, DHT, DRI, SOS})
"""The segments that the smaller file keeps, besides the frame header. APP0 (JFIF) and APP14 (Adobe) determine the
colour space. All other metadata is left out."""

MIN_SCALED_SIDE = 8
"""In pixels. simplejpeg takes a minimal size, not a scale. For sides of at least this length, it implies the scale."""

_SIZE = struct.Struct(">HH")


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cut_tiles(content: bytes, head: JpegHead, tiles: Tiles, box: Box, scale: int) -> tuple[bytearray, Box]:
    """Return a JPEG of the restart intervals around ``box``, and the part of the image that it shows.

    Args:
        content: The tiled JPEG.
        head: Its head.
        tiles: The positions of its restart intervals.
        box: The part whose pixels must be exact.
        scale: The image will be decoded at 1/scale of its size: 1, 2, 4 or 8.
    """
    mcu_height, mcu_width = head.mcu_size
    margin, margin_down = _margin(head, scale)
    tile_width = tiles.interval * mcu_width
    # Chroma rows of one or two samples are upsampled by another rule (jdsample.c: downsampled_width > 2).
    min_width = 2 * margin + 1 if scale == 1 else max(2 * margin + 1, MIN_SCALED_SIDE)
    min_height = 1 if scale == 1 else MIN_SCALED_SIDE
    first_row, stop_row = _cover(box.top, box.height, mcu_height, head.height, margin_down, min_height)
    first, stop = _cover(box.left, box.width, tile_width, head.width, margin, min_width)
    top, left = first_row * mcu_height, first * tile_width
    bottom, right = min(stop_row * mcu_height, head.height), min(stop * tile_width, head.width)
    shown = Box(top, left, bottom - top, right - left)
    starts, stops = tiles.starts[first_row:stop_row, first:stop], tiles.stops[first_row:stop_row, first:stop]
    parts = write_head(content, head, shown.height, shown.width)
    view = memoryview(content)
    parts += [view[start:end] for start, end in zip(starts[:, 0].tolist(), stops[:, -1].tolist(), strict=True)]
    cut = bytearray().join(parts)
    # Each interval ends in its marker. The markers are renumbered, and the last one becomes EOI.
    ends = (stops - starts).cumsum()
    ends += len(cut) - ends[-1] - 1
    np.frombuffer(cut, np.uint8)[ends] = restart_codes(len(ends))
    cut[-1] = EOI
    return cut, shown


def cut_rows(content: bytes, head: JpegHead, box: Box, scale: int) -> tuple[bytes, Box]:
    """Return a JPEG whose frame ends below ``box``, and the part of the image that it shows.

    It keeps the whole scan, so data is left over after the last row.
    """
    mcu_height, _ = head.mcu_size
    _, stop_row = _cover(box.top, box.height, mcu_height, head.height, _margin(head, scale)[1], 1)
    height = min(stop_row * mcu_height, head.height)
    head_parts = write_head(content, head, height, head.width)
    return b"".join([*head_parts, memoryview(content)[head.scan_start :]]), Box(0, 0, height, head.width)


def _margin(head: JpegHead, scale: int) -> tuple[int, int]:
    """Return the size of one chroma sample in pixels, across and down; 0 in a direction that is not subsampled."""
    (across, down), (is_across, is_down) = head.sampling, head.is_subsampled
    return scale * across * is_across, scale * down * is_down


def _cover(start: int, length: int, unit: int, total: int, margin: int, min_length: int) -> tuple[int, int]:
    """Return the units of a row that cover a part of it.

    Args:
        start: Where the part begins.
        length: The length of the part.
        unit: The length of a unit; the last unit ends with the row.
        total: The length of the row.
        margin: How much to cover on both sides of the part, within the row.
        min_length: The minimal length of all units together, unless the row is shorter.

    Returns:
        The first unit, and the one after the last.
    """
    first = max(start - margin, 0) // unit
    stop = min(-(-(start + length + margin) // unit), -(-total // unit))
    while min(stop * unit, total) - first * unit < min_length and (first or stop * unit < total):
        first, stop = (first - 1, stop) if first else (first, stop + 1)
    return first, stop


def write_head(content: bytes, head: JpegHead, height: int, width: int) -> list[bytes | memoryview]:
    """Return the parts of a file's head for an image of another size."""
    parts: list[bytes | memoryview] = [marker_bytes(SOI)]
    for marker, start, stop in head.segments:
        if start == head.frame_start:
            parts += [content[start : start + 5], _SIZE.pack(height, width), content[start + 9 : stop]]
        elif marker in _KEPT:
            parts.append(content[start:stop])
    return parts
