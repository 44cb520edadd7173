"""Damage done to image files by chance, and the small files that it is done to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from shardio.images.jpeg.tile_table import SIGNATURE
from shardio.images.tiling import tile_jpeg
from tests.images.animals import GRAY, SAMPLINGS, by_pillow, exif_with_thumbnail, noise, own, segments_of
from tests.images.pictures import exif_of, make_picture, save

INTERESTING = (0x00, 0x01, 0x02, 0x7F, 0x80, 0xC0, 0xC2, 0xC4, *range(0xD0, 0xDE), 0xE0, 0xE9, 0xEE, 0xFE, 0xFF)
"""Bytes that mean something in a JPEG, or lie at the ends of a range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Specimen:
    """A file in order, and where its parts lie.

    Args:
        content: The file.
        segments: Starts and ends of the segments of a JPEG up to its first scan's header.
        tables: Those of them that are parts of a tile table.
    """

    content: bytes
    segments: tuple[tuple[int, int], ...] = ()
    tables: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of_jpeg(content: bytes) -> Specimen:
        """Return a JPEG with its parts."""
        segments = tuple((start, end) for _, start, end in segments_of(content))
        tables = tuple((start, end) for start, end in segments if content.startswith(SIGNATURE, start + 4))
        return Specimen(content=content, segments=segments, tables=tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """Small files of the kinds that are damaged in turn."""

    tiled: list[Specimen]
    untouched: list[Specimen]
    others: list[Specimen]

    def draw(self, draw: random.Random) -> Specimen:
        """Return one of them: mostly a JPEG, seldom another format."""
        kinds = (self.tiled, self.untouched, self.others)
        return draw.choice(draw.choices(kinds, weights=(50, 45, 5))[0])


def collect() -> Collection:
    """Write the files: every sampling, tiled and not, with restarts, metadata and other codings, and other formats."""
    plain = [
        own(f"{name} {size}", picture(*size), factors=factors, restart_interval=interval).content
        for name, factors in SAMPLINGS.items()
        for size, picture, interval in [
            ((8, 8), noise, None),
            ((17, 35), make_picture, None),
            ((40, 88), make_picture, None),
            ((24, 50), make_picture, 2),
            ((3, 41), noise, 1),
        ]
    ]
    plain.append(own("gray 2x2", noise(20, 35), factors=((2, 2),)).content)
    plain.append(own("rgb", noise(20, 35), rgb=True, header="adobe").content)
    plain.append(own("4:4:4 as 2x1", noise(20, 35), factors=((2, 1),) * 3).content)
    plain.append(
        own("tables first", noise(20, 35), parts=("dht", "dqt", "dri", "header", "sof"), fill_in_scan=1).content
    )
    picture = make_picture(24, 40)
    plain += [by_pillow(picture, exif=exif_of(orientation).tobytes()) for orientation in (3, 6)]
    plain.append(by_pillow(picture, exif=exif_with_thumbnail(by_pillow(make_picture(8, 16))), comment="ein Bär"))
    odd = [
        by_pillow(picture, progressive=True),
        by_pillow(picture[..., [0, 1, 2, 0]]),
        own("scans", picture, scans=((0,), (1,), (2,))).content,
        own("gray dnl", picture, factors=GRAY, dnl=True).content,
        own("1x4", picture, factors=((1, 4), (1, 1), (1, 1))).content,
    ]
    formats = [save(picture, name) for name in ("PNG", "WEBP", "BMP", "GIF", "TIFF")]
    return Collection(
        tiled=[Specimen.of_jpeg(tile_jpeg(content)) for content in plain],
        untouched=[Specimen.of_jpeg(content) for content in plain + odd],
        others=[Specimen(content=content) for content in formats],
    )


def mutate(specimen: Specimen, other: Specimen, draw: random.Random) -> bytes:
    """Damage a file once or a few times, at first where its parts still lie where they were.

    Args:
        specimen: The file.
        other: One whose parts may be put in.
        draw: Decides all.
    """
    content = bytearray(specimen.content)
    if specimen.tables and draw.random() < 0.3:
        draw.choice(TABLE_EDITS)(content, draw.choice(specimen.tables), other, draw)
    elif specimen.segments and draw.random() < 0.25:
        draw.choice(SEGMENT_EDITS)(content, draw.choice(specimen.segments), other, draw)
    else:
        draw.choice(EDITS)(content, other, draw)
    while draw.random() < 0.35:
        draw.choice(EDITS)(content, other, draw)
    return bytes(content)


def _place(content: bytearray, draw: random.Random) -> int:
    """Return a place in a file, as often in its first part as in the rest."""
    return draw.randrange(max(1, len(content) if draw.random() < 0.5 else min(len(content), 300)))


def _flip_bit(content: bytearray, other: Specimen, draw: random.Random) -> None:
    if content:
        content[_place(content, draw)] ^= 1 << draw.randrange(8)


def _set_byte(content: bytearray, other: Specimen, draw: random.Random) -> None:
    if content:
        content[_place(content, draw)] = draw.choice(INTERESTING) if draw.random() < 0.6 else draw.randrange(256)


def _set_behind_ff(content: bytearray, other: Specimen, draw: random.Random) -> None:
    """Make another marker of a marker or of a stuffed byte."""
    place = content.find(0xFF, _place(content, draw)) + 1
    if 0 < place < len(content):
        content[place] = draw.choice(INTERESTING)


def _delete(content: bytearray, other: Specimen, draw: random.Random) -> None:
    place = _place(content, draw)
    del content[place : place + draw.choice((1, 1, 2, 3, 10, 100))]


def _insert(content: bytearray, other: Specimen, draw: random.Random) -> None:
    place, number = _place(content, draw), draw.choice((1, 1, 2, 3, 10, 100))
    content[place:place] = bytes(number) if draw.random() < 0.3 else draw.randbytes(number)


def _insert_marker(content: bytearray, other: Specimen, draw: random.Random) -> None:
    place = _place(content, draw)
    content[place:place] = bytes([0xFF, draw.choice(INTERESTING)])


def _repeat(content: bytearray, other: Specimen, draw: random.Random) -> None:
    place = _place(content, draw)
    content[place:place] = content[place : place + draw.choice((1, 2, 8, 60, 300))]


def _cut(content: bytearray, other: Specimen, draw: random.Random) -> None:
    del content[draw.randrange(len(content) + 1) :]


def _splice(content: bytearray, other: Specimen, draw: random.Random) -> None:
    content[draw.randrange(len(content) + 1) :] = other.content[draw.randrange(len(other.content)) :]


def _splice_inside(content: bytearray, other: Specimen, draw: random.Random) -> None:
    place, number = _place(content, draw), draw.choice((2, 10, 50, 300))
    source = draw.randrange(len(other.content))
    content[place : place + number] = other.content[source : source + number]


Edit = Callable[[bytearray, Specimen, random.Random], None]
EDITS: tuple[Edit, ...] = (
    *(_flip_bit, _flip_bit, _flip_bit, _set_byte, _set_byte, _set_behind_ff, _delete),
    *(_insert, _insert_marker, _repeat, _cut, _splice, _splice_inside),
)
"""Done anywhere."""

Span = tuple[int, int]
SpanEdit = Callable[[bytearray, Span, Specimen, random.Random], None]


def _edit_length(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    length = span[1] - span[0] - 2
    near = length + draw.choice((-3, -2, -1, 1, 2, 3, 20, -20))
    value = draw.choice((0, 1, 2, 3, near, near, near, len(content), 65535))
    content[span[0] + 2 : span[0] + 4] = max(0, min(value, 65535)).to_bytes(2, "big")


def _set_in_segment(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    place = draw.randrange(*span)
    content[place] = draw.choice((draw.randrange(256), draw.choice(INTERESTING), (content[place] + 1) % 256))


def _remove_segment(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    del content[span[0] : span[1]]


def _repeat_segment(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    content[span[0] : span[0]] = content[span[0] : span[1]]


def _move_segment(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    moved = content[span[0] : span[1]]
    del content[span[0] : span[1]]
    content[2:2] = moved


def _take_segment(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    """Put a segment of another file in the place of one."""
    sources = other.tables or other.segments
    if sources:
        start, end = draw.choice(sources)
        content[span[0] : span[1]] = other.content[start:end]


def _claim_size(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    """Write another height or width into the frame header; in one case of four leave no data."""
    at = max(content.find(b"\xff\xc0\0"), 0) + draw.choice((5, 7))
    now = int.from_bytes(content[at : at + 2], "big")
    content[at : at + 2] = max(0, draw.choice((0, 0, 1, now - 8, now + 8, 400, 65500))).to_bytes(2, "big")
    if draw.random() < 0.25:
        scan = content.find(b"\xff\xda\0")
        if scan > 0:
            del content[scan + 2 + int.from_bytes(content[scan + 2 : scan + 4], "big") : -2]


SEGMENT_EDITS: tuple[SpanEdit, ...] = (
    *(_edit_length, _edit_length, _set_in_segment, _set_in_segment, _set_in_segment),
    *(_remove_segment, _repeat_segment, _move_segment, _take_segment, _claim_size),
)
"""Done to a segment of a JPEG."""

TABLE_HEADER = 4 + 11 + 11
"""Bytes before the lengths: the segment's, the part's and the table's own."""


def _lengths_of(span: Span) -> range:
    """Return where the lengths lie in a table of one part, two bytes each."""
    return range(span[0] + TABLE_HEADER, span[1] - 1, 2)


def _edit_interval(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    at = draw.choice(_lengths_of(span))
    value = int.from_bytes(content[at : at + 2], "big") + draw.choice((-2, -1, 1, 2, 40, -40))
    content[at : at + 2] = (value % 65536).to_bytes(2, "big")


def _move_boundary(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    """Give bytes of one interval to another, so that the sum stays."""
    first, second = draw.choice(_lengths_of(span)), draw.choice(_lengths_of(span))
    by = draw.choice((1, 2, 3, 10))
    for at, change in ((first, by), (second, -by)):
        content[at : at + 2] = ((int.from_bytes(content[at : at + 2], "big") + change) % 65536).to_bytes(2, "big")


def _swap_intervals(content: bytearray, span: Span, other: Specimen, draw: random.Random) -> None:
    first, second = draw.choice(_lengths_of(span)), draw.choice(_lengths_of(span))
    one, two = bytes(content[first : first + 2]), bytes(content[second : second + 2])
    content[first : first + 2], content[second : second + 2] = two, one


TABLE_EDITS: tuple[SpanEdit, ...] = (*SEGMENT_EDITS, _edit_interval, _move_boundary, _swap_intervals, _set_in_segment)
"""Done to the tile table."""
