"""Huffman tables: DHT segments, and optimised tables for given counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.head import JpegHead
from shardio.images.jpeg.standard import (
    DHT,
    FIRST_AC_TABLE,
    MAX_CODE_LENGTH,
    MAX_DC_SYMBOL,
    MAX_TABLE_ID,
    NUM_HUFFMAN_TABLES,
    marker_bytes,
)
from shardio.images.kernel import compiled_functions
from shardio.images.kernel.compiled.records import HUFFMAN_TABLE

Counts = NDArray[np.int64]
"""int64 [256]: how often each symbol occurs."""


class HuffmanTable(NamedTuple):
    """A Huffman table as stored in a DHT segment (B.2.4.2).

    Attributes:
        lengths: 16 bytes: the number of codes of each length, 1 to 16 bits.
        symbols: The symbols in the order of their codes.
    """

    lengths: bytes
    symbols: bytes


def read_tables(content: bytes, head: JpegHead) -> dict[int, HuffmanTable]:
    """Return the tables in force when the scan begins, by index: DC 0 to 3, then AC 0 to 3.

    Raises:
        ValueError: If a DHT segment is damaged.
    """
    tables = {}
    for segment in head.segments:
        if segment.marker != DHT:
            continue
        offset = segment.payload_start
        while offset < segment.stop:
            is_ac, table_id = content[offset] >> 4, content[offset] & 15
            lengths = content[offset + 1 : offset + 1 + MAX_CODE_LENGTH]
            stop = offset + 1 + MAX_CODE_LENGTH + sum(lengths)
            symbols = content[offset + 1 + MAX_CODE_LENGTH : stop]
            is_named = is_ac <= 1 and table_id <= MAX_TABLE_ID
            is_too_long = stop > segment.stop or len(symbols) > 256
            if not is_named or is_too_long or (not is_ac and max(symbols, default=0) > MAX_DC_SYMBOL):
                raise ValueError(f"the Huffman table at byte {offset} is damaged")
            tables[FIRST_AC_TABLE * is_ac + table_id] = HuffmanTable(lengths, symbols)
            offset = stop
    return tables


def dump_tables(tables: dict[int, HuffmanTable]) -> bytes:
    """Return one DHT segment with these tables, given by index."""
    body = b"".join(
        bytes([(index // FIRST_AC_TABLE) << 4 | index % FIRST_AC_TABLE]) + table.lengths + table.symbols
        for index, table in sorted(tables.items())
    )
    return marker_bytes(DHT) + (2 + len(body)).to_bytes(2, "big") + body


def pack_tables(tables: dict[int, HuffmanTable]) -> NDArray[np.void]:
    """Return Huffman tables given by index as the compiled functions need them, HUFFMAN_TABLE [8].

    Raises:
        ValueError: If a table has more codes than its lengths allow.
    """
    packed = np.zeros(NUM_HUFFMAN_TABLES, HUFFMAN_TABLE)
    for index, (lengths, symbols) in tables.items():
        code = 0
        for length, num_codes in enumerate(lengths, 1):
            # The code of all ones stays unused (C.2).
            if code + num_codes > (1 << length) - (num_codes > 0):
                raise ValueError("a Huffman table has more codes than its lengths allow")
            code = (code + num_codes) << 1
        packed[index] = np.frombuffer(lengths, np.uint8), np.frombuffer(symbols.ljust(256, b"\0"), np.uint8)
    return packed


def make_best_table(counts: Counts) -> HuffmanTable:
    """Return the Huffman table for symbols with these counts, built as in K.2 and libjpeg.

    It needs the fewest bits, except for the code that stays unused and the way codes above 16 bits are shortened.
    """
    return HuffmanTable(*compiled_functions().make_best_table(counts))
