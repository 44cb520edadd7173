"""Tiling a JPEG, and undoing it: the same coefficients and metadata, with and without restart intervals.

Read with restart intervals of a few MCUs, whose places a table in the file tells
(:mod:`shardio.images.jpeg.tile_table`), a crop can be decoded without the rest of the picture.
"""

from __future__ import annotations

import math

import numpy as np

from shardio.images.jpeg.markers import DHT, DRI, EOI, SOI, SOS, JpegHead, read_head, why_irregular
from shardio.images.jpeg.tile_table import dump_tile_table, is_tile_table
from shardio.images.tiling.huffman import (
    NUM_SLOTS,
    dump_tables,
    make_best_table,
    make_codes,
    make_decoding,
    read_tables,
)
from shardio.images.tiling.scan import ScanError, ScanLayout, count_symbols, write_scan

TILE_WIDTH = 64
"""Pixels that a restart interval had best be wide."""

NARROWEST, WIDEST = TILE_WIDTH // 2, TILE_WIDTH * 2
"""Pixels that it may be wide if the MCU row can be divided so."""

NARROWEST_MCU = 16
"""Pixels of an MCU that may be an interval of its own, if the row cannot be divided otherwise."""


class NotTileable(ValueError):  # noqa: N818  # The image is in order; it is only not one of those that can be tiled.
    """An image cannot be tiled.

    Attributes:
        reason: Why not, in a few words that are the same for all images of a kind.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason.split(" (")[0]


def tile_jpeg(content: bytes) -> bytes:
    """Rewrite a JPEG with restart intervals, a tile table and the best Huffman tables, without loss.

    All coefficients, quantisation tables and metadata segments stay as they are. Tiling what is tiled already gives
    the same bytes.

    Raises:
        NotTileable: If the image is progressive, damaged, or of another kind that stays as it is.
    """
    head = _read(content)
    return _recode(content, head, choose_interval(head.num_mcus[1], head.mcu_size[1]))


def choose_interval(row_mcus: int, mcu_width: int) -> int:
    """Return how many MCUs of a row are an interval: a divisor of the row, and the row itself if no other will do.

    Args:
        row_mcus: MCUs in a row.
        mcu_width: Pixels.
    """
    divisors = [i for i in range(1, row_mcus + 1) if row_mcus % i == 0 and NARROWEST <= i * mcu_width <= WIDEST]
    if divisors:
        return min(divisors, key=lambda i: abs(math.log(i * mcu_width / TILE_WIDTH)))
    return 1 if mcu_width >= NARROWEST_MCU else row_mcus


def untile_jpeg(content: bytes) -> bytes:
    """Rewrite a JPEG without restart intervals and tile table, with the best Huffman tables, without loss.

    Raises:
        NotTileable: As :func:`tile_jpeg` does.
    """
    return _recode(content, _read(content), 0)


def _read(content: bytes) -> JpegHead:
    try:
        head = read_head(content)
    except ValueError as error:
        raise NotTileable(f"damaged head ({error})") from error
    reason = why_irregular(head)
    if reason is not None:
        raise NotTileable(reason)
    return head


def _recode(content: bytes, head: JpegHead, interval: int) -> bytes:
    data = np.frombuffer(content, np.uint8, offset=head.scan_start)
    try:
        tables = read_tables(content, head)
        layout = _lay_out(content, head, interval)
        used = {int(slot) for slot in (*layout.dc_slot, *layout.ac_slot)}
        if not used <= tables.keys():
            raise NotTileable("a missing Huffman table")
        decoding = make_decoding({slot: tables[slot] for slot in used})
        counts, stop = count_symbols(data, layout, decoding)
    except NotTileable:
        raise
    except ScanError as error:
        raise NotTileable(str(error)) from error
    except ValueError as error:
        raise NotTileable(f"damaged head ({error})") from error
    _check_end(content, head.scan_start + stop)
    best = {slot: make_best_table(counts[slot]) for slot in used}
    codes = np.zeros((NUM_SLOTS, 256), np.uint32)
    for slot, table in best.items():
        codes[slot] = make_codes(*table)
    scan, lengths = write_scan(data, layout, decoding, codes, counts)
    return _join(content, head, dump_tables(best), interval, lengths, scan)


def _lay_out(content: bytes, head: JpegHead, interval: int) -> ScanLayout:
    """Return the layout of a scan of all components; a lone component's MCU is one block (A.2.2)."""
    rows, row_mcus = head.num_mcus
    num_components = len(head.factors)
    num_blocks = [1] if num_components == 1 else [across * down for across, down in head.factors]
    scan = head.segments[-1]
    slots = [content[scan.start + 6 + 2 * i] for i in range(num_components)]
    if any(slot >> 4 > 3 or slot & 15 > 3 for slot in slots):
        raise NotTileable("damaged head (the scan names a Huffman table above 3)")
    return ScanLayout(
        num_mcus=rows * row_mcus,
        component=np.repeat(np.arange(num_components), num_blocks),
        dc_slot=np.array([slot >> 4 for slot in slots]),
        ac_slot=np.array([4 + (slot & 15) for slot in slots]),
        old_interval=head.restart_interval,
        new_interval=interval,
    )


def _check_end(content: bytes, stop: int) -> None:
    """Raise NotTileable unless the scan is followed by EOI and nothing else."""
    while content[stop : stop + 2] == b"\xff\xff":  # Fill bytes (B.1.1.2).
        stop += 1
    if content[stop : stop + 2] != bytes([0xFF, EOI]):
        raise NotTileable("damaged: no end of the image" if stop + 2 > len(content) else "more after the scan")
    if stop + 2 != len(content):
        raise NotTileable("bytes after the end of the image")


def _join(content: bytes, head: JpegHead, tables: bytes, interval: int, lengths: np.ndarray, scan: bytes) -> bytes:
    """Return the file: all other segments in their order, then what is new, then the scan."""
    replaced = {DHT, DRI, SOS}
    kept = [
        content[segment.start : segment.stop]
        for segment in head.segments
        if segment.marker not in replaced and not is_tile_table(content, segment)
    ]
    tiles = []
    if interval:
        try:
            table = dump_tile_table(head.height, head.width, interval, lengths)
        except ValueError as error:
            raise NotTileable(f"too many intervals for a tile table ({error})") from error
        tiles = [bytes([0xFF, DRI, 0, 4]) + interval.to_bytes(2, "big"), table]
    start = head.segments[-1]
    return b"".join(
        [bytes([0xFF, SOI]), *kept, tables, *tiles, content[start.start : start.stop], scan, bytes([0xFF, EOI])]
    )
