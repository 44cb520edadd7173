"""Huffman tables: DHT segments, tables for decoding, and optimised tables for given counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jit import cached_jit
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

LOOKUP_BITS = 9
"""Codes of up to this many bits are decoded by one lookup."""

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


CODING = np.dtype(
    [
        ("short", np.uint16, 1 << LOOKUP_BITS),  # By the next 9 bits: a code's length << 8 | its symbol; 0 if longer.
        ("limits", np.int64, MAX_CODE_LENGTH + 1),  # By length: the smallest number that neither is nor begins a code.
        ("offsets", np.int64, MAX_CODE_LENGTH + 1),  # By length: what to add to a code for the index of its symbol.
        ("symbols", np.uint8, 256),
        ("counts", np.int64, 256),  # How many times each symbol will be written.
        ("codes", np.uint32, 256),  # How to write each symbol: its code's length << 16 | the code.
    ],
    align=True,
)
"""The tables by which compiled code reads symbols, counts them, and writes them with another Huffman table."""


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
    lengths, symbols = _make_best_table(counts)
    return HuffmanTable(lengths.astype(np.uint8).tobytes(), symbols.astype(np.uint8).tobytes())


@cached_jit
def _make_best_table(counts):  # type: ignore[no-untyped-def]  # numba infers the types
    """Follow figures K.1 to K.4: find code sizes, count codes by size, limit them to 16 bits, sort symbols by size."""
    frequency = np.zeros(257, np.int64)
    frequency[:256] = counts
    frequency[256] = 1  # Then no symbol gets the code of all ones.
    code_size = np.zeros(257, np.int64)
    others = np.full(257, -1, np.int64)
    while True:
        # Find the two least frequent trees. Of equal ones, take that of the last symbol.
        first = second = -1
        for i in range(257):
            if frequency[i] > 0:
                if first < 0 or frequency[i] <= frequency[first]:
                    second = first
                    first = i
                elif second < 0 or frequency[i] <= frequency[second]:
                    second = i
        if second < 0:
            break
        frequency[first] += frequency[second]
        frequency[second] = 0
        code_size[first] += 1
        while others[first] >= 0:
            first = others[first]
            code_size[first] += 1
        others[first] = second
        code_size[second] += 1
        while others[second] >= 0:
            second = others[second]
            code_size[second] += 1

    num_codes = np.zeros(258, np.int64)  # By length.
    for i in range(257):
        if code_size[i]:
            num_codes[code_size[i]] += 1
    for length in range(257, MAX_CODE_LENGTH, -1):
        while num_codes[length] > 0:
            shorter = length - 2
            while num_codes[shorter] == 0:
                shorter -= 1
            num_codes[length] -= 2
            num_codes[length - 1] += 1
            num_codes[shorter + 1] += 2
            num_codes[shorter] -= 1
    longest = MAX_CODE_LENGTH
    while num_codes[longest] == 0:
        longest -= 1
    num_codes[longest] -= 1  # The unused code.

    symbols = np.zeros(256, np.int64)
    num_symbols = 0
    for length in range(1, 258):
        for i in range(256):
            if code_size[i] == length:
                symbols[num_symbols] = i
                num_symbols += 1
    return num_codes[1 : MAX_CODE_LENGTH + 1], symbols[:num_symbols]
