"""A decoded part of a picture equals the same part of the full decode. Decoding a damaged file may raise an error."""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import simplejpeg

from shardio.images import JpegPicture, decode_image, open_image
from shardio.images.jpeg import Box, dump_tile_table, has_tiles
from shardio.images.tiling import NotTileable, tile_jpeg
from tests.images.crop_laws import assert_parts, edge_boxes, part, random_boxes, some_boxes, table_segment, tile_by_hand
from tests.images.fuzz_laws import check_reading
from tests.images.jpeg_corpus import FACTORS, small_corpus, truncations
from tests.images.jpeg_files import (
    Factors,
    by_pillow,
    flat,
    make_jpeg,
    noise,
    patch,
    scan_start,
    segments_of,
)
from tests.images.mutations import Original
from tests.images.pictures import TURNS, Array, exif_of, make_picture, read_by_pillow, save
from tests.images.tiling_laws import TILED as IS_TILED, check_file, read_by_simplejpeg, take_apart, tile_by
from tests.raising import assert_raises


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
def test_crops_of_small_pictures(factors: Factors) -> None:
    """Rows of 11 and 6 MCUs, with intervals of 1 and 3, end in an MCU of 1 or 4 pixels. No interval divides the widths.

    The pictures are noise, in which any wrong pixel is visible. ``tools/crop_campaign.py`` checks all crops.
    """
    mcu_width = 8 * max(across for across, _ in factors) if len(factors) > 1 else 8
    rows = [(9, (num_mcus - 1) * mcu_width + last) for num_mcus in (11, 6) for last in (1, 4)]
    sizes = [(1, 1), (1, 4), (3, 2), (5, 5), (1, 33), (33, 1), (18, 4), (2, 34), (34, 2), (9, 11), (35, 69)]
    for size in [*sizes, *rows]:
        original, by_ones = (
            make_jpeg("", noise(*size), factors=factors, quality=95, restart_interval=interval).content
            for interval in (None, 1)
        )
        files = {"untouched": original, "tiled": tile_jpeg(original), "tiled by ones": tile_by_hand(by_ones)}
        edges, expected = edge_boxes(*size), read_by_simplejpeg(original)
        for seed, (name, content) in enumerate(files.items()):
            assert has_tiles(content) == (name != "untouched")
            boxes = some_boxes(*size, 8) + random_boxes(*size, 3, np.random.default_rng(seed))
            boxes += edges[seed :: 1 + len(edges) // 12]
            if size in rows:
                boxes += [Box(0, left, size[0], size[1] - left) for left in range(max(size[1] - 9, 0), size[1])]
            assert_parts(content, expected, boxes, name=f"{name} {size}")


def test_crops_of_all_files_of_the_corpus_that_can_be_decoded() -> None:
    random, num_checked = np.random.default_rng(0), 0
    for file in small_corpus():
        contents = [file.content]
        with suppress(NotTileable):
            contents.append(tile_jpeg(file.content))
        for content in contents:
            if file.tileable and file.readers:
                np.testing.assert_array_equal(decode_image(content), read_by_pillow(file.content), err_msg=file.name)
            try:
                picture = open_image(content)
                expected = (read_by_simplejpeg if isinstance(picture, JpegPicture) else read_by_pillow)(file.content)
            except (ValueError, OSError):
                continue
            assert_parts(content, expected, random_boxes(*picture.size, 5, random), name=file.name)
            num_checked += 1
    assert num_checked > 440


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["untouched", "tiled", "4:2:0, tiled", "png"])
def test_crops_of_upright_pictures_are_crops_of_the_turned_full_decode(orientation: int, kind: str) -> None:
    size, is_png = (37, 53), kind == "png"
    options: dict[str, Any] = {} if is_png else {"subsampling": 2 if "4:2:0" in kind else 0}
    original = save(make_picture(*size), "PNG" if is_png else "JPEG", exif=exif_of(orientation), **options)
    content = tile_jpeg(original) if "tiled" in kind else original
    stored = read_by_pillow(original) if is_png else read_by_simplejpeg(original)
    upright = TURNS[orientation](stored)
    height, width = upright.shape[:2]
    boxes = random_boxes(height, width, 12, np.random.default_rng(orientation))
    assert_parts(content, upright, [*boxes, Box(0, 0, height, width)], orientation="apply")
    assert_parts(content, stored, random_boxes(*size, 5, np.random.default_rng(1)))


