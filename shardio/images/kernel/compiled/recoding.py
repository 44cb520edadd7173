"""Recode a scan's entropy-coded data with other Huffman tables and restart intervals, but the same coefficients.

Encoding and decoding follow F.1.2 and F.2.2. Coefficients are not assembled: an AC symbol and its bits are written as
they were read. Only DC differences change, where prediction restarts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.jpeg.standard import (
    EOB,
    MAX_AC_SIZE,
    MAX_CODE_LENGTH,
    MAX_DC,
    MAX_DC_SIZE,
    NUM_HUFFMAN_TABLES,
    RST0,
    ZRL,
)
from shardio.images.kernel.compiled.memory import kernel_function, pointer
from shardio.images.kernel.compiled.records import (
    CODING,
    COMPONENT,
    DAMAGED,
    EXCESS_DATA,
    LOOKUP_BITS,
    OUT_OF_RANGE,
    RECODED,
    WRONG_MARKER,
)


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


@kernel_function
def recode_scan(call):
    """Count a scan's symbols or recode it; set the results in ``call``, a SCAN."""
    data = carray(pointer(call.data), call.num_bytes, np.uint8)
    coding = carray(pointer(call.coding), NUM_HUFFMAN_TABLES, CODING)
    components = carray(pointer(call.components), call.num_components, COMPONENT)
    blocks = carray(pointer(call.blocks), call.num_blocks, np.int64)
    out = carray(pointer(call.out), call.out_size, np.uint8)
    lengths = carray(pointer(call.lengths), call.num_lengths, np.int64)
    reader = _Reader(np.int64(0), np.uint64(0), np.int64(0))
    writer = _Writer(np.int64(0), np.int64(0), np.uint64(0), np.int64(0))
    _restart(components, True)
    _restart(components, False)
    outcome, call.mcu = RECODED, 0
    for mcu in range(call.num_mcus):
        call.mcu = mcu
        if mcu and call.old_interval and mcu % call.old_interval == 0:
            outcome, reader = _read_restart(data, reader, mcu // call.old_interval - 1)
            if outcome != RECODED:
                break
            _restart(components, True)
        if mcu and call.new_interval and mcu % call.new_interval == 0:
            writer = _write_restart(out, writer, lengths, mcu // call.new_interval - 1)
            _restart(components, False)
        for block in blocks:
            outcome, reader, writer = _recode_block(data, reader, components[block], coding, out, writer)
            if outcome != RECODED:
                break
        if outcome != RECODED:
            break
    if outcome == RECODED:
        call.mcu = call.num_mcus
        reader = _fill(data, reader)
        if reader.num_bits >= 8:
            outcome = EXCESS_DATA
        else:
            writer = _finish_interval(out, writer, lengths, len(lengths) - 1)
    call.outcome, call.size, call.stop = outcome, writer.size, reader.offset


@kernel_function
def _restart(components, reads):
    """Predict the next DC coefficients from 0, when reading or when writing."""
    for component in components:
        if reads:
            component.dc_read = 0
        else:
            component.dc_written = 0


@kernel_function
def _recode_block(data, reader, component, coding, out, writer):
    """Count a block's symbols or recode it; return the outcome and the states of reader and writer."""
    table, k = coding[component.dc_table], 0
    while k < 64:
        if reader.num_bits <= 32:
            reader = _fill(data, reader)
        reader, symbol, value = _read_symbol(reader, table)
        if symbol < 0:
            return DAMAGED, reader, writer
        if k == 0:
            outcome, symbol, value = _recode_dc(component, symbol, value)
            k = 1
        else:
            outcome = _check_ac(symbol)
            k = 64 if symbol == EOB else k + (symbol >> 4) + 1
        if outcome != RECODED:
            return outcome, reader, writer
        if k > 64:
            return DAMAGED, reader, writer
        if len(out):
            code, size = table.codes[symbol], symbol & 15
            writer = _write_bits(out, writer, np.int64(code & 0xFFFF) << size | value, np.int64(code >> 16) + size)
        else:
            table.counts[symbol] += 1
        table = coding[component.ac_table]
    return RECODED, reader, writer


@kernel_function
def _check_ac(symbol):
    """Return whether a baseline image may have an AC symbol (F.1.2.2)."""
    size = symbol & 15
    if size == 0:
        return RECODED if symbol in (EOB, ZRL) else DAMAGED
    return RECODED if size <= MAX_AC_SIZE else OUT_OF_RANGE


@kernel_function
def _recode_dc(component, symbol, value):
    """Turn a DC difference as read into the one to write; return the outcome, its symbol and its bits (F.1.2.1)."""
    if symbol > MAX_DC_SIZE:
        return OUT_OF_RANGE, symbol, value
    is_negative = symbol > 0 and value < 1 << (symbol - 1)  # Figure F.12.
    component.dc_read += value - (1 << symbol) + 1 if is_negative else value
    difference = component.dc_read - component.dc_written
    component.dc_written = component.dc_read
    size = np.int64(0)
    while abs(difference) >> size:
        size += 1
    is_in_range = abs(component.dc_read) <= MAX_DC and size <= MAX_DC_SIZE
    bits = difference if difference >= 0 else difference + (1 << size) - 1
    return RECODED if is_in_range else OUT_OF_RANGE, size, bits


@kernel_function
def _read_symbol(reader, table):
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


@kernel_function
def _decode_long(table, ahead):
    """Return the symbol and the length of a code of more than LOOKUP_BITS bits; 0 and 0 if there is no such code."""
    for length in range(LOOKUP_BITS + 1, MAX_CODE_LENGTH + 1):
        code = np.int64(ahead >> np.uint64(MAX_CODE_LENGTH - length))
        if code < table.limits[length]:
            return np.int64(table.symbols[code + table.offsets[length]]), np.int64(length)
    return np.int64(0), np.int64(0)


@kernel_function
def _fill(data, reader):
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


@kernel_function
def _read_restart(data, reader, interval):
    """Read the marker at the end of a restart interval, which fill bytes may precede; return the outcome."""
    reader = _fill(data, reader)
    offset = reader.offset
    if reader.num_bits >= 8:
        return EXCESS_DATA, reader
    if offset >= len(data) or data[offset] != 0xFF:
        return WRONG_MARKER, reader
    while offset < len(data) and data[offset] == 0xFF:
        offset += 1
    if offset >= len(data) or data[offset] != RST0 + interval % 8:
        return WRONG_MARKER, reader
    return RECODED, _Reader(offset + 1, np.uint64(0), np.int64(0))


@kernel_function
def _write_bits(out, writer, value, length):
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


@kernel_function
def _write_restart(out, writer, lengths, interval):
    """Finish a restart interval, and write the marker that follows it."""
    writer = _finish_interval(out, writer, lengths, interval)
    if len(out) == 0:
        return writer
    size = writer.size
    out[size] = 0xFF
    out[size + 1] = RST0 + interval % 8
    return _Writer(size + 2, size + 2, writer.bits, writer.num_bits)


@kernel_function
def _finish_interval(out, writer, lengths, interval):
    """Fill the last byte of a restart interval with ones (F.1.2.3), and note the interval's length."""
    if len(out) == 0:
        return writer
    if writer.num_bits:
        num_missing = 8 - writer.num_bits
        writer = _write_bits(out, writer, (1 << num_missing) - 1, num_missing)
    lengths[interval] = writer.size - writer.interval_start
    return writer
