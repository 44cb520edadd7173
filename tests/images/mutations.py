"""Random damage to image files, and the small files to damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from shardio.images.jpeg.tile_table import SIGNATURE
from shardio.images.tiling import tile_jpeg
from tests.images.jpeg_files import GRAY, SAMPLINGS, by_pillow, exif_with_thumbnail, make_jpeg, noise, segments_of
from tests.images.pictures import exif_of, make_picture, save

INTERESTING = (0x00, 0x01, 0x02, 0x7F, 0x80, 0xC0, 0xC2, 0xC4, *range(0xD0, 0xDE), 0xE0, 0xE9, 0xEE, 0xFE, 0xFF)
"""Bytes that have a meaning in a JPEG, or lie at the ends of a range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """An undamaged file, and where its parts lie.

    Args:
        content: The file.
        segments: The starts and ends of the segments of a JPEG up to its first scan's header.
        tables: Those of the segments that are parts of a tile table.
    """

    content: bytes
    segments: tuple[tuple[int, int], ...] = ()
    tables: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of_jpeg(content: bytes) -> Original:
        """Return a JPEG and its parts."""
        segments = tuple((start, end) for _, start, end in segments_of(content))
        tables = tuple((start, end) for start, end in segments if content.startswith(SIGNATURE, start + 4))
        return Original(content=content, segments=segments, tables=tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class Originals:
    """Small undamaged files, by kind."""

    tiled: list[Original]
    untouched: list[Original]
    others: list[Original]

    def pick(self, rng: random.Random) -> Original:
        """Return a random file: mostly a JPEG, rarely another format."""
        kinds = (self.tiled, self.untouched, self.others)
        return rng.choice(rng.choices(kinds, weights=(50, 45, 5))[0])


def write_originals() -> Originals:
    """Write JPEGs of every sampling, with restarts, metadata and other codings, tiled and not; and other formats."""
    plain = [
        make_jpeg(f"{name} {size}", picture(*size), factors=factors, restart_interval=interval).content
        for name, factors in SAMPLINGS.items()
        for size, picture, interval in [
            ((8, 8), noise, None),
            ((17, 35), make_picture, None),
            ((40, 88), make_picture, None),
            ((24, 50), make_picture, 2),
            ((3, 41), noise, 1),
        ]
    ]
    plain.append(make_jpeg("gray 2x2", noise(20, 35), factors=((2, 2),)).content)
    plain.append(make_jpeg("rgb", noise(20, 35), rgb=True, header="adobe").content)
    plain.append(make_jpeg("4:4:4 as 2x1", noise(20, 35), factors=((2, 1),) * 3).content)
    plain.append(
        make_jpeg("tables first", noise(20, 35), parts=("dht", "dqt", "dri", "header", "sof"), fill_in_scan=1).content
    )
    picture = make_picture(24, 40)
    plain += [by_pillow(picture, exif=exif_of(orientation).tobytes()) for orientation in (3, 6)]
    plain.append(by_pillow(picture, exif=exif_with_thumbnail(by_pillow(make_picture(8, 16))), comment="ein Bär"))
    odd = [
        by_pillow(picture, progressive=True),
        by_pillow(picture[..., [0, 1, 2, 0]]),
        make_jpeg("scans", picture, scans=((0,), (1,), (2,))).content,
        make_jpeg("gray dnl", picture, factors=GRAY, dnl=True).content,
        make_jpeg("1x4", picture, factors=((1, 4), (1, 1), (1, 1))).content,
    ]
    formats = [save(picture, name) for name in ("PNG", "WEBP", "BMP", "GIF", "TIFF")]
    return Originals(
        tiled=[Original.of_jpeg(tile_jpeg(content)) for content in plain],
        untouched=[Original.of_jpeg(content) for content in plain + odd],
        others=[Original(content=content) for content in formats],
    )


def mutate(original: Original, other: Original, rng: random.Random) -> bytes:
    """Damage a file once or a few times; only the first damage may be to a known part, as later ones have moved.

    Args:
        original: The file.
        other: A file whose parts may be inserted.
        rng: Makes all choices.
    """
    content = bytearray(original.content)
    if original.tables and rng.random() < 0.3:
        rng.choice(TABLE_EDITS)(content, rng.choice(original.tables), other, rng)
    elif original.segments and rng.random() < 0.25:
        rng.choice(SEGMENT_EDITS)(content, rng.choice(original.segments), other, rng)
    else:
        rng.choice(EDITS)(content, other, rng)
    while rng.random() < 0.35:
        rng.choice(EDITS)(content, other, rng)
    return bytes(content)


def _offset(content: bytearray, rng: random.Random) -> int:
    """Return a random offset in a file, often in its first 300 bytes."""
    return rng.randrange(max(1, len(content) if rng.random() < 0.5 else min(len(content), 300)))


def _flip_bit(content: bytearray, other: Original, rng: random.Random) -> None:
    if content:
        content[_offset(content, rng)] ^= 1 << rng.randrange(8)


def _set_byte(content: bytearray, other: Original, rng: random.Random) -> None:
    if content:
        content[_offset(content, rng)] = rng.choice(INTERESTING) if rng.random() < 0.6 else rng.randrange(256)


def _set_after_ff(content: bytearray, other: Original, rng: random.Random) -> None:
    """Turn a marker or a stuffed byte into another marker."""
    offset = content.find(0xFF, _offset(content, rng)) + 1
    if 0 < offset < len(content):
        content[offset] = rng.choice(INTERESTING)


def _delete(content: bytearray, other: Original, rng: random.Random) -> None:
    offset = _offset(content, rng)
    del content[offset : offset + rng.choice((1, 1, 2, 3, 10, 100))]


def _insert(content: bytearray, other: Original, rng: random.Random) -> None:
    offset, num_bytes = _offset(content, rng), rng.choice((1, 1, 2, 3, 10, 100))
    content[offset:offset] = bytes(num_bytes) if rng.random() < 0.3 else rng.randbytes(num_bytes)


def _insert_marker(content: bytearray, other: Original, rng: random.Random) -> None:
    offset = _offset(content, rng)
    content[offset:offset] = bytes([0xFF, rng.choice(INTERESTING)])


def _repeat(content: bytearray, other: Original, rng: random.Random) -> None:
    offset = _offset(content, rng)
    content[offset:offset] = content[offset : offset + rng.choice((1, 2, 8, 60, 300))]


def _cut(content: bytearray, other: Original, rng: random.Random) -> None:
    del content[rng.randrange(len(content) + 1) :]


def _splice(content: bytearray, other: Original, rng: random.Random) -> None:
    content[rng.randrange(len(content) + 1) :] = other.content[rng.randrange(len(other.content)) :]


def _splice_inside(content: bytearray, other: Original, rng: random.Random) -> None:
    offset, num_bytes = _offset(content, rng), rng.choice((2, 10, 50, 300))
    source = rng.randrange(len(other.content))
    content[offset : offset + num_bytes] = other.content[source : source + num_bytes]


Edit = Callable[[bytearray, Original, random.Random], None]
EDITS: tuple[Edit, ...] = (
    *(_flip_bit, _flip_bit, _flip_bit, _set_byte, _set_byte, _set_after_ff, _delete),
    *(_insert, _insert_marker, _repeat, _cut, _splice, _splice_inside),
)
"""Damage at any offset."""

Span = tuple[int, int]
SpanEdit = Callable[[bytearray, Span, Original, random.Random], None]


def _edit_length(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    length = span[1] - span[0] - 2
    near = length + rng.choice((-3, -2, -1, 1, 2, 3, 20, -20))
    value = rng.choice((0, 1, 2, 3, near, near, near, len(content), 65535))
    content[span[0] + 2 : span[0] + 4] = max(0, min(value, 65535)).to_bytes(2, "big")


def _set_in_segment(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    offset = rng.randrange(*span)
    content[offset] = rng.choice((rng.randrange(256), rng.choice(INTERESTING), (content[offset] + 1) % 256))


def _remove_segment(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    del content[span[0] : span[1]]


def _repeat_segment(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    content[span[0] : span[0]] = content[span[0] : span[1]]


def _move_segment(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    moved = content[span[0] : span[1]]
    del content[span[0] : span[1]]
    content[2:2] = moved


def _take_segment(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    """Replace a segment by one of another file."""
    sources = other.tables or other.segments
    if sources:
        start, end = rng.choice(sources)
        content[span[0] : span[1]] = other.content[start:end]


def _claim_size(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    """Write another height or width into the frame header; in one case of four remove the data."""
    at = max(content.find(b"\xff\xc0\0"), 0) + rng.choice((5, 7))
    now = int.from_bytes(content[at : at + 2], "big")
    content[at : at + 2] = max(0, rng.choice((0, 0, 1, now - 8, now + 8, 400, 65500))).to_bytes(2, "big")
    if rng.random() < 0.25:
        scan = content.find(b"\xff\xda\0")
        if scan > 0:
            del content[scan + 2 + int.from_bytes(content[scan + 2 : scan + 4], "big") : -2]


SEGMENT_EDITS: tuple[SpanEdit, ...] = (
    *(_edit_length, _edit_length, _set_in_segment, _set_in_segment, _set_in_segment),
    *(_remove_segment, _repeat_segment, _move_segment, _take_segment, _claim_size),
)
"""Damage to a segment of a JPEG."""

TABLE_HEADER = 4 + 11 + 11
"""Bytes before the lengths: the headers of the segment, the part and the table."""


def _lengths_of(span: Span) -> range:
    """Return the offsets of the lengths in a table of one part, two bytes each."""
    return range(span[0] + TABLE_HEADER, span[1] - 1, 2)


def _edit_interval(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    at = rng.choice(_lengths_of(span))
    value = int.from_bytes(content[at : at + 2], "big") + rng.choice((-2, -1, 1, 2, 40, -40))
    content[at : at + 2] = (value % 65536).to_bytes(2, "big")


def _move_boundary(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    """Move bytes from one interval to another, so that the sum stays the same."""
    first, second = rng.choice(_lengths_of(span)), rng.choice(_lengths_of(span))
    by = rng.choice((1, 2, 3, 10))
    for at, change in ((first, by), (second, -by)):
        content[at : at + 2] = ((int.from_bytes(content[at : at + 2], "big") + change) % 65536).to_bytes(2, "big")


def _swap_intervals(content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    first, second = rng.choice(_lengths_of(span)), rng.choice(_lengths_of(span))
    one, two = bytes(content[first : first + 2]), bytes(content[second : second + 2])
    content[first : first + 2], content[second : second + 2] = two, one


TABLE_EDITS: tuple[SpanEdit, ...] = (*SEGMENT_EDITS, _edit_interval, _move_boundary, _swap_intervals, _set_in_segment)
"""Damage to the tile table."""