SIZE = (24, 83)
UNTILED = by_pillow(noise(*SIZE), subsampling=0, quality=30)
TILED = tile_by(UNTILED, 1)
"""An image with three rows of eleven MCUs, in which each MCU is a restart interval."""
WHOLE = read_by_simplejpeg(TILED)
BOXES = [Box(0, 0, 3, 3), Box(9, 30, 5, 20), Box(20, 78, 4, 5), *random_boxes(*SIZE, 3, np.random.default_rng(0))]
TABLE = next((start, end) for marker, start, end in segments_of(TILED) if marker == 0xE9)
HEADER = 4 + 11
"""The number of bytes in a segment before its part of the table."""


def _with_table(part_of_table: bytes) -> bytes:
    return TILED[: TABLE[0]] + table_segment(part_of_table) + TILED[TABLE[1] :]


def _table_of(content: bytes) -> tuple[bytes, list[int]]:
    start, end = next((start, end) for marker, start, end in segments_of(content) if marker == 0xE9)
    table = content[start + HEADER : end]
    return table[:11], list(struct.unpack(f">{(len(table) - 11) // 2}H", table[11:]))


def _join(fields: bytes, lengths: list[int]) -> bytes:
    return fields + struct.pack(f">{len(lengths)}H", *lengths)


def _is_right(content: bytes) -> bool:
    """Check that crops equal the result of a strict full decode.

    If the strict decode fails, a crop may raise an error or equal the result of a lenient decode.
    """
    try:
        expected = read_by_simplejpeg(content)
    except ValueError:
        for seed in range(2):
            check_reading(content, [Original.of_jpeg(TILED)], random.Random(seed))
        return False
    assert_parts(content, expected, BOXES)
    return True


def _read(content: bytes, box: Box) -> Array | None:
    try:
        return open_image(content).read(box)
    except ValueError:
        return None


def test_a_changed_byte_of_the_table_changes_no_pixels() -> None:
    start, end = TABLE
    num_right = num_without = 0
    for place in range(start, end):
        for value in {TILED[place] ^ 1, TILED[place] ^ 0x80, 0xFF, 0x00} - {TILED[place]}:
            content = TILED[:place] + bytes([value]) + TILED[place + 1 :]
            num_right += _is_right(content)
            num_without += not has_tiles(content)
    assert num_without > 3 * (end - start - 1)
    assert num_right > 3 * (end - start - 5), "only the marker and the length matter to libjpeg"


