"""Recode a scan's entropy-coded data with other Huffman tables and restart intervals, but the same coefficients.

The data is decoded once, to tokens, whose counts determine the best Huffman tables. Then the tokens are written.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.standard import NUM_HUFFMAN_TABLES
from shardio.images.kernel import compiled_functions
from shardio.images.kernel.compiled.records import (
    CODED_SCAN,
    DAMAGED,
    EXCESS_DATA,
    OUT_OF_RANGE,
    READ_PADDING,
    READER,
    RECODED,
    SCAN,
    WRITER,
    WRONG_MARKER,
)
from shardio.images.scratch import scratch

_MESSAGES = {
    DAMAGED: "damaged: the data ends early or contains an unknown code",
    EXCESS_DATA: "damaged: there is more data than the image needs",
    WRONG_MARKER: "damaged: a restart marker is missing or wrong",
    OUT_OF_RANGE: "coefficients out of range",
}

_SLACK = 64
"""Bytes at the end of arrays that are copied 32 bytes at a time, and tokens of an incomplete block."""


class Scan(NamedTuple):
    """A scan to recode.

    Attributes:
        data: uint8, the file from the scan's first byte on.
        tables: HUFFMAN_TABLE [8], the scan's Huffman tables.
        components: COMPONENT [components].
        blocks: int64 [blocks per MCU], the index of each block's component.
        num_mcus: The number of MCUs in the scan.
        interval: MCUs between restart markers; 0 if there are none.
    """

    data: NDArray[np.uint8]
    tables: NDArray[np.void]
    components: NDArray[np.void]
    blocks: NDArray[np.int64]
    num_mcus: int
    interval: int


class Tokens(NamedTuple):
    """A scan as symbols and the bits that follow their codes.

    Attributes:
        tokens: uint32 [tokens], valid until this thread reads the next scan.
        stops: int64 [intervals], the end of each restart interval in the tokens.
        counts: int64 [8, 256], how often each symbol of each Huffman table occurs.
        stop: The offset of the scan's end in its data.
    """

    tokens: NDArray[np.uint32]
    stops: NDArray[np.int64]
    counts: NDArray[np.int64]
    stop: int


class ScanError(ValueError):
    """A scan's data violates the standard or the limits of a baseline image."""


class ExcessDataError(ScanError):
    """There is more data than the image needs."""


def read_tokens(scan: Scan, interval: int) -> Tokens:
    """Read a scan, to write it with another restart interval.

    Args:
        scan: The scan.
        interval: MCUs between restart markers in the data to write; 0 for none.

    Raises:
        ScanError: If the scan cannot be recoded.
    """
    num_intervals = -(-scan.num_mcus // interval) if interval else 1
    # A token has at least one bit, and a block at most 64 tokens. Each interval may get a token that means nothing.
    max_tokens = min(8 * len(scan.data), 64 * scan.num_mcus * len(scan.blocks)) + num_intervals + _SLACK
    tokens = scratch("tokens", 4 * max_tokens).view(np.uint32)
    unstuffed = scratch("scan", len(scan.data) + READ_PADDING)
    stops = np.empty(num_intervals, np.int64)
    reader = np.empty(1, READER)
    call = np.zeros(1, SCAN)
    call[0] = (
        *(scan.data.ctypes.data, len(scan.data), scan.tables.ctypes.data),
        *(scan.components.ctypes.data, len(scan.components), scan.blocks.ctypes.data, len(scan.blocks)),
        *(scan.num_mcus, scan.interval, interval, reader.ctypes.data, unstuffed.ctypes.data, len(unstuffed)),
        *(tokens.ctypes.data, len(tokens), stops.ctypes.data, num_intervals),
        *(0, 0, 0, 0),
    )
    compiled_functions().read_scan(call)
    result = call[0]
    if result["outcome"] != RECODED:
        kind = ExcessDataError if result["outcome"] == EXCESS_DATA else ScanError
        raise kind(f"{_MESSAGES[int(result['outcome'])]} (in MCU {result['mcu']} of {scan.num_mcus})")
    counts = reader["counts"][0].reshape(NUM_HUFFMAN_TABLES, 256)
    return Tokens(tokens[: result["num_tokens"]], stops, counts, int(result["stop"]))


def write_tokens(tokens: Tokens, tables: NDArray[np.void]) -> tuple[bytes, NDArray[np.int64]]:
    """Write a scan.

    Args:
        tokens: The scan.
        tables: HUFFMAN_TABLE [8], which have codes for all symbols of the scan.

    Returns:
        The data, and the bytes of each restart interval without its marker, int64 [intervals].
    """
    num_tokens, num_intervals = len(tokens.tokens), len(tokens.stops)
    # A token has at most 27 bits. At worst each byte is 0xFF and is followed by a stuffed 0; an interval ends in a
    # partial byte and a marker.
    between = scratch("scan", 4 * num_tokens + _SLACK)
    data = scratch("recoded", 8 * num_tokens + 4 * num_intervals + _SLACK)
    lengths = np.empty(num_intervals, np.int64)
    writer = np.empty(1, WRITER)
    call = np.zeros(1, CODED_SCAN)
    call[0] = (
        *(tokens.tokens.ctypes.data, num_tokens, tokens.stops.ctypes.data, num_intervals),
        *(tables.ctypes.data, writer.ctypes.data, between.ctypes.data, len(between)),
        *(data.ctypes.data, len(data), lengths.ctypes.data, 0),
    )
    compiled_functions().write_scan(call)
    return data[: call[0]["size"]].tobytes(), lengths
