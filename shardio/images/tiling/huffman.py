"""Huffman tables: DHT segments, tables for decoding, and optimised tables for given counts."""

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
from shardio.images.kernel.compiled.records import CODING, LOOKUP_BITS

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


def make_coding(tables: dict[int, HuffmanTable]) -> NDArray[np.void]:
    """Return decoding tables for Huffman tables given by index, CODING [8] (F.2.2.3, with a lookup for short codes).

    Raises:
        ValueError: If a table has more codes than its lengths allow.
    """
    coding = np.zeros(NUM_HUFFMAN_TABLES, CODING)
    for index, (lengths, symbols) in tables.items():
        values = np.frombuffer(symbols, np.uint8)
        coding["symbols"][index, : len(values)] = values
        code = first = 0
        for length, num_codes in enumerate(lengths, 1):
            stop = code + num_codes
            # The code of all ones stays unused (C.2).
            if stop > (1 << length) - (num_codes > 0):
                raise ValueError("a Huffman table has more codes than its lengths allow")
            coding["limits"][index, length], coding["offsets"][index, length] = stop, first - code
            if length <= LOOKUP_BITS:
                span = 1 << (LOOKUP_BITS - length)
                entries = values[first : first + num_codes].astype(np.uint16) | length << 8
                coding["short"][index, code * span : stop * span] = np.repeat(entries, span)
            code, first = stop << 1, first + num_codes
    return coding


def make_codes(table: HuffmanTable) -> NDArray[np.uint32]:
    """Return the code of each symbol, uint32 [256]: its length << 16 | the code, or 0 if it has none (C.2)."""
    codes = np.zeros(256, np.uint32)
    code = first = 0
    for length, num_codes in enumerate(table.lengths, 1):
        for symbol in table.symbols[first : first + num_codes]:
            codes[symbol] = length << 16 | code
            code += 1
        first += num_codes
        code <<= 1
    return codes


def make_best_table(counts: Counts) -> HuffmanTable:
    """Return the Huffman table for symbols with these counts, built as in K.2 and libjpeg.

    It needs the fewest bits, except for the code that stays unused and the way codes above 16 bits are shortened.
    """
    return HuffmanTable(*compiled_functions().make_best_table(counts))
