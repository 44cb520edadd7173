"""The rule by which a JPEG is damaged or not: one verdict for a file, whatever the decoder and the crop.

libjpeg-turbo warns of what it ignores, guesses or makes up, and goes on. Pillow and OpenCV show the pixels whatever the
warning. A warning is harmless if no pixel depends on what was wrong:

=========================  ===========================================================================================
damage to metadata         an incomplete ICC profile; a JFIF version other than 1; an unknown colour transform of
                           Adobe's, for which libjpeg takes YCbCr; spectral parameters that a sequential scan ignores
padding                    bytes before a restart marker or the end-of-image marker that no code needed: at most
                           three, which encoders write to align data to 16 or 32 bits, or one byte repeated. libjpeg
                           counts only what its bit buffer does not hold already
damage to pixels           everything else: data that ends early, unknown codes, wrong restart markers, scans in an
                           impossible order, and other bytes that no code needed. Those are what a flipped bit leaves
                           behind: the codes after it mean something else, and end before the data does
=========================  ===========================================================================================

libjpeg-turbo reports only its first warning. So the file is decoded again without what a warning may be harmless for.
"""

from __future__ import annotations

import re

import simplejpeg

from shardio.images.jpeg.head import JpegHead, why_irregular
from shardio.images.jpeg.regions import write_head
from shardio.images.jpeg.standard import APP0, APP14, DRI, EOI, RST0, SOF0, SOF1, SOS, marker_bytes

MAX_ALIGNMENT = 3
"""The maximum number of bytes of any value that count as padding."""

_SURPLUS = re.compile(r"Corrupt JPEG data: ([0-9]+) extraneous bytes before marker 0x(d[0-9])")
_DAMAGE = re.compile(r"Corrupt JPEG data|Premature end|Invalid|Inconsistent")
_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)

_MAX_SIDE = 65500  # libjpeg's JPEG_MAX_DIMENSION

_PAYLOAD = 4
_JFIF, _JFIF_MAJOR = b"JFIF\0", 5
_ADOBE, _ADOBE_TRANSFORM = b"Adobe", 11
_YCC, _YCCK = 1, 2
"""Where contents of segments begin, their first bytes, and offsets and values of fields (jdmarker.c, jdapimin.c)."""


def write_harmless(content: bytes, head: JpegHead) -> bytes | None:
    """Return a JPEG with the same pixels as one that libjpeg-turbo complained about; None if its pixels are damaged.

    libjpeg-turbo may still warn of padding, but of nothing else: read it without regard to warnings.
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
    # Nothing follows the end-of-image marker, so there is no other warning.
    end = _find_end(content, head.scan_start) if int(surplus[2], 16) == EOI else None
    return end is not None and _is_padding(content[head.scan_start : end], int(surplus[1]))


def refuse_damage(content: bytes, head: JpegHead) -> None:
    """Raise ValueError if the pixels of a CMYK JPEG are damaged. The pixels themselves are made by Pillow.

    Pillow ignores libjpeg's warnings.
    """
    why = _complain(content, len(head.factors))
    if why is not None and _DAMAGE.match(why) and write_harmless(content, head) is None:
        raise ValueError(why)


def _complain(content: bytes, num_components: int) -> str | None:
    """Return libjpeg-turbo's error or first warning of a JPEG, or None."""
    try:
        simplejpeg.decode_jpeg(content, "CMYK" if num_components == 4 else "RGB")
    except ValueError as error:
        return str(error)
    return None


def _write_clean_head(content: bytes, head: JpegHead, height: int, width: int, *, left_out: int | None = None) -> bytes:
    """Return a head without metadata, and with the values that libjpeg takes instead of those that it warns of."""
    parts = map(bytes, write_head(content, head, height, width))
    return b"".join(_mend(part, head) for part in parts if part[1] != left_out)


def _mend(segment: bytes, head: JpegHead) -> bytes:
    mended = bytearray(segment)
    if segment[1] == APP0 and segment.startswith(_JFIF, _PAYLOAD):
        mended[_PAYLOAD + _JFIF_MAJOR] = 1
    if segment[1] == APP14 and segment.startswith(_ADOBE, _PAYLOAD) and len(segment) > _PAYLOAD + _ADOBE_TRANSFORM:
        assumed = _YCCK if len(head.factors) == 4 else _YCC
        if segment[_PAYLOAD + _ADOBE_TRANSFORM] not in (0, assumed):
            mended[_PAYLOAD + _ADOBE_TRANSFORM] = assumed
    if segment[1] == SOS and head.process in (SOF0, SOF1):
        mended[-3:] = b"\x00\x3f\x00"
    return bytes(mended)


def _find_end(content: bytes, start: int) -> int | None:
    """Return where the marker begins that ends an image, given where its first scan does; None without one."""
    while (found := _MARKER.search(content, start)) is not None:
        marker = found[1][0]
        if marker == EOI:
            return found.start()
        start = found.end()
        if not RST0 <= marker < RST0 + 8:
            start += int.from_bytes(content[start : start + 2])
    return None


def _is_padding(data: bytes, num_surplus: int) -> bool:
    """Return whether the last bytes of a scan or an interval, which no code needed, are padding."""
    surplus = data.replace(b"\xff\0", b"\xff")[-num_surplus:]  # A stuffed zero may count or not.
    return num_surplus <= MAX_ALIGNMENT or len(set(surplus)) == 1 or set(data[-num_surplus:]) == {0xFF, 0}


def _has_padded_intervals(content: bytes, head: JpegHead) -> bool:
    """Return whether each restart interval can be decoded alone, with nothing left over but padding.

    An interval becomes an image of a single row of MCUs, or of as many rows as make its sides short enough.
    """
    interval, (rows, row_mcus), (height, width) = head.restart_interval, head.num_mcus, head.mcu_size
    num_mcus, start, heads = rows * row_mcus, head.scan_start, dict[int, bytes]()
    for number, first in enumerate(range(0, num_mcus, interval)):
        length = min(interval, num_mcus - first)
        stop, is_last = _MARKER.search(content, start), first + length == num_mcus
        if stop is None or stop[1][0] != (EOI if is_last else RST0 + number % 8):
            return False
        if length not in heads:
            num_rows = next(n for n in range(1, length + 1) if length % n == 0 and length // n * width <= _MAX_SIDE)
            if num_rows * height > _MAX_SIDE:
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
