"""Cut a smaller JPEG out of a JPEG, and tell damaged JPEGs from intact ones.

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
                           impossible order, and other bytes that no code needs. A flipped bit has this effect if the
                           codes after it change their meaning, and end before the data does
=========================  ===========================================================================================

libjpeg-turbo reports only its first warning, so the file is decoded again without the parts whose damage is harmless.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np

from shardio.images.jpeg.head import JpegHead, read_head, why_irregular
from shardio.images.jpeg.standard import APP0, APP9, APP14, DHT, DQT, DRI, EOI, RST0, SOF0, SOF1, SOI, SOS, marker_bytes
from shardio.images.jpeg.tile_table import SIGNATURE, Tiles, read_tiles, restart_codes

_KEPT = frozenset({APP0, APP14, DQT, DHT, DRI, SOS})
"""The segments that the smaller JPEG keeps in addition to the frame header. APP0 (JFIF) and APP14 (Adobe) determine the
color space. All other metadata is left out."""

_SIZE = struct.Struct(">HH")

MAX_ALIGNMENT = 3
"""The maximum number of surplus bytes that count as padding regardless of their values."""

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
    """Return a JPEG of the restart intervals that contain ``box``, and the part of the image that it shows.

    Args:
        content: The tiled JPEG.
        head: Its head.
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

    The JPEG keeps the whole scan, so some data follows that of the last row.
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
    """Return whether the surplus bytes at the end of a scan or an interval are padding."""
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
