"""Whether a JPEG that can be tiled can certainly be decoded, so that decoding it as a check is unnecessary.

:func:`tile_jpeg` reads every code of the scan, and refuses all scans that libjpeg would complain about. It does not use
what libjpeg needs besides: quantisation tables, and the segments that decide how to convert colours. libjpeg refuses
some of them, and warns of others, which takes a second look (:mod:`shardio.images.jpeg.verdict`). The conditions here
are those under which it does neither. Other files may or may not be decodable.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardio.images.jpeg.head import JpegHead, Segment, read_head
from shardio.images.jpeg.standard import APP0, APP2, APP14, DQT, ICC_SIGNATURE, MAX_TABLE_ID, USUAL_FACTORS

_MAX_SIDE = 65500  # libjpeg's JPEG_MAX_DIMENSION

_JFIF, _JFIF_MAJOR = b"JFIF\0", 5
_ADOBE, _ADOBE_TRANSFORM = b"Adobe", 11
"""The beginnings of segments, and the offsets of the fields that libjpeg checks (jdmarker.c, jdapimin.c)."""


def decodes_if_tileable(content: bytes, *, max_pixels: int) -> bool:
    """Return whether :func:`shardio.images.decode_image` surely decodes a JPEG, provided that it can be tiled.

    Args:
        content: A JPEG that :func:`tile_jpeg` has tiled without an error.
        max_pixels: The largest permitted number of pixels.
    """
    head = read_head(content)
    if not (max(head.height, head.width) <= _MAX_SIDE and head.height * head.width <= max_pixels):
        return False
    ids, quantisers = _read_components(content, head)
    if len(set(ids)) < len(ids) or (len(ids) > 1 and head.factors not in USUAL_FACTORS):
        return False
    return quantisers <= _read_quantiser_ids(content, head) and _has_known_colours(content, head)


def _read_components(content: bytes, head: JpegHead) -> tuple[bytes, set[int]]:
    """Return the identifiers of the components, and the quantisation tables that they use (B.2.2)."""
    first = head.frame_start + 10
    stop = first + 3 * len(head.factors)
    return content[first:stop:3], set(content[first + 2 : stop : 3])


def _read_quantiser_ids(content: bytes, head: JpegHead) -> set[int]:
    """Return the quantisation tables that the file defines; none if a segment is damaged (B.2.4.1)."""
    ids = set[int]()
    for segment in _find_segments(head, DQT):
        offset = segment.payload_start
        while offset < segment.stop:
            precision, table_id = content[offset] >> 4, content[offset] & 15
            offset += 1 + 64 * (1 + precision)
            if precision > 1 or table_id > MAX_TABLE_ID or offset > segment.stop:
                return set()
            ids.add(table_id)
    return ids


def _has_known_colours(content: bytes, head: JpegHead) -> bool:
    """Return whether the segments that say something about colours are such as libjpeg knows."""
    for segment in _find_segments(head, APP0, APP14):
        payload = content[segment.payload_start : segment.stop]
        if payload.startswith(_JFIF) and payload[_JFIF_MAJOR : _JFIF_MAJOR + 1] != b"\1":
            return False
        if payload.startswith(_ADOBE) and payload[_ADOBE_TRANSFORM : _ADOBE_TRANSFORM + 1] not in (b"\0", b"\1"):
            return False
    return has_whole_profile(content, head)


def has_whole_profile(content: bytes, head: JpegHead) -> bool:
    """Return whether a JPEG's colour profile is complete, or missing altogether. libjpeg warns of others."""
    start = len(ICC_SIGNATURE)
    parts = [
        content[segment.payload_start + start : segment.stop]
        for segment in _find_segments(head, APP2)
        if content.startswith(ICC_SIGNATURE, segment.payload_start)
    ]
    # Each part begins with its number, from 1, and the number of parts (ICC.1:2022, B.4).
    numbers = [bytes([i, len(parts)]) for i in range(1, len(parts) + 1)] if len(parts) < 256 else []
    return sorted(part[:2] for part in parts) == numbers and (not parts or any(len(part) > 2 for part in parts))


def _find_segments(head: JpegHead, *markers: int) -> Iterator[Segment]:
    return (segment for segment in head.segments if segment.marker in markers)
