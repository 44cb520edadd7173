r"""Locate the tiles of a JPEG, cut a smaller JPEG out of it, and tell damaged JPEGs from intact ones.

A tile table locates the restart intervals of a tiled JPEG. The table fills one or more APP9 segments, big-endian like
the rest of a JPEG. Each segment holds

    8 bytes   b"shardio\0"
    uint8     version, 1
    uint8     index of this part, from 0
    uint8     number of parts

followed by its part of the table. The parts, joined end to end, are

    uint16    height of the image in pixels
    uint16    width of the image in pixels
    uint16    restart interval in MCUs, which divides the number of MCUs in a row
    uint8     size in bytes of each length below: 2 or 4
    uint32    length of the scan in bytes, from the end of its header to the EOI marker
    uint16 or uint32 for each interval: the length of its entropy-coded data in bytes, without the next marker

Other decoders skip these segments. Other tools may copy the segments when they rewrite the image, so the table is used
only if all of it matches the file: the sizes, the restart interval, and the marker at the end of every interval.
Entropy-coded data never contains such a marker, so a table that matches is correct.

The smaller JPEG consists of a frame header with a different size, the tables, and the restart intervals that overlap
the requested part. If the original has no tiles, the smaller JPEG contains the whole scan, but its frame ends below the
part.

A pixel depends on the blocks that contain it. Where chroma is subsampled, it also depends on the adjacent chroma
samples, from which libjpeg's "fancy" upsampling interpolates (libjpeg-turbo, jdsample.c). So a part is cut out with a
margin of one chroma sample. At the image's own borders, no margin is needed.

libjpeg-turbo warns about data that it ignores, guesses or makes up, and continues. Pillow and OpenCV ignore all
warnings. A warning is harmless if no pixel depends on the damage:

=========================  ===========================================================================================
damage to metadata         an incomplete ICC profile; a JFIF version other than 1; an unknown Adobe color
                           transform, which libjpeg treats as YCbCr; spectral parameters that a sequential scan ignores
padding                    bytes that no code needs, before a restart marker or the end-of-image marker: either at
                           most three, which encoders write to align data to 16 or 32 bits, or repetitions of a
                           single byte. libjpeg counts only bytes that its bit buffer does not already hold
damage to pixels           everything else: data that ends early, unknown codes, wrong restart markers, scans in an
                           impossible order, and other bytes that no code needs. A flipped bit leaves such bytes if it
                           changes the meaning of the codes after it, and they end before the data does
=========================  ===========================================================================================

libjpeg-turbo reports only its first warning, so the file is decoded again without the parts whose damage is harmless.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.head import (
    APP0,
    APP9,
    APP14,
    DHT,
    DQT,
    DRI,
    EOI,
    MAX_SEGMENT_LENGTH,
    RST0,
    SOF0,
    SOF1,
    SOI,
    SOS,
    JpegHead,
    Segment,
    marker_bytes,
    read_head,
    why_irregular,
)

_KEPT = frozenset({APP0, APP14, DQT, DHT, DRI, SOS})
"""The segments that the smaller JPEG keeps in addition to the frame header. APP0 (JFIF) and APP14 (Adobe) determine the
color space. All other metadata is left out."""

_SIZE = struct.Struct(">HH")

MAX_ALIGNMENT = 3
"""The maximum number of surplus bytes that are treated as padding regardless of their values."""

_SURPLUS = re.compile(r"Corrupt JPEG data: ([0-9]+) extraneous bytes before marker 0x(d[0-9])")

_DAMAGE = re.compile(r"Corrupt JPEG data|Premature end|Invalid|Inconsistent")

_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)

MAX_SIDE = 65500  # libjpeg's JPEG_MAX_DIMENSION

JFIF, JFIF_MAJOR = b"JFIF\0", 5
ADOBE, ADOBE_TRANSFORM = b"Adobe", 11
"""The first bytes of the contents of segments, and the offsets of fields that libjpeg checks (jdmarker.c,
jdapimin.c)."""

_PAYLOAD = 4
"""The offset of a segment's contents."""

_YCC, _YCCK = 1, 2
"""Values of Adobe's color transform."""


SIGNATURE = b"shardio\0"
VERSION = 1

_PART = struct.Struct(">8sBBB")
_FIXED = struct.Struct(">HHHBI")
_MAX_PART_LENGTH = MAX_SEGMENT_LENGTH - 2 - _PART.size
_MAX_PARTS = 255


