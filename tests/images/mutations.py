"""Random damage to image files, and the small files to damage."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardio.images.jpeg import SIGNATURE
from shardio.images.tiling import tile_jpeg
from tests.images.jpeg_files import GRAY, SAMPLINGS, by_pillow, exif_with_thumbnail, make_jpeg, noise, segments_of
from tests.images.jpeg_writer import segment
from tests.images.pictures import exif_of, make_picture, save

INTERESTING = (0x00, 0x01, 0x02, 0x7F, 0x80, 0xC0, 0xC2, 0xC4, *range(0xD0, 0xDE), 0xE0, 0xE9, 0xEE, 0xFE, 0xFF)
"""Bytes that have a special meaning in a JPEG or are the limits of a range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """An undamaged file, and, for a JPEG, the spans of the segments before the scan and of a tile table's parts."""

    content: bytes
    segments: tuple[tuple[int, int], ...] = ()
    tables: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of_jpeg(content: bytes) -> Original:
        segments = tuple((start, end) for _, start, end in segments_of(content))
        tables = tuple((start, end) for start, end in segments if content.startswith(SIGNATURE, start + 4))
        return Original(content=content, segments=segments, tables=tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class Originals:
    tiled: list[Original]
    untouched: list[Original]
    others: list[Original]

    def pick(self, rng: random.Random) -> Original:
        """Return a random file, usually a JPEG and rarely one in another format."""
        kinds = (self.tiled, self.untouched, self.others)
        return rng.choice(rng.choices(kinds, weights=(50, 45, 5))[0])


def write_originals() -> Originals:
    """Write non-JPEGs, and tiled and untiled JPEGs of every sampling, with restarts, metadata and other codings."""
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
    plain.append(make_jpeg("wide gray", make_picture(8, 3000), factors=GRAY).content)
    plain.append(make_jpeg("rgb", noise(20, 35), rgb=True, header="adobe").content)
    plain.append(make_jpeg("4:4:4 as 2x1", noise(20, 35), factors=((2, 1),) * 3).content)
    plain.append(
        make_jpeg("tables first", noise(20, 35), parts=("dht", "dqt", "dri", "header", "sof"), fill_in_scan=1).content
    )
    picture, progressive = make_picture(24, 40), list[bytes]()
    plain += [by_pillow(picture, exif=exif_of(orientation).tobytes()) for orientation in (3, 6)]
    plain.append(by_pillow(picture, exif=exif_with_thumbnail(by_pillow(make_picture(8, 16))), comment="ein Bär"))
    for size in ((8, 8), (17, 35), (40, 88)):
        restarts: list[dict[str, int]] = [{}, {"restart_marker_blocks": 2}, {"restart_marker_rows": 1}]
        progressive += [
            by_pillow(make_picture(*size), progressive=True, subsampling=subsampling, **restart)
            for subsampling, restart in itertools.product(range(3), restarts)
        ]
        progressive.append(by_pillow(make_picture(*size)[..., 0], progressive=True))
    odd = [
        by_pillow(picture[..., [0, 1, 2, 0]]),
        make_jpeg("scans", picture, scans=((0,), (1,), (2,))).content,
        without_ac_codes(plain[0]),
        make_jpeg("gray dnl", picture, factors=GRAY, dnl=True).content,
        make_jpeg("1x4", picture, factors=((1, 4), (1, 1), (1, 1))).content,
    ]
    formats = [save(picture, name) for name in ("PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")]
    formats.append(save(picture[..., 0], "PPM"))
    return Originals(
        tiled=[Original.of_jpeg(tile_jpeg(content)) for content in plain],
        untouched=[Original.of_jpeg(content) for content in plain + progressive + odd],
        others=[Original(content=content) for content in formats],
    )


def without_ac_codes(content: bytes) -> bytes:
    """Return a JPEG whose Huffman tables for AC coefficients are empty."""
    scan = content.index(b"\xff\xda")
    tables = segment(0xC4, bytes([0x10, *bytes(16), 0x11, *bytes(16)]))
    return content[:scan] + tables + content[scan:]


def mutate(original: Original, other: Original, rng: random.Random) -> bytes:
    """Damage a file once or a few times, sometimes with parts of another file.

    Only the first change may hit a known span, because a change may move the other spans.
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


def find_frame(content: bytes | bytearray) -> int:
    """Return where the frame header of a baseline or progressive JPEG begins, or 0 if there is none."""
    found = re.search(rb"\xff[\xc0\xc2]\0", content)
    return found.start() if found else 0


def _offset(content: bytearray, rng: random.Random) -> int:
    return rng.randrange(max(1, len(content) if rng.random() < 0.5 else min(len(content), 300)))


Span = tuple[int, int]
Edit = Callable[[bytearray, Original, random.Random], None]
SpanEdit = Callable[[bytearray, Span, Original, random.Random], None]


def _edit(name: str, content: bytearray, other: Original, rng: random.Random) -> None:
    if name == "cut":
        del content[rng.randrange(len(content) + 1) :]
        return
    if name == "splice":
        content[rng.randrange(len(content) + 1) :] = other.content[rng.randrange(len(other.content)) :]
        return
    offset = _offset(content, rng)
    match name:
        case "flip bit" if content:
            content[offset] ^= 1 << rng.randrange(8)
        case "set byte" if content:
            content[offset] = rng.choice(INTERESTING) if rng.random() < 0.6 else rng.randrange(256)
        case "set after ff":  # A marker or a stuffed byte becomes a different marker.
            offset = content.find(0xFF, offset) + 1
            if 0 < offset < len(content):
                content[offset] = rng.choice(INTERESTING)
        case "delete":
            del content[offset : offset + rng.choice((1, 1, 2, 3, 10, 100))]
        case "insert":
            num_bytes = rng.choice((1, 1, 2, 3, 10, 100))
            content[offset:offset] = bytes(num_bytes) if rng.random() < 0.3 else rng.randbytes(num_bytes)
        case "insert marker":
            content[offset:offset] = bytes([0xFF, rng.choice(INTERESTING)])
        case "repeat":
            content[offset:offset] = content[offset : offset + rng.choice((1, 2, 8, 60, 300))]
        case "splice inside":
            num_bytes, source = rng.choice((2, 10, 50, 300)), rng.randrange(len(other.content))
            content[offset : offset + num_bytes] = other.content[source : source + num_bytes]


EDITS: tuple[Edit, ...] = tuple(
    partial(_edit, name)
    for name in (
        *("flip bit", "flip bit", "flip bit", "set byte", "set byte", "set after ff", "delete"),
        *("insert", "insert marker", "repeat", "cut", "splice", "splice inside"),
    )
)


def _edit_segment(name: str, content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    start, stop = span
    match name:
        case "length":
            near = stop - start - 2 + rng.choice((-3, -2, -1, 1, 2, 3, 20, -20))
            value = rng.choice((0, 1, 2, 3, near, near, near, len(content), 65535))
            content[start + 2 : start + 4] = max(0, min(value, 65535)).to_bytes(2, "big")
        case "set":
            offset = rng.randrange(start, stop)
            content[offset] = rng.choice((rng.randrange(256), rng.choice(INTERESTING), (content[offset] + 1) % 256))
        case "remove":
            del content[start:stop]
        case "repeat":
            content[start:start] = content[start:stop]
        case "move":
            moved = content[start:stop]
            del content[start:stop]
            content[2:2] = moved
        case "take" if sources := other.tables or other.segments:
            first, end = rng.choice(sources)
            content[start:stop] = other.content[first:end]
        case "claim size":  # Change the height or width in the frame header, and sometimes remove the data.
            at = find_frame(content) + rng.choice((5, 7))
            now = int.from_bytes(content[at : at + 2], "big")
            content[at : at + 2] = max(0, rng.choice((0, 0, 1, now - 8, now + 8, 400, 65500))).to_bytes(2, "big")
            if rng.random() < 0.25 and (scan := content.find(b"\xff\xda\0")) > 0:
                del content[scan + 2 + int.from_bytes(content[scan + 2 : scan + 4], "big") : -2]


SEGMENT_EDITS: tuple[SpanEdit, ...] = tuple(
    partial(_edit_segment, name)
    for name in ("length", "length", "set", "set", "set", "remove", "repeat", "move", "take", "claim size")
)

TABLE_HEADER = 4 + 11 + 11
"""The number of bytes before the lengths: the headers of the segment, the part and the table."""


def _edit_table(name: str, content: bytearray, span: Span, other: Original, rng: random.Random) -> None:
    """Damage the two-byte lengths in a one-part tile table."""
    lengths = range(span[0] + TABLE_HEADER, span[1] - 1, 2)
    first, second = rng.choice(lengths), rng.choice(lengths)
    if name == "swap":
        one, two = bytes(content[first : first + 2]), bytes(content[second : second + 2])
        content[first : first + 2], content[second : second + 2] = two, one
        return
    by = rng.choice((-2, -1, 1, 2, 3, 10, 40, -40))
    for at, change in ((first, by), (second, -by))[
        : 2 if name == "move boundary" else 1
    ]:  # Moving a boundary does not change the sum of the lengths.
        content[at : at + 2] = ((int.from_bytes(content[at : at + 2], "big") + change) % 65536).to_bytes(2, "big")


TABLE_EDITS: tuple[SpanEdit, ...] = (
    *SEGMENT_EDITS,
    *(partial(_edit_table, name) for name in ("interval", "move boundary", "swap")),
    partial(_edit_segment, "set"),
)
