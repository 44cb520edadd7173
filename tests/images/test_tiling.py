"""Tiling is lossless, writes valid and optimal Huffman tables, and refuses files that cannot be tiled."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardio.images import DEFAULT_MAX_PIXELS, TooManyPixels, decode_image
from shardio.images.tiling import (
    NotTileable,
    choose_interval,
    decodes_if_tileable,
    make_best_table,
    tile_jpeg,
    untile_jpeg,
)
from tests.images.fuzz_laws import make_damaged_file
from tests.images.jpeg_corpus import FACTORS, ODD_FRAMES, TABLES, not_jpegs, patch_sof, small_corpus, untileable_jpegs
from tests.images.jpeg_files import (
    PILLOW_SAMPLINGS,
    SAMPLINGS,
    by_pillow,
    flat,
    gray_or_color,
    make_jpeg,
    noise,
    patch,
    scan_start,
    segments_of,
)
from tests.images.jpeg_writer import HuffmanTable, dht_segment, segment, write_jpeg
from tests.images.mutations import write_originals
from tests.images.pictures import exif_of, make_picture, read_by_pillow
from tests.images.tiling_laws import LONGEST_REASON, TILED, Parts, check_corpus_file, check_file, take_apart, tile_by
from tests.raising import assert_raises

NO_END = "damaged: the end-of-image marker is missing"
TOO_MUCH = "damaged: there is more data than the image needs"
ENDS_EARLY = "damaged: the data ends early or contains an unknown code"
WRONG_MARKER = "damaged: a restart marker is missing or wrong"

REASONS = {
    "progressive, of a kind that the kernel does not decode": ["sof2", "progressive, the last scan twice"],
    "progressive, and the last scans are missing": ["progressive, the last scan is missing"],
    "coded by process SOF3": ["sof3"],
    "coded by process SOF9": ["sof9"],
    "coded by process SOF13": ["sofd"],
    "2 components": ["two components"],
    "4 components": ["cmyk by pillow", "four components", "four components of two sizes"],
    "12 bits per sample": ["12 bits"],
    "no height in the frame header": ["height in dnl", "height in dnl, gray", "height 0"],
    "several scans": [
        *(f"{sampling}, one scan a component" for sampling in SAMPLINGS if sampling != "gray"),
        *(f"{sampling}, luma and chroma in two scans" for sampling in SAMPLINGS if sampling != "gray"),
        *("2x2 for all, one scan a component", "height in dnl, one scan a component"),
    ],
    "more than 10 blocks in an MCU": ["eleven blocks in an mcu"],
    "a missing Huffman table": ["no tables, by pillow", "unknown huffman table"],
    "bytes after the end of the image": [
        "progressive, zeros after eoi",
        *("a line feed after eoi", "zeros after eoi", "ones after eoi", "two eois", "two files in one"),
        "a video after eoi",
    ],
    "more data after the scan": ["a restart marker before eoi", "a comment before eoi", "the scan twice"],
    "more data after a scan": ["progressive, a comment between scans", "progressive, quantization between scans"],
    "damaged header": [
        *("no frame", "two frames", "tables only, by pillow", "sampling factor 0", "sampling factor 5"),
        *("huffman table 15", "more codes than bits allow", "segment of length 0", "segment of length 1"),
        *("segment beyond the end", "stray byte between segments"),
        *(f"cut at {length}" for length in (1, 2, 3, 4, 20, 50, 160)),
    ],
    NO_END: [
        *("no eoi", "no eoi, restarts", "half an eoi", "progressive, no eoi"),
        "progressive, the last scan is missing, no eoi",
    ],
    "padding before a marker": ["zeros before eoi", "ones before eoi", "progressive, zeros before eoi"],
    TOO_MUCH: [
        *("a restart marker is missing", "restart interval that the data does not keep"),
        *("progressive, noise before eoi", "progressive, no restart markers"),
    ],
    WRONG_MARKER: ["a restart marker out of turn", "the last interval is missing"],
    ENDS_EARLY: [
        *("no data", "no data and no eoi", "half the data", "half the data and no eoi", "codes of ones only"),
        *("coefficients beyond the last", "a marker amid the data", "a restart marker too much"),
        "cut after a restart marker",
        *("progressive, huge", "progressive, an unused dc symbol of 16 bits"),
        "progressive, the last byte is missing",
    ],
}
"""Files that cannot be tiled, by reason."""


def _refusal(content: bytes) -> NotTileable:
    with pytest.raises(NotTileable) as refused:
        tile_jpeg(content)
    return refused.value


@pytest.fixture(scope="module")
def small_files() -> dict[str, bytes]:
    """Return files of 400 to 2,500 bytes: with one or three components, with and without restarts, and tiled."""
    picture = make_picture(40, 48)
    subsampled = SAMPLINGS["4:2:0"]
    color = write_jpeg(picture, factors=subsampled, quality=60, huffman="best")
    return {
        "gray": write_jpeg(picture[..., 0].copy(), factors=SAMPLINGS["gray"], quality=60),
        "color": color,
        "color with restarts": write_jpeg(picture, factors=subsampled, quality=60, restart_interval=2),
        "one block": write_jpeg(flat(8, 8)[..., 0].copy(), factors=SAMPLINGS["gray"], huffman="best"),
        "tiled": tile_jpeg(color),
        "progressive": by_pillow(picture, progressive=True, restart_marker_blocks=2, quality=60),
    }


def test_files_are_tiled_without_loss_if_they_can_be_and_if_a_decoder_reads_them() -> None:
    tileable, unreadable, others = Counter[str](), Counter[str](), Counter[str]()
    for file in small_corpus():
        counter = others if not file.tileable else tileable if file.readers else unreadable
        counter[check_corpus_file(file)] += 1
    assert set(tileable) == {TILED}
    assert tileable[TILED] > 150
    assert set(unreadable) == {"fractional sampling factors"}
    assert others.total() > 80
    assert TILED not in others


def test_all_images_of_a_kind_are_refused_for_the_same_reason() -> None:
    found = defaultdict[str, set[str]](set)
    for height, width in ((20, 30), (9, 15)):
        for file in untileable_jpegs([(height, width)]):
            error = _refusal(file.content)
            found[file.name.removesuffix(f" {width}x{height}")].add(error.reason)
            says_more = error.reason.startswith("damaged") and error.reason != NO_END
            assert str(error).startswith(f"{error.reason} (") or not says_more, file.name
            assert error.__cause__ is not error
    for reason, names in REASONS.items():
        assert len(reason) <= LONGEST_REASON
        assert {name: found[name] for name in names} == {name: {reason} for name in names}
    assert {_refusal(file.content).reason for file in not_jpegs()} == {"damaged header"}


PROGRESSIVE_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"subsampling": number} for name, number in PILLOW_SAMPLINGS.items()},
    "low quality": {"quality": 3},
    "high quality": {"quality": 100},
    "restarts": {"restart_marker_blocks": 3, "subsampling": 2},
    "wide quantization": {"qtables": [[8] * 63 + [300]]},
    "metadata": {"exif": exif_of(6), "icc_profile": bytes(70_000), "comment": b"a comment", "dpi": (300, 300)},
}


@pytest.mark.parametrize("size", [(8, 8), (17, 35), (33, 16), (90, 130)])
@pytest.mark.parametrize("name", [*PROGRESSIVE_OPTIONS, "gray"])
def test_a_progressive_file_becomes_the_file_that_the_same_encoder_writes_as_baseline(
    name: str, size: tuple[int, int]
) -> None:
    for make in (make_picture, noise):
        picture = make(*size)[..., 0].copy() if name == "gray" else make(*size)
        options = {"restart_marker_blocks": 2} if name == "gray" else PROGRESSIVE_OPTIONS[name]
        progressive, baseline = by_pillow(picture, progressive=True, **options), by_pillow(picture, **options)
        assert tile_jpeg(progressive) == tile_jpeg(baseline)
        assert untile_jpeg(progressive) == untile_jpeg(baseline) == untile_jpeg(tile_jpeg(progressive))


def _write_block(scans: list[tuple[int, int, int, str]]) -> bytes:
    """Return a progressive gray file of one block.

    Args:
        scans: For each scan, its first coefficient, the high and low bit positions of its successive approximation (Ah
            and Al), and its bits. The tables have the codes 0 and 10 for DC symbols 0 and 11, and 0, 10, 110 and 1110
            for AC symbols 0, 9, 10 and 11.
    """
    codes = {
        (0, 0): HuffmanTable(counts=bytes([1, 1]).ljust(16, b"\0"), symbols=b"\x00\x0b"),
        (1, 0): HuffmanTable(counts=bytes([1, 1, 1, 1]).ljust(16, b"\0"), symbols=b"\x00\x09\x0a\x0b"),
    }
    head = write_jpeg(np.full((8, 8), 128, np.uint8), factors=SAMPLINGS["gray"])
    content = patch_sof(head[: scan_start(head) - 10], 0xC2) + dht_segment(codes)
    for first, high, low, bits in scans:
        content += segment(0xDA, bytes([1, 1, 0, first, 63 if first else 0, high << 4 | low]))
        num_bytes = -(-len(bits) // 8)
        content += int(bits.ljust(8 * num_bytes, "1"), 2).to_bytes(num_bytes, "big").replace(b"\xff", b"\xff\0")
    return content + b"\xff\xd9"


def test_coefficients_that_no_baseline_file_has_are_refused() -> None:
    zero, no_ac = (0, 0, 0, "0"), (1, 0, 0, "0")
    good = {
        "zeros": [zero, no_ac],
        "the largest DC difference": [(0, 0, 0, "10" + "1" * 11), no_ac],
        "the largest AC coefficient": [zero, (1, 0, 0, "110" + "1" * 10 + "0")],
        "the least AC coefficient, in two scans": [zero, (1, 0, 1, "10" + "0" * 9 + "0"), (1, 1, 0, "01")],
    }
    for name, scans in good.items():
        assert check_file(name, _write_block(scans)) == TILED, name
    bad = {
        "a DC difference of -2048": [(0, 0, 1, "10" + "01111111111"), (0, 1, 0, "0"), no_ac],
        "an AC coefficient of 11 bits": [zero, (1, 0, 0, "1110" + "1" * 11 + "0")],
        "an AC coefficient of -1024": [zero, (1, 0, 1, "110" + "0111111111" + "0"), (1, 1, 0, "00")],
        "an AC coefficient of 1024": [zero, (1, 0, 1, "110" + "1000000000" + "0"), (1, 1, 0, "00")],
    }
    for name, scans in bad.items():
        content = _write_block(scans)
        assert read_by_pillow(content).shape == (8, 8, 3)
        assert _refusal(content).reason == "coefficients out of range", name


@pytest.mark.parametrize("name", ["gray", "color", "color with restarts", "one block", "tiled", "progressive"])
def test_a_file_truncated_anywhere_is_damaged_even_if_it_ends_in_eoi(name: str, small_files: dict[str, bytes]) -> None:
    content = small_files[name]
    start = scan_start(content)
    for stop in range(len(content)):
        assert _refusal(content[:stop]).reason.startswith("damaged"), f"cut at {stop} of {len(content)}"
        if start <= stop < len(content) - 2 and name != "one block":
            cut = content[:stop].rstrip(b"\xff") + b"\xff\xd9"
            is_damaged = _refusal(cut).reason in (ENDS_EARLY, WRONG_MARKER)
            # A progressive file may be cut between its scans, or in the headers between them.
            assert is_damaged or name == "progressive", f"cut at {stop} of {len(content)}"


def test_a_file_with_wrong_bytes_is_refused_or_keeps_its_pixels(small_files: dict[str, bytes]) -> None:
    rng = random.Random(0)
    contents = [content for name, content in small_files.items() if name != "tiled"]
    outcomes = set()
    for _ in range(200):
        content = bytearray(rng.choice(contents))
        for _ in range(rng.choice((1, 1, 3))):
            content[rng.randrange(len(content))] = rng.choice((0, 0xFF, 0xD9, rng.randrange(256)))
        outcomes.add(check_file(content.hex(), bytes(content)))
    assert {TILED, "damaged header", ENDS_EARLY} <= outcomes


def test_the_last_byte_of_an_interval_is_filled_with_ones() -> None:
    # A block of middle gray has two codes, a DC difference and an end of block. Both codes are 0, because their tables
    # have no other symbols.
    options: dict[str, Any] = {"factors": SAMPLINGS["gray"], "padding": 0}
    for width, scan in ((40, b"\x00\x3f"), (24, b"\x03"), (8, b"\x3f")):
        assert take_apart(tile_jpeg(write_jpeg(np.full((8, width), 128, np.uint8), **options))).scan == scan
    wide = write_jpeg(np.full((8, 88), 128, np.uint8), **options)
    assert take_apart(tile_by(wide, 1)).intervals == [b"\x3f"] * 11
    assert take_apart(untile_jpeg(tile_by(wide, 1))).intervals == [b"\x00\x00\x03"]


def test_a_huffman_table_with_a_code_of_all_ones_is_damage() -> None:
    content = write_jpeg(np.full((8, 8), 128, np.uint8), factors=SAMPLINGS["gray"])
    files = []
    for counts in ([2], [1, 1]):
        table = HuffmanTable(counts=bytes(counts).ljust(16, b"\0"), symbols=b"\x00\x01")
        dht, start = dht_segment({(0, 0): table, (1, 0): table}), scan_start(content)
        files.append(content[: start - 10] + dht + content[start - 10 : start] + b"\x3f\xff\xd9")
    assert _refusal(files[0]).reason == "damaged header"
    assert check_file("a table of two codes", files[1]) == TILED


def test_an_interval_is_about_64_pixels_wide() -> None:
    """If no divisor gives 32 to 128 pixels, an interval is one MCU (if that is wide enough) or the whole row."""
    of_16_pixels = {32: 4, 21: 3, 10: 5, 22: 2, 31: 1}
    of_8_pixels = {64: 8, 63: 9, 1: 1, 62: 62, 47: 47}
    for width, intervals in ((16, of_16_pixels), (8, of_8_pixels), (32, {20: 2, 7: 1})):
        assert {row_mcus: choose_interval(row_mcus, width) for row_mcus in intervals} == intervals


# Predicting whether a tiled file can be decoded


def test_heads_that_no_image_has_are_damage() -> None:
    content = write_jpeg(flat(8, 8))
    narrow = patch(patch(content, 0xC0, 3, 0), 0xC0, 4, 0)
    for rewrite in (tile_jpeg, untile_jpeg):
        assert_raises(NotTileable, None, rewrite, narrow[: scan_start(narrow)] + b"\xff\xd9")
    for payload in (b"", b"\0", b"\0\1\0", b"\0\1\0\0"):  # These DRI segments have the wrong length.
        parts = (segment(0xDD, payload), "header", "dqt", "sof", "dht")
        assert _refusal(write_jpeg(make_picture(8, 8), parts=parts)).reason == "damaged header"


PICTURE = make_picture(40, 72)
GOOD = by_pillow(PICTURE)
PROFILE = np.random.default_rng(0).bytes(70_000)


RIGHT = {"certain", "not tileable", "uncertain, but decodable", "uncertain and not decodable"}
"""The outcomes that are allowed."""


def _outcome(content: bytes) -> str:
    """Return the result of the check before packing, and whether the result is right."""
    try:
        tiled = tile_jpeg(content)
    except NotTileable:
        return "not tileable"
    is_certain = decodes_if_tileable(content, max_pixels=DEFAULT_MAX_PIXELS)
    assert decodes_if_tileable(tiled, max_pixels=DEFAULT_MAX_PIXELS) == is_certain
    try:
        decode_image(content)
        decode_image(tiled)
    except ValueError as error:
        return f"certain, but {error}" if is_certain else "uncertain and not decodable"
    return "certain" if is_certain else "uncertain, but decodable"


def test_no_file_with_random_damage_is_certain_but_not_decodable() -> None:
    originals = write_originals()
    contents = (make_damaged_file(seed, originals)[0] for seed in range(900))
    outcomes = Counter(_outcome(content) for content in contents if content.startswith(b"\xff\xd8\xff"))
    assert set(outcomes) <= RIGHT
    assert outcomes["certain"] > 60


def _without(content: bytes, marker: int) -> bytes:
    start, end = next((start, end) for found, start, end in segments_of(content) if found == marker)
    return content[:start] + content[end:]


CERTAINTY = {
    "certain": [
        *(make_jpeg(name, PICTURE, factors=factors).content for name, factors in SAMPLINGS.items()),
        by_pillow(PICTURE, icc_profile=PROFILE, exif=exif_of(6), comment=b"a comment", dpi=(300, 300)),
        by_pillow(PICTURE, keep_rgb=True),
        by_pillow(PICTURE[..., 0].copy(), icc_profile=PROFILE[:500]),
        tile_jpeg(GOOD),
    ],
    "uncertain and not decodable": [  # These files can still be tiled.
        _without(GOOD, 0xDB),
        make_jpeg("too wide", np.zeros((8, 65_528, 3), np.uint8), factors=((1, 1),)).content,
    ],
    "uncertain, but decodable": [  # libjpeg warns about these files, but their pixels are right.
        GOOD.replace(b"JFIF\0\1", b"JFIF\0\2"),
        GOOD[:2] + segment(0xEE, b"Adobe\0\x64\0\0\0\0\7") + _without(GOOD, 0xE0)[2:],
        _without(by_pillow(PICTURE, icc_profile=PROFILE), 0xE2),
        GOOD[:2] + segment(0xE2, b"ICC_PROFILE\0\1\1") + GOOD[2:],
    ],
}


def test_undamaged_files_of_common_encoders_are_certain_and_no_file_of_the_corpus_is_wrongly() -> None:
    for expected, contents in CERTAINTY.items():
        assert {_outcome(content) for content in contents} == {expected}
    outcomes = Counter(_outcome(file.content) for file in small_corpus())
    assert outcomes["certain"] > 140
    assert set(outcomes) <= RIGHT


def test_the_limit_of_pixels_is_that_of_decoding() -> None:
    assert decodes_if_tileable(GOOD, max_pixels=40 * 72)
    assert not decodes_if_tileable(GOOD, max_pixels=40 * 72 - 1)
    assert_raises(TooManyPixels, None, decode_image, GOOD, max_pixels=40 * 72 - 1)


# Huffman tables


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.integers(0, 255), st.integers(0, 40).map((2).__pow__), min_size=1), st.integers(0, 2))
@example(dict(enumerate([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181])), 0)
@example({symbol: 2**symbol for symbol in range(40)}, 0)
@example({7: 1}, 0)
@example(dict.fromkeys(range(256), 1), 0)
def test_a_table_is_the_one_of_t81(counts: dict[int, int], more: int) -> None:
    array = np.zeros(256, np.int64)
    array[list(counts)] = [count + more * symbol for symbol, count in counts.items()]
    num_codes, symbols = make_best_table(array)
    expected = HuffmanTable.from_counts({symbol: int(array[symbol]) for symbol in counts})
    assert HuffmanTable(counts=num_codes, symbols=symbols) == expected


def test_files_are_those_that_an_encoder_of_t81_writes_with_the_best_tables_for_their_symbols() -> None:
    """The tables have no unused symbols, and there are no unused tables."""
    kinds = {**TABLES, **ODD_FRAMES, **{name: {"factors": factors} for name, factors in FACTORS.items()}}
    best = {"huffman": "best", "padding": 1, "fill": 0, "fill_in_scan": 0, "one_dht": False}
    best["parts"] = ("header", "dqt", "sof", "dht", "dri")
    for (name, kind), size in product(kinds.items(), ((19, 33), (40, 300))):
        options = {"factors": SAMPLINGS["4:2:0"], **kind}
        picture = gray_or_color(options["factors"], make_picture(*size))
        content = write_jpeg(picture, **options)
        for rewritten in map(take_apart, (tile_jpeg(content), untile_jpeg(content))):
            interval = next((int.from_bytes(dri[4:], "big") for dri in rewritten.all_of(0xDD)), None)
            by_t81 = take_apart(write_jpeg(picture, **{**options, **best, "restart_interval": interval}))
            assert rewritten.scan == by_t81.scan, name
            assert tables_of(rewritten) == tables_of(by_t81), name


def tables_of(parts: Parts) -> bytes:
    return b"".join(sorted(table[4:] for table in parts.all_of(0xC4)))
