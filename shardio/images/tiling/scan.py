"""Recode a scan's entropy-coded data with other Huffman tables and restart intervals, but the same coefficients.

Encoding and decoding follow F.1.2 and F.2.2. Coefficients are not assembled: an AC symbol and its bits are written as
they were read. Only DC differences change, where prediction restarts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shardio.images.jit import cached_jit
from shardio.images.jpeg.standard import EOB, MAX_AC_SIZE, MAX_CODE_LENGTH, MAX_DC, MAX_DC_SIZE, RST0, ZRL
from shardio.images.tiling.huffman import LOOKUP_BITS

_OK, _DAMAGED, _EXCESS_DATA, _WRONG_MARKER, _OUT_OF_RANGE = 0, 1, 2, 3, 4

_MESSAGES = {
    _DAMAGED: "damaged: the data ends early or contains an unknown code",
    _EXCESS_DATA: "damaged: there is more data than the image needs",
    _WRONG_MARKER: "damaged: a restart marker is missing or wrong",
    _OUT_OF_RANGE: "coefficients out of range",
}

COMPONENT = np.dtype(
    [
        ("dc_table", np.int64),  # The index of its DC table.
        ("ac_table", np.int64),
        ("dc_read", np.int64),  # The last DC coefficient read, from which the next one is predicted.
        ("dc_written", np.int64),  # The last DC coefficient written. Predictions restart at other MCUs.
    ]
)
"""A component of a scan."""


class Scan(NamedTuple):
    """A scan to recode.

    Attributes:
        data: uint8, the file from the scan's first byte on.
        coding: CODING [8], the scan's Huffman tables.
        components: COMPONENT [components].
        blocks: int64 [blocks per MCU], the index of each block's component.
        num_mcus: The number of MCUs in the scan.
        interval: MCUs between restart markers; 0 if there are none.
    """

    data: NDArray[np.uint8]
    coding: NDArray[np.void]
    components: NDArray[np.void]
    blocks: NDArray[np.int64]
    num_mcus: int
    interval: int


class _Output(NamedTuple):
    """The recoded scan. If ``data`` is empty, symbols are only counted.

    Attributes:
        interval: MCUs between restart markers; 0 for none.
        data: uint8, for the recoded data.
        lengths: int64 [intervals], for the bytes of each restart interval without its marker.
    """

    interval: int
    data: NDArray[np.uint8]
    lengths: NDArray[np.int64]


class _Reader(NamedTuple):
    """The reader's state: the next byte's offset, and bits that were taken from the data but not used yet."""

    offset: np.int64
    bits: np.uint64
    num_bits: np.int64


class _Writer(NamedTuple):
    """The writer's state: the bytes written, where the restart interval began, and the bits of an unfinished byte."""

    size: np.int64
    interval_start: np.int64
    bits: np.uint64
    num_bits: np.int64


class ScanError(ValueError):
    """A scan's data violates the standard or the limits of a baseline image."""


def count_symbols(scan: Scan, interval: int) -> int:
    """Count in ``scan.coding`` the symbols of the scan with another restart interval, and return the scan's end.

    Raises:
        ScanError: If the scan cannot be recoded.
    """
    _, stop = _recode(scan, _Output(interval, np.empty(0, np.uint8), np.empty(0, np.int64)))
    return stop