class Tiles(NamedTuple):
    """The positions of an image's restart intervals in its file.

    Attributes:
        interval: The number of MCUs in each interval.
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
        width: The width of the image in pixels.
        interval: The number of MCUs between restart markers.
        lengths: int64 [intervals], the number of bytes of each interval without its marker.

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
    """Return whether a segment is part of a tile table, of any version."""
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


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def has_tiles(content: bytes) -> bool:
    """Return whether a JPEG has a tile table that matches it."""
    if not _may_have_tiles(content):  # This quick check excludes nearly all JPEGs.
        return False
    try:
        return read_tiles(content, read_head(content)) is not None
    except ValueError:
        return False


def _may_have_tiles(content: bytes) -> bool:
    """Return whether a segment before the first scan begins like a tile table; True if the segments are unusual."""
    offset = 2
    while content[offset : offset + 1] == b"\xff" and offset + 4 <= len(content):
        marker = content[offset + 1]
        if marker == SOS:
            return False
        if marker == APP9 and content.startswith(SIGNATURE, offset + 4):
            return True
        offset += 2 + int.from_bytes(content[offset + 2 : offset + 4], "big")
    return SIGNATURE in content


def cut_tiles(content: bytes, head: JpegHead, tiles: Tiles, box: Box) -> tuple[bytearray, Box]:
    """Return a JPEG with only the restart intervals that contain ``box``, and the part of the image that it shows.

    Args:
        content: The tiled JPEG.
        head: The head of the JPEG.
        tiles: The positions of its restart intervals.
        box: The part whose pixels must be exact.
    """
    mcu_height, mcu_width = head.mcu_size
    margin, margin_down = _margin(head)
    tile_width = tiles.interval * mcu_width
    # Chroma rows of one or two samples are upsampled by a different rule (jdsample.c: downsampled_width > 2).
    first_row, stop_row = _cover(box.top, box.height, mcu_height, head.height, margin_down, 1)
    first, stop = _cover(box.left, box.width, tile_width, head.width, margin, 2 * margin + 1)
    top, left = first_row * mcu_height, first * tile_width
    bottom, right = min(stop_row * mcu_height, head.height), min(stop * tile_width, head.width)
    shown = Box(top, left, bottom - top, right - left)
    starts, stops = tiles.starts[first_row:stop_row, first:stop], tiles.stops[first_row:stop_row, first:stop]
    parts = write_head(content, head, shown.height, shown.width)
    view = memoryview(content)
    parts += [view[start:end] for start, end in zip(starts[:, 0].tolist(), stops[:, -1].tolist(), strict=True)]
    cut = bytearray().join(parts)
    # Each interval ends with its marker. The markers are renumbered, and the last marker becomes EOI.
    ends = (stops - starts).cumsum()
    ends += len(cut) - ends[-1] - 1
    np.frombuffer(cut, np.uint8)[ends] = restart_codes(len(ends))
    cut[-1] = EOI
    return cut, shown


def cut_rows(content: bytes, head: JpegHead, box: Box) -> tuple[bytes, Box]:
    """Return a JPEG whose frame ends below ``box``, and the part of the image that it shows.

    The JPEG keeps the whole scan, so it still contains the data of the rows below its frame.
    """
    mcu_height, _ = head.mcu_size
    _, stop_row = _cover(box.top, box.height, mcu_height, head.height, _margin(head)[1], 1)
    height = min(stop_row * mcu_height, head.height)
    head_parts = write_head(content, head, height, head.width)
    return b"".join([*head_parts, memoryview(content)[head.scan_start :]]), Box(0, 0, height, head.width)


def _margin(head: JpegHead) -> tuple[int, int]:
    """Return the width and height of a chroma sample in pixels; 0 in a direction without subsampling."""
    (across, down), (is_across, is_down) = head.sampling, head.is_subsampled
    return across * is_across, down * is_down


def _cover(start: int, length: int, unit: int, total: int, margin: int, min_length: int) -> tuple[int, int]:
    """Return the units that cover a part of a row.

    Args:
        start: The beginning of the part.
        length: The length of the part.
        unit: The length of a unit; the last unit ends with the row.
        total: The length of the row.
        margin: The additional length to cover on both sides of the part, within the row.
        min_length: The minimum length of all units together, unless the row is shorter.

    Returns:
        The index of the first unit, and the index after the last unit.
    """
    first = max(start - margin, 0) // unit
    stop = min(-(-(start + length + margin) // unit), -(-total // unit))
    while min(stop * unit, total) - first * unit < min_length and (first or stop * unit < total):
        first, stop = (first - 1, stop) if first else (first, stop + 1)
    return first, stop


def write_head(content: bytes, head: JpegHead, height: int, width: int) -> list[bytes | memoryview]:
    """Return the parts of a head for an image of a different size."""
    parts: list[bytes | memoryview] = [marker_bytes(SOI)]
    for marker, start, stop in head.segments:
        if start == head.frame_start:
            parts += [content[start : start + 5], _SIZE.pack(height, width), content[start + 9 : stop]]
        elif marker in _KEPT:
            parts.append(content[start:stop])
    return parts


def write_harmless(content: bytes, head: JpegHead) -> bytes | None:
    """Rewrite a JPEG about which libjpeg-turbo warns, without changing its pixels; return None if they are damaged.

    libjpeg-turbo may still warn about padding, but about nothing else, so ignore warnings when reading the result.
    """
    clean = _write_clean_head(content, head, head.height, head.width) + content[head.scan_start :]
    return clean if _is_harmless(clean, content, head) else None


def _is_harmless(clean: bytes, content: bytes, head: JpegHead) -> bool:
    why = _complain(clean, len(head.factors))
    if why is None:
        return True
    surplus = _SURPLUS.fullmatch(why)
    if surplus is None:
        return False
    if why_irregular(head) is None and head.restart_interval:
        return _has_padded_intervals(content, head)
    # The end-of-image marker comes last, so a warning about bytes before this marker is the only warning.
    end = _find_end(content, head.scan_start) if int(surplus[2], 16) == EOI else None
    return end is not None and _is_padding(content[head.scan_start : end], int(surplus[1]))


def refuse_damage(content: bytes, head: JpegHead) -> None:
    """Raise ValueError if the pixels of a CMYK JPEG are damaged.

    Pillow, which decodes such files, ignores libjpeg's warnings.
    """
    why = _complain(content, len(head.factors))
    if why is not None and _DAMAGE.match(why) and write_harmless(content, head) is None:
        raise ValueError(why)


def _complain(content: bytes, num_components: int) -> str | None:
    import simplejpeg  # Imported here, because copying files needs no decoder.

    try:
        simplejpeg.decode_jpeg(content, "CMYK" if num_components == 4 else "RGB")
    except ValueError as error:
        return str(error)
    return None


def _write_clean_head(content: bytes, head: JpegHead, height: int, width: int, *, left_out: int | None = None) -> bytes:
    """Return a head without metadata, in which libjpeg's assumptions replace the values that it warns about."""
    parts = map(bytes, write_head(content, head, height, width))
    return b"".join(_mend(part, head) for part in parts if part[1] != left_out)


