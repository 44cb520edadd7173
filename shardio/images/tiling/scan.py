"""One scan's entropy-coded data, coded anew: other Huffman tables, other restart intervals, the same coefficients.

Decoding and coding follow ITU-T T.81, F.1.2 and F.2.2. Coefficients are never put together: an AC symbol and its
bits are written as they were read, and of DC coefficients the differences change where prediction starts again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.images.compiled import compiled
from shardio.images.tiling.huffman import MAX_LENGTH, SHORT, Decoding

MAX_DC_SIZE = 11
"""Bits of a DC difference in a baseline image of 8 bits (table F.1)."""

MAX_AC_SIZE = 10
"""Bits of an AC coefficient, likewise (table F.2)."""

MAX_DC = 2047

OK, DAMAGED, NOT_CLEAN, WRONG_MARKER, OUT_OF_RANGE = 0, 1, 2, 3, 4
"""What can come of a scan."""

ZRL = 0xF0
"""The symbol for 16 zeros; 0 is EOB, the end of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanLayout:
    """How the blocks of a scan follow each other.

    Attributes:
        num_mcus: In the scan.
        component: int64 [blocks in an MCU], the component of each.
        dc_slot: int64 [components], the slot of each one's DC table.
        ac_slot: int64 [components], likewise.
        old_interval: MCUs between restart markers as it is; 0 where there are none.
        new_interval: The same as it shall be.
    """

    num_mcus: int
    component: NDArray[np.int64]
    dc_slot: NDArray[np.int64]
    ac_slot: NDArray[np.int64]
    old_interval: int
    new_interval: int


class ScanError(ValueError):
    """A scan's data is not what the standard says, or what a baseline image may hold."""


_MESSAGES = {
    DAMAGED: "damaged: its data breaks off or holds an unknown code",
    NOT_CLEAN: "damaged: there is more data than the picture needs",
    WRONG_MARKER: "damaged: a restart marker is missing or wrong",
    OUT_OF_RANGE: "coefficients out of range",
}


def count_symbols(data: NDArray[np.uint8], layout: ScanLayout, decoding: Decoding) -> tuple[NDArray[np.int64], int]:
    """Read a scan; return how often each symbol would come, int64 [slots, 256], and where the scan ends.

    Args:
        data: uint8, from the scan's first byte.
        layout: Of the scan.
        decoding: The tables that it is coded by.

    Raises:
        ScanError: If it cannot be coded anew.
    """
    counts = np.zeros((len(decoding.symbols), 256), np.int64)
    nothing = np.empty(0, np.uint8)
    _, stop = _recode(data, layout, decoding, np.empty((0, 0), np.uint32), counts, nothing, np.empty(0, np.int64))
    return counts, stop