def write_scan(scan: Scan, interval: int) -> tuple[bytes, NDArray[np.int64]]:
    """Recode a scan with the codes in ``scan.coding``, which must contain the counts of its symbols.

    Args:
        scan: The scan.
        interval: MCUs between restart markers; 0 for none.

    Returns:
        The data, and the bytes of each restart interval without its marker, int64 [intervals].
    """
    num_intervals = -(-scan.num_mcus // interval) if interval else 1
    # A symbol's code is followed by as many bits as the symbol's low four bits say, in AC and DC alike.
    lengths_of_codes = (scan.coding["codes"] >> 16).astype(np.int64)
    num_bits = int((scan.coding["counts"] * (lengths_of_codes + np.arange(256) % 16)).sum())
    # At worst each byte is 0xFF and is followed by a stuffed 0; an interval ends in a partial byte and a marker.
    data = np.empty(2 * (num_bits // 8 + num_intervals) + 2 * num_intervals + 8, np.uint8)
    lengths = np.empty(num_intervals, np.int64)
    size, _ = _recode(scan, _Output(interval, data, lengths))
    return data[:size].tobytes(), lengths


def _recode(scan: Scan, output: _Output) -> tuple[int, int]:
    """Return the bytes written, and where the scan ends."""
    # Plain tuples: numba pickles argument types, and a later version may not have these classes.
    outcome, mcu, size, stop = _recode_scan(tuple(scan), tuple(output))
    if outcome != _OK:
        raise ScanError(f"{_MESSAGES[outcome]} (in MCU {mcu} of {scan.num_mcus})")
    return size, stop


@cached_jit
def _recode_scan(scan, output):  # type: ignore[no-untyped-def]  # numba infers the types
    """Count a scan's symbols or recode it; return the outcome, the MCU reached, the bytes written, the scan's end."""
    data, coding, components, blocks, num_mcus, old_interval = scan
    new_interval, out, lengths = output
    reader = _Reader(np.int64(0), np.uint64(0), np.int64(0))
    writer = _Writer(np.int64(0), np.int64(0), np.uint64(0), np.int64(0))
    components.dc_read[:] = components.dc_written[:] = 0
    for mcu in range(num_mcus):
        if mcu and old_interval and mcu % old_interval == 0:
            outcome, reader = _read_restart(data, reader, mcu // old_interval - 1)
            if outcome != _OK:
                return outcome, mcu, writer.size, reader.offset
            components.dc_read[:] = 0
        if mcu and new_interval and mcu % new_interval == 0:
            writer = _write_restart(out, writer, lengths, mcu // new_interval - 1)
            components.dc_written[:] = 0
        for block in blocks:
            outcome, reader, writer = _recode_block(data, reader, components[block], coding, out, writer)
            if outcome != _OK:
                return outcome, mcu, writer.size, reader.offset
    reader = _fill(data, reader)
    if reader.num_bits >= 8:
        return _EXCESS_DATA, num_mcus, writer.size, reader.offset
    writer = _finish_interval(out, writer, lengths, len(lengths) - 1)
    return _OK, num_mcus, writer.size, reader.offset


@njit
def _recode_block(data, reader, component, coding, out, writer):  # type: ignore[no-untyped-def]
    """Count a block's symbols or recode it; return the outcome and the states of reader and writer."""
    table, k = coding[component.dc_table], 0
    while k < 64:
        if reader.num_bits <= 32:
            reader = _fill(data, reader)
        reader, symbol, value = _read_symbol(reader, table)
        if symbol < 0:
            return _DAMAGED, reader, writer
        if k == 0:
            outcome, symbol, value = _recode_dc(component, symbol, value)
            k = 1
        else:
            outcome = _check_ac(symbol)
            k = 64 if symbol == EOB else k + (symbol >> 4) + 1
        if outcome != _OK:
            return outcome, reader, writer
        if k > 64:
            return _DAMAGED, reader, writer
        if len(out):
            code, size = table.codes[symbol], symbol & 15
            writer = _write_bits(out, writer, np.int64(code & 0xFFFF) << size | value, np.int64(code >> 16) + size)
        else:
            table.counts[symbol] += 1
        table = coding[component.ac_table]
    return _OK, reader, writer


@njit
def _check_ac(symbol):  # type: ignore[no-untyped-def]
    """Return whether a baseline image may have an AC symbol (F.1.2.2)."""
    size = symbol & 15
    if size == 0:
        return _OK if symbol in (EOB, ZRL) else _DAMAGED
    return _OK if size <= MAX_AC_SIZE else _OUT_OF_RANGE


@njit
def _recode_dc(component, symbol, value):  # type: ignore[no-untyped-def]
    """Turn a DC difference as read into the one to write; return the outcome, its symbol and its bits (F.1.2.1)."""
    if symbol > MAX_DC_SIZE:
        return _OUT_OF_RANGE, symbol, value
    is_negative = symbol > 0 and value < 1 << (symbol - 1)  # Figure F.12.
    component.dc_read += value - (1 << symbol) + 1 if is_negative else value
    difference = component.dc_read - component.dc_written
    component.dc_written = component.dc_read
    size = np.int64(0)
    while abs(difference) >> size:
        size += 1
    is_in_range = abs(component.dc_read) <= MAX_DC and size <= MAX_DC_SIZE
    bits = difference if difference >= 0 else difference + (1 << size) - 1
    return _OK if is_in_range else _OUT_OF_RANGE, size, bits


@njit
def _read_symbol(reader, table):  # type: ignore[no-untyped-def]
    """Read a code and the bits that follow it; the symbol is -1 if there is no such code or the data ends."""
    offset, bits, num_bits = reader
    if num_bits >= 16:
        ahead = (bits >> np.uint64(num_bits - 16)) & np.uint64(0xFFFF)
    else:
        ahead = (bits << np.uint64(16 - num_bits)) & np.uint64(0xFFFF)
    entry = table.short[ahead >> np.uint64(MAX_CODE_LENGTH - LOOKUP_BITS)]
    symbol, length = np.int64(entry & 0xFF), np.int64(entry >> 8)
    if length == 0:
        symbol, length = _decode_long(table, ahead)
    size = symbol & 15
    if length == 0 or length + size > num_bits:
        return reader, np.int64(-1), np.int64(0)
    num_bits -= length + size
    value = np.int64((bits >> np.uint64(num_bits)) & np.uint64((1 << size) - 1))
    return _Reader(offset, bits, num_bits), symbol, value


@njit
def _decode_long(table, ahead):  # type: ignore[no-untyped-def]
    """Return the symbol and the length of a code of more than LOOKUP_BITS bits; 0 and 0 if there is no such code."""
    for length in range(LOOKUP_BITS + 1, MAX_CODE_LENGTH + 1):
        code = np.int64(ahead >> np.uint64(MAX_CODE_LENGTH - length))
        if code < table.limits[length]:
            return np.int64(table.symbols[code + table.offsets[length]]), np.int64(length)
    return np.int64(0), np.int64(0)


@njit
def _fill(data, reader):  # type: ignore[no-untyped-def]
    """Take bytes from the data until there are more than 48 bits, or a marker follows (F.2.2.5)."""
    offset, bits, num_bits = reader
    while num_bits <= 48 and offset < len(data):
        byte = np.uint64(data[offset])
        if byte == 0xFF:
            if offset + 1 >= len(data) or data[offset + 1] != 0:
                break
            offset += 1
        offset += 1
        bits = bits << np.uint64(8) | byte
        num_bits += 8
    return _Reader(offset, bits, num_bits)


@njit
def _read_restart(data, reader, interval):  # type: ignore[no-untyped-def]
    """Read the marker at the end of a restart interval, which fill bytes may precede; return the outcome."""
    reader = _fill(data, reader)
    offset = reader.offset
    if reader.num_bits >= 8:
        return _EXCESS_DATA, reader
    if offset >= len(data) or data[offset] != 0xFF:
        return _WRONG_MARKER, reader
    while offset < len(data) and data[offset] == 0xFF:
        offset += 1
    if offset >= len(data) or data[offset] != RST0 + interval % 8:
        return _WRONG_MARKER, reader
    return _OK, _Reader(offset + 1, np.uint64(0), np.int64(0))


@njit
def _write_bits(out, writer, value, length):  # type: ignore[no-untyped-def]
    """Append bits to the data; a byte 0xFF is followed by a 0 (F.1.2.3)."""
    size, interval_start, bits, num_bits = writer
    bits = bits << np.uint64(length) | np.uint64(value)
    num_bits += length
    while num_bits >= 8:
        num_bits -= 8
        byte = (bits >> np.uint64(num_bits)) & np.uint64(0xFF)
        out[size] = byte
        size += 1
        if byte == 0xFF:
            out[size] = 0
            size += 1
    return _Writer(size, interval_start, bits, num_bits)


@njit
def _write_restart(out, writer, lengths, interval):  # type: ignore[no-untyped-def]
    """Finish a restart interval, and write the marker that follows it."""
    writer = _finish_interval(out, writer, lengths, interval)
    if len(out) == 0:
        return writer
    size = writer.size
    out[size] = 0xFF
    out[size + 1] = RST0 + interval % 8
    return _Writer(size + 2, size + 2, writer.bits, writer.num_bits)


@njit
def _finish_interval(out, writer, lengths, interval):  # type: ignore[no-untyped-def]
    """Fill the last byte of a restart interval with ones (F.1.2.3), and note the interval's length."""
    if len(out) == 0:
        return writer
    if writer.num_bits:
        num_missing = 8 - writer.num_bits
        writer = _write_bits(out, writer, (1 << num_missing) - 1, num_missing)
    lengths[interval] = writer.size - writer.interval_start
    return writer
