r"""The tile table, which locates the restart intervals of a tiled JPEG, in application segments.

The table fills one or more APP9 segments, big-endian like the rest of a JPEG. Each segment holds

    8 bytes   b"shardio\0"
    uint8     version, 1
    uint8     index of this part, from 0
    uint8     number of parts

followed by its part of the table. The parts, joined end to end, are

    uint16    height of the image in pixels
    uint16    width
    uint16    restart interval in MCUs; it divides the MCU row
    uint8     bytes of each length below, 2 or 4
    uint32    bytes of the scan, from the end of its header to the EOI marker
    uint16 or uint32 for each interval: the bytes of its entropy-coded data, without the marker that follows it

Other decoders skip the segment. Other tools may copy it when they rewrite the image, so it is used only if all of
it matches the file: the sizes, the restart interval, and the marker at the end of every interval. Entropy-coded data
never contains such a marker, so a table that matches is correct.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.head import JpegHead, Segment
from shardio.images.jpeg.standard import APP9, EOI, MAX_SEGMENT_LENGTH, RST0, marker_bytes

SIGNATURE = b"shardio\0"
VERSION = 1

_PART = struct.Struct(">8sBBB")
_FIXED = struct.Struct(">HHHBI")
_MAX_PART_LENGTH = MAX_SEGMENT_LENGTH - 2 - _PART.size
_MAX_PARTS = 255


class Tiles(NamedTuple):
    """The positions of an image's restart intervals in its file.

    Attributes:
        interval: The number of MCUs in each.
        starts: int64 [MCU rows, intervals per row], the first byte of each interval.
        stops: int64 [MCU rows, intervals per row], the end of the marker that follows each interval.
    """

    interval: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def dump_tile_table(height: int, width: int, interval: int, lengths: NDArray[np.int64]) -> bytes:
    """Return the segments that contain the tile table of an image.

    Args:
        height: The height of the image in pixels.
        width: Its width.
        interval: MCUs between restart markers.
        lengths: int64 [intervals], the bytes of each interval without its marker.

    Raises:
        ValueError: If there are too many intervals.
    """
    num_bytes = 2 if lengths.max() < 2**16 else 4
    scan_length = int(lengths.sum()) + 2 * (len(lengths) - 1)
    table = _FIXED.pack(height, width, interval, num_bytes, scan_length) + lengths.astype(f">u{num_bytes}").tobytes()
    parts = [table[i : i + _MAX_PART_LENGTH] for i in range(0, len(table), _MAX_PART_LENGTH)]
    if len(parts) > _MAX_PARTS:
        raise ValueError(f"a tile table of {len(lengths)} intervals does not fit into {_MAX_PARTS} segments")
    return b"".join(
        marker_bytes(APP9)
        + struct.pack(">H", 2 + _PART.size + len(part))
        + _PART.pack(SIGNATURE, VERSION, i, len(parts))
        + part
        for i, part in enumerate(parts)
    )


def is_tile_table(content: bytes, segment: Segment) -> bool:
    """Return whether a segment is a part of a tile table, of any version."""
    return segment.marker == APP9 and content.startswith(SIGNATURE, segment.payload_start)


def read_tiles(content: bytes, head: JpegHead) -> Tiles | None:
    """Return the positions of an image's intervals, or None if it has no tile table that matches the file."""
    table = _join_parts(content, head.segments)
    if table is None or len(table) < _FIXED.size:
        return None
    height, width, interval, num_bytes, scan_length = _FIXED.unpack_from(table)
    rows, row_mcus = head.num_mcus
    if (height, width, interval) != (head.height, head.width, head.restart_interval):
        return None
    if not interval or row_mcus % interval or num_bytes not in (2, 4):
        return None
    columns = row_mcus // interval
    num_intervals = rows * columns
    if not num_intervals or len(table) != _FIXED.size + num_intervals * num_bytes:
        return None
    bounds = np.zeros(num_intervals + 1, np.int64)
    np.frombuffer(table, f">u{num_bytes}", offset=_FIXED.size).cumsum(out=bounds[1:])
    bounds += _marker_offsets(num_intervals)
    bounds += head.scan_start
    starts, stops = bounds[:-1], bounds[1:]
    if stops[-1] != head.scan_start + scan_length + 2 or stops[-1] > len(content):
        return None
    data = np.frombuffer(content, np.uint8)
    last = stops - 1
    if data.take(last).tobytes() != _marker_codes(num_intervals):
        return None
    if data.take(last - 1).tobytes().count(0xFF) != num_intervals:
        return None
    return Tiles(interval, starts.reshape(rows, columns), stops.reshape(rows, columns))


@lru_cache(maxsize=256)
def restart_codes(num_markers: int) -> NDArray[np.uint8]:
    """Return the second bytes of the first restart markers of a scan, uint8 [num_markers]: RST0 … RST7 in rotation."""
    return (RST0 + np.arange(num_markers) % 8).astype(np.uint8)


@lru_cache(maxsize=256)
def _marker_codes(num_intervals: int) -> bytes:
    """Return the second bytes of the markers that follow the intervals of a complete scan."""
    return restart_codes(num_intervals - 1).tobytes() + bytes([EOI])


@lru_cache(maxsize=256)
def _marker_offsets(num_intervals: int) -> NDArray[np.int64]:
    """Return how many bytes of markers precede each interval and the end of the scan, int64 [intervals + 1]."""
    return 2 * np.arange(num_intervals + 1)


def _join_parts(content: bytes, segments: list[Segment]) -> bytes | None:
    parts = list[bytes]()
    num_parts = 0
    for segment in segments:
        if segment.marker != APP9 or not is_tile_table(content, segment):
            continue
        start = segment.payload_start
        if segment.stop < start + _PART.size:
            return None
        _, version, part_index, num_parts = _PART.unpack_from(content, start)
        if version != VERSION or part_index != len(parts):
            return None
        parts.append(content[start + _PART.size : segment.stop])
    return b"".join(parts) if parts and len(parts) == num_parts else None