def write_scan(
    data: NDArray[np.uint8],
    layout: ScanLayout,
    decoding: Decoding,
    codes: NDArray[np.uint32],
    counts: NDArray[np.int64],
) -> tuple[bytes, NDArray[np.int64]]:
    """Code a scan anew; return its data, and the bytes of each restart interval without its marker, int64.

    Args:
        data: uint8, from the scan's first byte.
        layout: Of the scan.
        decoding: The tables that it is coded by.
        codes: uint32 [slots, 256], the tables to code it by, see make_codes.
        counts: int64 [slots, 256], how often each symbol will come.
    """
    num_intervals = -(-layout.num_mcus // layout.new_interval) if layout.new_interval else 1
    # A symbol's code, and the bits behind it: as many as its low four bits say, in AC and DC alike.
    num_bits = int((counts * ((codes >> 16).astype(np.int64) + np.arange(256) % 16)).sum())
    # At worst each byte is 0xFF, and is followed by a stuffed 0; an interval ends in a started byte and a marker.
    out = np.empty(2 * (num_bits // 8 + num_intervals) + 2 * num_intervals + 8, np.uint8)
    lengths = np.empty(num_intervals, np.int64)
    size, _ = _recode(data, layout, decoding, codes, counts, out, lengths)
    return out[:size].tobytes(), lengths


def _recode(
    data: NDArray[np.uint8],
    layout: ScanLayout,
    decoding: Decoding,
    codes: NDArray[np.uint32],
    counts: NDArray[np.int64],
    out: NDArray[np.uint8],
    lengths: NDArray[np.int64],
) -> tuple[int, int]:
    outcome, mcu, size, stop = _walk(
        data,
        layout.num_mcus,
        layout.component,
        layout.dc_slot,
        layout.ac_slot,
        layout.old_interval,
        layout.new_interval,
        *decoding,
        codes,
        counts,
        out,
        lengths,
    )
    if outcome != OK:
        raise ScanError(f"{_MESSAGES[outcome]} (in MCU {mcu} of {layout.num_mcus})")
    return size, stop


@compiled
def _fill(data, at, bits, num_bits):  # type: ignore[no-untyped-def]  # numba finds the types
    """Take bytes from the stream until there are more than 48 bits, or a marker comes (F.2.2.5)."""
    while num_bits <= 48 and at < len(data):
        byte = np.uint64(data[at])
        if byte == 0xFF:
            if at + 1 >= len(data) or data[at + 1] != 0:
                break
            at += 1
        at += 1
        bits = bits << np.uint64(8) | byte
        num_bits += 8
    return at, bits, num_bits


@compiled
def _decode_long(ahead, limit, offset, symbols):  # type: ignore[no-untyped-def]
    """Return the symbol of a code of more than SHORT bits, and its length; 0 if there is no such code."""
    for length in range(SHORT + 1, MAX_LENGTH + 1):
        code = np.int64(ahead >> np.uint64(MAX_LENGTH - length))
        if code < limit[length]:
            return np.int64(symbols[code + offset[length]]), np.int64(length)
    return np.int64(0), np.int64(0)


@compiled
def _put(out, at, held, num_held, value, length):  # type: ignore[no-untyped-def]
    """Append bits to the stream; a byte 0xFF is followed by a 0 (F.1.2.3)."""
    held = held << np.uint64(length) | np.uint64(value)
    num_held += length
    while num_held >= 8:
        num_held -= 8
        byte = (held >> np.uint64(num_held)) & np.uint64(0xFF)
        out[at] = byte
        at += 1
        if byte == 0xFF:
            out[at] = 0
            at += 1
    return at, held, num_held


@compiled
def _skip_marker(data, at, expected):  # type: ignore[no-untyped-def]
    """Return where the data goes on behind a marker, or -1 if it is another one; fill bytes may precede it."""
    if at >= len(data) or data[at] != 0xFF:
        return -1
    while at < len(data) and data[at] == 0xFF:
        at += 1
    return at + 1 if at < len(data) and data[at] == expected else -1


@compiled
def _walk(  # type: ignore[no-untyped-def]
    data,
    num_mcus,
    component,
    dc_slot,
    ac_slot,
    old_interval,
    new_interval,
    short,
    limit,
    offset,
    symbols,
    codes,
    counts,
    out,
    lengths,
):
    """Go through a scan: count its symbols if there is nowhere to write, otherwise write it anew.

    Returns:
        The outcome, the MCU it was known in, the bytes written, and where the scan ends.
    """
    writing = len(out) > 0
    at = np.int64(0)
    bits, num_bits = np.uint64(0), np.int64(0)
    held, num_held = np.uint64(0), np.int64(0)
    size = interval_start = np.int64(0)
    old_dc = np.zeros(len(dc_slot), np.int64)
    new_dc = np.zeros(len(dc_slot), np.int64)
    for mcu in range(num_mcus):
        if old_interval and mcu and mcu % old_interval == 0:
            at, bits, num_bits = _fill(data, at, bits, num_bits)
            if num_bits >= 8:
                return NOT_CLEAN, mcu, size, at
            at = _skip_marker(data, at, 0xD0 + (mcu // old_interval - 1) % 8)
            if at < 0:
                return WRONG_MARKER, mcu, size, at
            num_bits = np.int64(0)
            old_dc[:] = 0
        if new_interval and mcu and mcu % new_interval == 0:
            if writing:
                if num_held:  # Filled up with ones (F.1.2.3).
                    pad = 8 - num_held
                    size, held, num_held = _put(out, size, held, num_held, (1 << pad) - 1, pad)
                interval = mcu // new_interval - 1
                lengths[interval] = size - interval_start
                out[size] = 0xFF
                out[size + 1] = 0xD0 + interval % 8
                size += 2
                interval_start = size
            new_dc[:] = 0
        for c in component:
            position = np.int64(0)
            while position < 64:
                slot = ac_slot[c] if position else dc_slot[c]
                if num_bits <= 32:
                    at, bits, num_bits = _fill(data, at, bits, num_bits)
                if num_bits >= 16:
                    ahead = (bits >> np.uint64(num_bits - 16)) & np.uint64(0xFFFF)
                else:
                    ahead = (bits << np.uint64(16 - num_bits)) & np.uint64(0xFFFF)
                entry = short[slot, ahead >> np.uint64(MAX_LENGTH - SHORT)]
                symbol, length = np.int64(entry & 0xFF), np.int64(entry >> 8)
                if length == 0:
                    symbol, length = _decode_long(ahead, limit[slot], offset[slot], symbols[slot])
                extra = symbol & 15
                if length == 0 or length + extra > num_bits:
                    return DAMAGED, mcu, size, at
                num_bits -= length + extra
                value = np.int64((bits >> np.uint64(num_bits)) & np.uint64((1 << extra) - 1))
                if position == 0:
                    if symbol > MAX_DC_SIZE:
                        return OUT_OF_RANGE, mcu, size, at
                    difference = value
                    if extra and value < 1 << (extra - 1):
                        difference -= (1 << extra) - 1
                    old_dc[c] += difference
                    if abs(old_dc[c]) > MAX_DC:
                        return OUT_OF_RANGE, mcu, size, at
                    difference = old_dc[c] - new_dc[c]
                    new_dc[c] = old_dc[c]
                    extra = np.int64(0)
                    while abs(difference) >> extra:
                        extra += 1
                    if extra > MAX_DC_SIZE:
                        return OUT_OF_RANGE, mcu, size, at
                    symbol = np.int64(extra)
                    value = difference if difference >= 0 else difference + (1 << extra) - 1
                    position = np.int64(1)
                elif symbol == ZRL:
                    position += 16
                elif symbol == 0:
                    position = np.int64(64)
                else:
                    position += (symbol >> 4) + 1
                    if extra == 0:
                        return DAMAGED, mcu, size, at
                    if extra > MAX_AC_SIZE:
                        return OUT_OF_RANGE, mcu, size, at
                if position > 64:
                    return DAMAGED, mcu, size, at
                if writing:
                    code = codes[slot, symbol]
                    code_bits = np.int64(code & 0xFFFF) << extra | value
                    size, held, num_held = _put(out, size, held, num_held, code_bits, np.int64(code >> 16) + extra)
                else:
                    counts[slot, symbol] += 1
    at, bits, num_bits = _fill(data, at, bits, num_bits)
    if num_bits >= 8:
        return NOT_CLEAN, num_mcus, size, at
    if writing:
        if num_held:
            pad = 8 - num_held
            size, held, num_held = _put(out, size, held, num_held, (1 << pad) - 1, pad)
        lengths[-1] = size - interval_start
    return OK, num_mcus, size, at
