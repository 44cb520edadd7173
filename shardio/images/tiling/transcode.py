"""Tile and untile JPEGs: add or remove restart intervals, and keep the coefficients and the metadata.

A tiled JPEG has restart intervals of a few MCUs, and a table that locates them
(:mod:`shardio.images.jpeg.tile_table`). So a crop can be decoded without the rest of the image.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.head import JpegHead, read_head, why_irregular
from shardio.images.jpeg.standard import (
    DHT,
    DRI,
    EOI,
    FIRST_AC_TABLE,
    MAX_TABLE_ID,
    SOI,
    marker_bytes,
)
from shardio.images.jpeg.tile_table import dump_tile_table, is_tile_table
from shardio.images.jpeg.verdict import write_harmless
from shardio.images.kernel.compiled.records import COMPONENT
from shardio.images.tiling.huffman import dump_tables, make_best_table, pack_tables, read_tables
from shardio.images.tiling.scan import ExcessDataError, Scan, ScanError, read_tokens, write_tokens

TILE_WIDTH = 64
"""The preferred width of a restart interval, in pixels."""

MIN_WIDTH, MAX_WIDTH = TILE_WIDTH // 2, TILE_WIDTH * 2
"""The permitted widths of an interval, in pixels, if the MCU row can be divided accordingly."""

MIN_LONE_MCU_WIDTH = 16
"""The minimum width, in pixels, of an MCU that may be an interval alone, in a row without a suitable divisor."""


class NotTileable(ValueError):  # noqa: N818  # Nothing is wrong with the image; it just cannot be tiled.
    """An image cannot be tiled.

    Attributes:
        reason: The reason in a few words, the same for all images of a kind.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason.split(" (")[0]


def tile_jpeg(content: bytes) -> bytes:
    """Rewrite a JPEG without loss, with restart intervals, a tile table and optimised Huffman tables.

    All coefficients, quantisation tables and metadata segments stay as they are. Tiling a tiled file changes nothing.

    Raises:
        NotTileable: If the image is progressive, damaged, or of another kind that cannot be tiled.
    """
    head = _read_head(content)
    return _transcode(content, head, choose_interval(head.num_mcus[1], head.mcu_size[1]))


def choose_interval(row_mcus: int, mcu_width: int) -> int:
    """Return the number of MCUs in an interval: a divisor of the MCU row, or one MCU or the whole row.

    Args:
        row_mcus: MCUs in a row.
        mcu_width: The width of an MCU in pixels.
    """
    divisors = [i for i in range(1, row_mcus + 1) if row_mcus % i == 0 and MIN_WIDTH <= i * mcu_width <= MAX_WIDTH]
    if divisors:
        return min(divisors, key=lambda i: abs(math.log(i * mcu_width / TILE_WIDTH)))
    return 1 if mcu_width >= MIN_LONE_MCU_WIDTH else row_mcus


def untile_jpeg(content: bytes) -> bytes:
    """Rewrite a JPEG without loss, with optimised Huffman tables and no restart intervals or tile table.

    Raises:
        NotTileable: If the image is progressive, damaged, or of another kind that cannot be tiled.
    """
    return _transcode(content, _read_head(content), 0)


def _read_head(content: bytes) -> JpegHead:
    try:
        head = read_head(content)
    except ValueError as error:
        raise NotTileable(f"damaged header ({error})") from error
    reason = why_irregular(head)
    if reason is not None:
        raise NotTileable(reason)
    return head


def _transcode(content: bytes, head: JpegHead, interval: int) -> bytes:
    try:
        scan = _read_scan(content, head)
    except NotTileable:
        raise
    except ValueError as error:
        raise NotTileable(f"damaged header ({error})") from error
    try:
        tokens = read_tokens(scan, interval)
    except ScanError as error:
        is_padding = isinstance(error, ExcessDataError) and write_harmless(content, head) is not None
        raise NotTileable("padding before a marker" if is_padding else str(error)) from error
    _check_end(content, head.scan_start + tokens.stop)
    indices = np.flatnonzero(tokens.counts.any(axis=1)).tolist()
    tables = {index: make_best_table(tokens.counts[index]) for index in indices}
    data, lengths = write_tokens(tokens, pack_tables(tables))
    return _join(content, head, dump_tables(tables) + _dump_intervals(head, interval, lengths), data)


def _read_scan(content: bytes, head: JpegHead) -> Scan:
    """Return a scan of all components. The MCU of a single component is one block (A.2.2)."""
    tables = read_tables(content, head)
    rows, row_mcus = head.num_mcus
    num_components = len(head.factors)
    num_blocks = [1] if num_components == 1 else [across * down for across, down in head.factors]
    header = head.segments[-1]
    table_ids = [content[header.start + 6 + 2 * i] for i in range(num_components)]
    dc_ids, ac_ids = [ids >> 4 for ids in table_ids], [ids & 15 for ids in table_ids]
    if max(*dc_ids, *ac_ids) > MAX_TABLE_ID:
        raise NotTileable(f"damaged header (the scan names a Huffman table above {MAX_TABLE_ID})")
    used = {*dc_ids, *(FIRST_AC_TABLE + table_id for table_id in ac_ids)}
    if not used <= tables.keys():
        raise NotTileable("a missing Huffman table")
    components = np.zeros(num_components, COMPONENT)
    components["dc_table"], components["ac_table"] = dc_ids, FIRST_AC_TABLE + np.array(ac_ids)
    return Scan(
        data=np.frombuffer(content, np.uint8, offset=head.scan_start),
        tables=pack_tables({index: tables[index] for index in used}),
        components=components,
        blocks=np.repeat(np.arange(num_components), num_blocks),
        num_mcus=rows * row_mcus,
        interval=head.restart_interval,
    )


def _check_end(content: bytes, stop: int) -> None:
    """Raise NotTileable unless the scan is followed by EOI and nothing else."""
    while content[stop : stop + 2] == b"\xff\xff":  # Fill bytes (B.1.1.2).
        stop += 1
    if content[stop : stop + 2] != marker_bytes(EOI):
        is_truncated = stop + 2 > len(content)
        raise NotTileable("damaged: the end-of-image marker is missing" if is_truncated else "more data after the scan")
    if stop + 2 != len(content):
        raise NotTileable("bytes after the end of the image")


def _dump_intervals(head: JpegHead, interval: int, lengths: NDArray[np.int64]) -> bytes:
    """Return a DRI segment and a tile table, or nothing without restart intervals."""
    if not interval:
        return b""
    try:
        table = dump_tile_table(head.height, head.width, interval, lengths)
    except ValueError as error:
        raise NotTileable(f"too many intervals for a tile table ({error})") from error
    return marker_bytes(DRI) + b"\0\4" + interval.to_bytes(2, "big") + table


def _join(content: bytes, head: JpegHead, tables: bytes, data: bytes) -> bytes:
    """Return the file: the other segments in their order, then the new tables, then the scan."""
    *segments, scan_header = head.segments
    kept = [
        content[segment.start : segment.stop]
        for segment in segments
        if segment.marker not in {DHT, DRI} and not is_tile_table(content, segment)
    ]
    header = content[scan_header.start : scan_header.stop]
    return b"".join([marker_bytes(SOI), *kept, tables, header, data, marker_bytes(EOI)])