def _stale_tables() -> Iterator[tuple[str, bytes]]:
    fields, lengths = _table_of(TILED)
    start, end = TABLE
    own_table, own_segment = TILED[start + HEADER : end], TILED[start:end]
    for first, second in [(0, 1), (0, len(lengths) - 1), (7, 15), (3, 11)]:
        swapped = lengths.copy()
        swapped[first], swapped[second] = swapped[second], swapped[first]
        if swapped != lengths:
            yield f"lengths {first} and {second} swapped", _with_table(_join(fields, swapped))
    for by in (8, -8, 16, 1):
        yield f"lengths rolled by {by}", _with_table(_join(fields, lengths[by:] + lengths[:by]))
    # Restart markers that are eight intervals apart have the same number.
    joined = [sum(lengths[:9]) + 2 * 8, *lengths[9:]]
    yield "eight intervals joined to one", _with_table(_join(fields, joined))
    yield "eight joined, the number kept", _with_table(_join(fields, joined + [0] * 8))
    yield "eight joined, the last repeated", _with_table(_join(fields, joined + lengths[-8:]))
    yield "a length more", _with_table(_join(fields, [*lengths, 7]))
    yield "a length less", _with_table(_join(fields, lengths[:-1]))
    yield "no lengths", _with_table(fields)
    yield "half the fields", _with_table(fields[:5])
    yield "nothing", _with_table(b"")
    yield "lengths of zero", _with_table(_join(fields, [0] * len(lengths)))
    yield "lengths of 65535", _with_table(_join(fields, [65535] * len(lengths)))
    long = fields[:6] + b"\4" + fields[7:] + struct.pack(f">{len(lengths)}I", *lengths[:-1], 2**32 - 1)
    yield "a length of four gigabytes", _with_table(long)
    for other in (make_picture(16, 83), make_picture(*SIZE), flat(*SIZE)):
        table = _join(*_table_of(tile_jpeg(by_pillow(other, subsampling=0))))
        yield f"the table of another image of {other.shape} pixels", _with_table(table)
    segments = {
        "part 1 of 1": table_segment(own_table, 1, 1),
        "part 0 of 0": table_segment(own_table, 0, 0),
        "part 0 of 2": table_segment(own_table, 0, 2),
        "twice": own_segment * 2,
        "twice as parts": table_segment(own_table, 0, 2) + table_segment(own_table, 1, 2),
        "parts in the wrong order": table_segment(own_table[20:], 1, 2) + table_segment(own_table[:20], 0, 2),
        "parts of unlike numbers": table_segment(own_table[:20], 0, 3) + table_segment(own_table[20:], 1, 2),
        "a part without a number": own_segment + b"\xff\xe9\0\x0ashardio\0",
        "version 2": own_segment[:12] + b"\2" + own_segment[13:],
    }
    for name, content in segments.items():
        yield name, TILED[:start] + content + TILED[end:]


BLOCKS: dict[str, Any] = {"subsampling": 0, "restart_marker_blocks": 1}
OTHERS = {
    "lower": by_pillow(noise(SIZE[0] - 8, SIZE[1]), **BLOCKS),
    "lower in its last row": by_pillow(noise(SIZE[0] - 1, SIZE[1]), **BLOCKS),
    "wider": by_pillow(noise(SIZE[0], 2 * SIZE[1]), **BLOCKS),
    "narrower in its last column": by_pillow(noise(SIZE[0], SIZE[1] - 1), **BLOCKS),
    "turned": by_pillow(noise(*SIZE[::-1]), **BLOCKS),
    "gray": by_pillow(noise(*SIZE)[..., 0].copy(), restart_marker_blocks=1),
    "of other sampling": by_pillow(noise(*SIZE), subsampling=2, restart_marker_blocks=1),
    "of another interval": by_pillow(noise(*SIZE), subsampling=0, restart_marker_blocks=11),
    "of an interval that divides no row": by_pillow(noise(*SIZE), subsampling=0, restart_marker_blocks=2),
    "without restarts": by_pillow(noise(*SIZE), subsampling=0),
    "of another quality": by_pillow(noise(*SIZE), quality=31, **BLOCKS),
    "of other content": by_pillow(make_picture(*SIZE), quality=30, **BLOCKS),
    "of other Huffman tables": by_pillow(noise(*SIZE), quality=30, **BLOCKS),
    "progressive": by_pillow(noise(*SIZE), progressive=True),
}
"""Files that another tool may write from the tiled file, each with a copy of the tiled file's table."""