def _mend(segment: bytes, head: JpegHead) -> bytes:
    mended = bytearray(segment)
    if segment[1] == APP0 and segment.startswith(JFIF, _PAYLOAD):
        mended[_PAYLOAD + JFIF_MAJOR] = 1
    if segment[1] == APP14 and segment.startswith(ADOBE, _PAYLOAD) and len(segment) > _PAYLOAD + ADOBE_TRANSFORM:
        assumed = _YCCK if len(head.factors) == 4 else _YCC
        if segment[_PAYLOAD + ADOBE_TRANSFORM] not in (0, assumed):
            mended[_PAYLOAD + ADOBE_TRANSFORM] = assumed
    if segment[1] == SOS and head.process in (SOF0, SOF1):
        mended[-3:] = b"\x00\x3f\x00"
    return bytes(mended)


def _find_end(content: bytes, start: int) -> int | None:
    """Return the offset of the end-of-image marker, or None if there is none.

    Args:
        content: The file.
        start: The offset of the first scan.
    """
    while (found := _MARKER.search(content, start)) is not None:
        marker = found[1][0]
        if marker == EOI:
            return found.start()
        start = found.end()
        if not RST0 <= marker < RST0 + 8:
            start += int.from_bytes(content[start : start + 2], "big")
    return None


def _is_padding(data: bytes, num_surplus: int) -> bool:
    surplus = data.replace(b"\xff\0", b"\xff")[-num_surplus:]  # libjpeg may or may not count a stuffed zero.
    return num_surplus <= MAX_ALIGNMENT or len(set(surplus)) == 1 or set(data[-num_surplus:]) == {0xFF, 0}


def _has_padded_intervals(content: bytes, head: JpegHead) -> bool:
    """Return whether each restart interval can be decoded separately, with only padding left over.

    Each interval is decoded as an image with a single row of MCUs, or with more rows if a single row is too long for a
    JPEG.
    """
    interval, (rows, row_mcus), (height, width) = head.restart_interval, head.num_mcus, head.mcu_size
    num_mcus, start, heads = rows * row_mcus, head.scan_start, dict[int, bytes]()
    for number, first in enumerate(range(0, num_mcus, interval)):
        length = min(interval, num_mcus - first)
        stop, is_last = _MARKER.search(content, start), first + length == num_mcus
        if stop is None or stop[1][0] != (EOI if is_last else RST0 + number % 8):
            return False
        if length not in heads:
            num_rows = next(n for n in range(1, length + 1) if length % n == 0 and length // n * width <= MAX_SIDE)
            if num_rows * height > MAX_SIDE:
                return False
            size = num_rows * height, length // num_rows * width
            heads[length] = _write_clean_head(content, head, *size, left_out=DRI)
        data = content[start : stop.start()]
        why = _complain(heads[length] + data + marker_bytes(EOI), len(head.factors))
        surplus = None if why is None else _SURPLUS.fullmatch(why)
        if why is not None and (surplus is None or not _is_padding(data, int(surplus[1]))):
            return False
        start = stop.end()
    return True
