"""Huffman tables: as a DHT segment states them, for decoding, and the best ones for given counts (ITU-T T.81)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.compiled import compiled
from shardio.images.jpeg.markers import DHT, JpegHead

MAX_LENGTH = 16
"""Bits of a code at the most."""

SHORT = 9
"""Bits of the codes that are found by one look."""

MAX_DC_SYMBOL = 15
"""libjpeg refuses tables with larger ones (jdhuff.c), used or not."""

NUM_SLOTS = 8
"""Tables that a scan can name: DC 0 to 3, then AC 0 to 3."""

Counts = NDArray[np.int64]
"""int64 [256]: how often each symbol comes."""


def read_tables(content: bytes, head: JpegHead) -> dict[int, tuple[bytes, bytes]]:
    """Return the tables that hold when the scan begins: by slot, the number of codes of each length, and the symbols.

    Raises:
        ValueError: If a DHT segment is damaged.
    """
    tables = {}
    for segment in head.segments:
        if segment.marker != DHT:
            continue
        position = segment.payload_start
        while position < segment.stop:
            kind, number = content[position] >> 4, content[position] & 15
            lengths = content[position + 1 : position + 1 + MAX_LENGTH]
            stop = position + 1 + MAX_LENGTH + sum(lengths)
            symbols = content[position + 1 + MAX_LENGTH : stop]
            is_too_long = stop > segment.stop or len(symbols) > 256
            if kind > 1 or number > 3 or is_too_long or (kind == 0 and max(symbols, default=0) > MAX_DC_SYMBOL):
                raise ValueError(f"the Huffman table at byte {position} is damaged")
            tables[4 * kind + number] = lengths, symbols
            position = stop
    return tables


def dump_tables(tables: dict[int, tuple[bytes, bytes]]) -> bytes:
    """Return one DHT segment with the tables, by slot."""
    body = b"".join(
        bytes([(slot // 4) << 4 | slot % 4]) + lengths + symbols for slot, (lengths, symbols) in sorted(tables.items())
    )
    return bytes([0xFF, DHT]) + (2 + len(body)).to_bytes(2, "big") + body


class Decoding(NamedTuple):
    """What codes mean, for each slot.

    Attributes:
        short: uint16 [slots, 512], by the next 9 bits: a code's length << 8 | its symbol; 0 where it is longer.
        limit: int64 [slots, 17], by the length: the first number of so many bits that is no code, nor begins with one.
        offset: int64 [slots, 17], by the length: what to add to a code for its symbol's place.
        symbols: uint8 [slots, 256].
    """

    short: NDArray[np.uint16]
    limit: NDArray[np.int64]
    offset: NDArray[np.int64]
    symbols: NDArray[np.uint8]


def make_decoding(tables: dict[int, tuple[bytes, bytes]]) -> Decoding:
    """Return what the codes of some tables mean (F.2.2.3, with a lookup table for short codes).

    Args:
        tables: By slot, the number of codes of each length, and the symbols.

    Raises:
        ValueError: If a table has more codes than bits can tell apart.
    """
    decoding = Decoding(
        np.zeros((NUM_SLOTS, 1 << SHORT), np.uint16),
        np.zeros((NUM_SLOTS, MAX_LENGTH + 1), np.int64),
        np.zeros((NUM_SLOTS, MAX_LENGTH + 1), np.int64),
        np.zeros((NUM_SLOTS, 256), np.uint8),
    )
    for slot, (lengths, symbols) in tables.items():
        values = np.frombuffer(symbols, np.uint8)
        decoding.symbols[slot, : len(values)] = values
        code = place = 0
        for length, number in enumerate(lengths, 1):
            stop = code + number
            # A code of ones alone is kept free (C.2).
            if stop > (1 << length) - (number > 0):
                raise ValueError("a Huffman table has more codes than its lengths allow")
            decoding.limit[slot, length], decoding.offset[slot, length] = stop, place - code
            if length <= SHORT:
                span = 1 << (SHORT - length)
                entries = values[place : place + number].astype(np.uint16) | length << 8
                decoding.short[slot, code * span : stop * span] = np.repeat(entries, span)
            code, place = stop << 1, place + number
    return decoding


def make_codes(lengths: bytes, symbols: bytes) -> NDArray[np.uint32]:
    """Return each symbol's code, uint32 [256]: its length << 16 | its bits; 0 where it has none (C.2)."""
    codes = np.zeros(256, np.uint32)
    code = place = 0
    for length, number in enumerate(lengths, 1):
        for symbol in symbols[place : place + number]:
            codes[symbol] = length << 16 | code
            code += 1
        place += number
        code <<= 1
    return codes


def make_best_table(counts: Counts) -> tuple[bytes, bytes]:
    """Return a table for symbols that come so often, as lengths and symbols.

    It is that of K.2, which libjpeg makes, too: the fewest bits, but for the code that is kept free and, where codes
    would be longer than 16 bits, for how they are shortened.
    """
    lengths, symbols = _make_best_table(counts)
    return lengths.astype(np.uint8).tobytes(), symbols.astype(np.uint8).tobytes()


@compiled
def _make_best_table(counts):  # type: ignore[no-untyped-def]  # numba finds the types
    """Follow figures K.1 to K.4: code sizes, how many of each, none above 16 bits, symbols by size."""
    frequency = np.zeros(257, np.int64)
    frequency[:256] = counts
    frequency[256] = 1  # So that no symbol's code is all ones.
    code_size = np.zeros(257, np.int64)
    others = np.full(257, -1, np.int64)
    while True:
        # The two least frequent trees, of equal ones the last symbol's.
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

    num_codes = np.zeros(258, np.int64)  # by length
    for i in range(257):
        if code_size[i]:
            num_codes[code_size[i]] += 1
    for length in range(257, MAX_LENGTH, -1):
        while num_codes[length] > 0:
            shorter = length - 2
            while num_codes[shorter] == 0:
                shorter -= 1
            num_codes[length] -= 2
            num_codes[length - 1] += 1
            num_codes[shorter + 1] += 2
            num_codes[shorter] -= 1
    longest = MAX_LENGTH
    while num_codes[longest] == 0:
        longest -= 1
    num_codes[longest] -= 1  # The code that nobody gets.

    symbols = np.zeros(256, np.int64)
    num_symbols = 0
    for length in range(1, 258):
        for i in range(256):
            if code_size[i] == length:
                symbols[num_symbols] = i
                num_symbols += 1
    return num_codes[1 : MAX_LENGTH + 1], symbols[:num_symbols]