def test_a_stale_wrong_or_copied_table_is_not_used_and_tiling_drops_it() -> None:
    assert has_tiles(TILED)
    files = [(name, content, tile_jpeg(UNTILED)) for name, content in _stale_tables()]
    files += [(name, other[:2] + TILED[slice(*TABLE)] + other[2:], tile_jpeg(other)) for name, other in OTHERS.items()]
    for name, content, tiled in files:
        assert not has_tiles(content) or name == "parts of unlike numbers"  # The table's last part has the right count.
        whole = read_by_simplejpeg(content)
        np.testing.assert_array_equal(decode_image(content), whole, err_msg=name)
        assert_parts(content, whole, BOXES if whole.shape[:2] == SIZE else [Box(9, 10, 7, 13)], name=name)
        assert tile_jpeg(content) == tiled, name


@pytest.mark.parametrize("cut", [1, 10, 11, 12, 50])
def test_a_table_in_two_segments_is_read_as_if_it_were_in_one(cut: int) -> None:
    start, end = TABLE
    table = TILED[start + HEADER : end]
    parts = table_segment(table[:cut], 0, 2) + b"\xff\xfe\0\x04hm" + table_segment(table[cut:], 1, 2)
    content = TILED[:start] + parts + TILED[end:]
    assert has_tiles(content)
    assert _is_right(content)


def test_a_table_is_not_used_with_a_header_of_another_size_or_interval() -> None:
    place = TILED.index(b"\xff\xc0") + 4
    for offset, change in itertools.product(range(1, 5), (-1, 1)):
        assert not has_tiles(patch(TILED, 0xC0, offset, (TILED[place + offset] + change) % 256))
    for interval in (0, 1, 2, 11, 65535):
        content = patch(patch(TILED, 0xDD, 0, interval >> 8), 0xDD, 1, interval & 255)
        assert has_tiles(content) == (interval == 1)
        _is_right(content)


def test_a_table_of_intervals_that_end_without_markers_or_of_none_is_not_used() -> None:
    content = tile_by(by_pillow(noise(8, 64), subsampling=0, quality=100), 4)
    parts = take_apart(content)
    found = re.search(rb"[^\xff]\xd0", parts.scan)
    assert found is not None
    lengths = np.array([found.start(), len(parts.scan) - found.end()])
    assert not has_tiles(content.replace(parts.tile_table[0], dump_tile_table(8, 64, 4, lengths)))
    empty = table_segment(bytes([0, 0, 0, 8, 0, 1, 2, 0, 0, 0, 0]))
    low = by_pillow(make_picture(8, 8), subsampling=0, restart_marker_blocks=1)
    low = patch(low, 0xC0, 2, 0)  # A height of 0.
    assert not has_tiles(low[:2] + empty + low[2:])


@pytest.mark.slow
def test_an_image_with_many_intervals_has_a_table_of_several_segments() -> None:
    """65,536 intervals of unequal lengths."""
    blocks = np.kron(noise(128, 128)[..., 0], np.ones((32, 32), np.uint8))
    large = tile_by(by_pillow(blocks, quality=10), 4)
    parts = take_apart(large)
    assert len(parts.intervals) == 65536
    assert [len(segment) for segment in parts.tile_table[:-1]] == [65537] * 2
    assert len(parts.tile_table) == 3
    assert has_tiles(large)
    assert check_file("large", large) == IS_TILED
    expected = read_by_simplejpeg(large)
    for box in (Box(0, 0, 1, 1), Box(4095, 4095, 1, 1), Box(2040, 1000, 100, 300), Box(1, 4000, 4000, 90)):
        np.testing.assert_array_equal(open_image(large).read(box), part(expected, box))
    start, table = large.index(parts.tile_table[0]), parts.tile_table
    for order in ((0, 1), (0, 2, 1), (1, 2), (0, 0, 1, 2), (0, 1, 2, 2)):
        changed = large[:start] + b"".join(table[i] for i in order) + large[start + sum(map(len, table)) :]
        assert len(take_apart(changed).tile_table) == len(order)
        assert not has_tiles(changed)
        assert tile_by(changed, 4) == large


