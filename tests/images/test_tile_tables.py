"""A tile table is used only if it fits its file, whatever its size."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shardio.images import decode_image, open_image
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.regions import Box
from shardio.images.jpeg.tile_table import dump_tile_table
from shardio.images.tiling import tile_jpeg
from tests.images.jpeg_files import by_pillow, noise, scan_start
from tests.images.pictures import Array, make_picture
from tests.images.tiling_laws import TILED, check_file, read_by_simplejpeg, take_apart, tile_by

HEIGHT, WIDTH, INTERVAL = 80, 128, 4
"""The image is 4:4:4, so a row has 16 MCUs; 4 of them are an interval."""


def _write(picture: Array, *, sampling: int = 0, quality: int = 80, interval: int = 0) -> bytes:
    return by_pillow(picture, subsampling=sampling, quality=quality, restart_marker_blocks=interval)


def _insert(content: bytes, segments: list[bytes]) -> bytes:
    """Return the file with segments inserted at its start."""
    return content[:2] + b"".join(segments) + content[2:]


def _read(content: bytes, box: Box) -> Array:
    return np.array(open_image(content).read(box))


@pytest.fixture(scope="module")
def tiled() -> bytes:
    content = tile_by(_write(make_picture(HEIGHT, WIDTH)), INTERVAL)
    assert take_apart(content).all_of(0xDD) == [bytes([0xFF, 0xDD, 0, 4, 0, INTERVAL])]
    return content


@pytest.fixture(scope="module")
def large() -> bytes:
    """An image with 65,536 intervals of unequal lengths."""
    blocks = np.kron(noise(128, 128)[..., 0], np.ones((32, 32), np.uint8))
    return tile_by(by_pillow(blocks, quality=10), 4)


OTHERS = {
    "lower": _write(make_picture(HEIGHT - 8, WIDTH), interval=INTERVAL),
    "lower in its last row": _write(make_picture(HEIGHT - 1, WIDTH), interval=INTERVAL),
    "wider": _write(make_picture(HEIGHT, 2 * WIDTH), interval=INTERVAL),
    "narrower in its last column": _write(make_picture(HEIGHT, WIDTH - 3), interval=INTERVAL),
    "turned": _write(make_picture(WIDTH, HEIGHT), interval=INTERVAL),
    "gray": by_pillow(make_picture(HEIGHT, WIDTH)[..., 0].copy(), restart_marker_blocks=INTERVAL),
    "of other sampling": _write(make_picture(HEIGHT, WIDTH), sampling=2, interval=INTERVAL),
    "of another interval": _write(make_picture(HEIGHT, WIDTH), interval=2),
    "of an interval that divides no row": _write(make_picture(HEIGHT, WIDTH), interval=INTERVAL + 1),
    "without restarts": _write(make_picture(HEIGHT, WIDTH)),
    "of another quality": _write(make_picture(HEIGHT, WIDTH), quality=81, interval=INTERVAL),
    "of other content": _write(make_picture(HEIGHT, WIDTH, seed=1), interval=INTERVAL),
    "of other Huffman tables": _write(make_picture(HEIGHT, WIDTH), interval=INTERVAL),
    "progressive": by_pillow(make_picture(HEIGHT, WIDTH), progressive=True),
}
"""Files that another tool may write from the tiled one, with a copy of its table."""


@pytest.mark.parametrize("what", OTHERS)
def test_a_table_that_was_copied_into_another_file_is_not_used(what: str, tiled: bytes) -> None:
    stale = _insert(OTHERS[what], take_apart(tiled).tile_table)
    assert has_tiles(tiled)
    assert not has_tiles(stale)
    expected = read_by_simplejpeg(OTHERS[what])
    np.testing.assert_array_equal(decode_image(stale), expected)
    np.testing.assert_array_equal(_read(stale, Box(33, 20, 11, 17)), expected[33:44, 20:37])


@pytest.mark.parametrize("what", sorted(OTHERS.keys() - {"progressive"}))
def test_tiling_drops_a_table_that_was_copied_from_another_file(what: str, tiled: bytes) -> None:
    stale = _insert(OTHERS[what], take_apart(tiled).tile_table)
    assert tile_jpeg(stale) == tile_jpeg(OTHERS[what])


@pytest.mark.parametrize("offset", range(5, 9))
def test_a_table_is_not_used_with_a_header_of_another_size(offset: int, tiled: bytes) -> None:
    frame = tiled.index(take_apart(tiled).all_of(0xC0)[0])
    for change in (-1, 1):
        changed = bytearray(tiled)
        changed[frame + offset] = (changed[frame + offset] + change) % 256
        assert not has_tiles(bytes(changed))


@pytest.mark.parametrize("interval", [0, 1, 2, 8, 65535])
def test_a_table_is_not_used_with_a_header_of_another_interval(interval: int, tiled: bytes) -> None:
    dri = bytes([0xFF, 0xDD, 0, 4])
    assert not has_tiles(tiled.replace(dri + bytes([0, INTERVAL]), dri + interval.to_bytes(2, "big")))


def test_bytes_other_than_markers_do_not_end_intervals() -> None:
    content = tile_by(_write(noise(8, 64), quality=100), INTERVAL)
    parts = take_apart(content)
    assert len(parts.intervals) == 2
    found = re.search(rb"[^\xff]\xd0", parts.scan)
    assert found is not None
    lengths = np.array([found.start(), len(parts.scan) - found.end()])
    assert not has_tiles(content.replace(parts.tile_table[0], dump_tile_table(8, 64, INTERVAL, lengths)))


def test_a_changed_byte_of_a_table_changes_no_pixels(tiled: bytes) -> None:
    expected = read_by_simplejpeg(tiled)
    (table,) = take_apart(tiled).tile_table
    start = tiled.index(table) + 4
    box = Box(50, 30, 13, 29)
    for offset in range(start, start + len(table) - 4):
        for change in (1, 2, 255):
            changed = bytearray(tiled)
            changed[offset] = (changed[offset] + change) % 256
            assert not has_tiles(bytes(changed)), f"byte {offset - start} of the table"
            np.testing.assert_array_equal(_read(bytes(changed), box), expected[50:63, 30:59])


def test_two_swapped_lengths_are_detected(tiled: bytes) -> None:
    (table,) = take_apart(tiled).tile_table
    swapped = table[:-4] + table[-2:] + table[-4:-2]
    assert swapped != table
    assert not has_tiles(tiled.replace(table, swapped))


def test_a_table_without_intervals_is_not_used() -> None:
    empty = b"\xff\xe9\x00\x18shardio\0\1\0\1" + bytes([0, 0, 0, 8, 0, 1, 2, 0, 0, 0, 0])
    content = bytearray(_write(make_picture(8, 8), interval=1))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = bytes([0, 0, 0, 8])
    assert not has_tiles(_insert(bytes(content), [empty]))


def test_an_image_with_many_intervals_has_a_table_of_several_segments(large: bytes) -> None:
    parts = take_apart(large)
    assert len(parts.intervals) == 65536
    assert [len(segment) for segment in parts.tile_table[:-1]] == [65537] * 2
    assert len(parts.tile_table) == 3
    assert has_tiles(large)
    assert check_file("large", large) == TILED


def test_any_part_of_an_image_with_many_intervals_can_be_read(large: bytes) -> None:
    expected = read_by_simplejpeg(large)
    for box in (Box(0, 0, 1, 1), Box(4095, 4095, 1, 1), Box(2040, 1000, 100, 300), Box(1, 4000, 4000, 90)):
        part = expected[box.top : box.top + box.height, box.left : box.left + box.width]
        np.testing.assert_array_equal(_read(large, box), part)


@pytest.mark.parametrize("order", [(0, 1), (0, 2, 1), (1, 2), (0, 0, 1, 2), (0, 1, 2, 2)], ids=str)
def test_a_table_with_missing_repeated_or_misordered_segments_is_not_used(order: tuple[int, ...], large: bytes) -> None:
    parts = take_apart(large).tile_table
    start = large.index(parts[0])
    changed = large[:start] + b"".join(parts[i] for i in order) + large[start + sum(map(len, parts)) :]
    assert len(take_apart(changed).tile_table) == len(order)
    assert not has_tiles(changed)
    assert tile_by(changed, 4) == large


def test_a_table_of_long_intervals_has_lengths_of_four_bytes() -> None:
    # Tiling writes them only for long rows without a suitable divisor.
    row_mcus = 1024
    content = by_pillow(noise(24, 8 * row_mcus)[..., 0].copy(), quality=100, restart_marker_rows=1)
    lengths = np.array([len(data) for data in take_apart(content).intervals])
    assert lengths.max() >= 2**16
    with_table = _insert(content, [dump_tile_table(24, 8 * row_mcus, row_mcus, lengths)])
    assert take_apart(with_table).tile_table[0][15:22] == bytes([0, 24, 0x20, 0, 4, 0, 4])
    assert has_tiles(with_table)
    expected = read_by_simplejpeg(content)
    np.testing.assert_array_equal(decode_image(with_table), expected)
    np.testing.assert_array_equal(_read(with_table, Box(9, 5000, 5, 900)), expected[9:14, 5000:5900])


def test_a_truncated_tiled_file_gives_no_pixels(tiled: bytes) -> None:
    for stop in range(scan_start(tiled), len(tiled)):
        assert not has_tiles(tiled[:stop])
        with pytest.raises(ValueError, match=r".+"):
            decode_image(tiled[:stop])