def test_a_table_of_long_intervals_has_lengths_of_four_bytes() -> None:
    # Tiling writes such long intervals only if the number of MCUs in a long row has no suitable divisor.
    row_mcus = 1024
    content = by_pillow(noise(24, 8 * row_mcus)[..., 0].copy(), quality=100, restart_marker_rows=1)
    lengths = np.array([len(data) for data in take_apart(content).intervals])
    assert lengths.max() >= 2**16
    with_table = content[:2] + dump_tile_table(24, 8 * row_mcus, row_mcus, lengths) + content[2:]
    assert take_apart(with_table).tile_table[0][15:22] == bytes([0, 24, 0x20, 0, 4, 0, 4])
    assert has_tiles(with_table)
    expected, box = read_by_simplejpeg(content), Box(9, 5000, 5, 900)
    np.testing.assert_array_equal(decode_image(with_table), expected)
    np.testing.assert_array_equal(open_image(with_table).read(box), part(expected, box))


SMALL = make_jpeg("small", make_picture(16, 24), factors=((2, 2), (1, 1), (1, 1))).content
FILES = {"untouched": SMALL, "tiled": tile_jpeg(SMALL)}


@pytest.mark.parametrize("kind", FILES)
def test_crops_of_a_damaged_file_are_right_or_an_error(kind: str) -> None:
    content, draw = FILES[kind], random.Random(kind)
    made_of = [Original.of_jpeg(content)]
    for place in range(0, len(content), 2):
        for value in {content[place] ^ 1 << draw.randrange(8), draw.randrange(256), 0xFF, 0xD0} - {content[place]}:
            check_reading(content[:place] + bytes([value]) + content[place + 1 :], made_of, draw)
    # A missing Huffman table must cause an error, although libjpeg would use the standard one.
    for (_, start, _), value in itertools.product(segments_of(content), range(256)):
        check_reading(content[: start + 1] + bytes([value]) + content[start + 2 :], [Original(content=content)], draw)
    for beginning in truncations(content):
        assert not has_tiles(beginning)
        assert "an error" in check_reading(beginning, made_of, draw)[0] or kind == "tiled"


@pytest.mark.parametrize("marker", [0x02, 0x44, 0xBF, 0xC8, 0xCC, 0xF0, 0xFD])
@pytest.mark.parametrize("content", [by_pillow(noise(*SIZE), subsampling=0), TILED], ids=["untouched", "tiled"])
def test_a_part_is_not_read_where_libjpeg_refuses_the_whole(content: bytes, marker: int) -> None:
    start = next(start for kind, start, _ in segments_of(content) if kind == 0xC4)
    damaged = content[: start + 1] + bytes([marker]) + content[start + 2 :]
    assert_raises(ValueError, ".+", simplejpeg.decode_jpeg, damaged)
    for top, left in itertools.product(range(0, 24, 8), range(0, 83, 8)):
        assert _read(damaged, Box(top, left, 1, 1)) is None


def test_damage_in_one_interval_leaves_crops_elsewhere_right_and_those_that_touch_it_errors() -> None:
    # With 4:4:4 sampling, no row of MCUs depends on another row.
    fields, lengths = _table_of(TILED)
    assert struct.unpack(">HHHBI", fields)[2] == 1
    start = scan_start(TILED) + sum(lengths[:16]) + 2 * 16  # The sixth interval of the second row is damaged.
    content = TILED[:start] + b"\xff\0" * (lengths[16] // 2) + TILED[start + lengths[16] // 2 * 2 :]
    assert has_tiles(content)
    assert_raises(ValueError, "Corrupt", read_by_simplejpeg, content)
    for top in range(SIZE[0]):
        row = _read(content, Box(top, 0, 1, SIZE[1]))
        assert (row is None) == (8 <= top < 16)
        if row is not None:
            np.testing.assert_array_equal(row, part(WHOLE, Box(top, 0, 1, SIZE[1])))
    assert_parts(content, WHOLE, [Box(0, 0, 24, 40), Box(9, 48, 10, 35)])
