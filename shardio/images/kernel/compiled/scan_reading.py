"""Read a scan's entropy-coded data as tokens, which can be written with other Huffman tables and restart intervals.

Decoding follows F.2.2. Coefficients are not assembled: a token is a symbol and the bits that follow its code. AC tokens
stay as they are. Those of DC differences change where prediction will restart.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.jpeg.standard import (
    EOB,
    FIRST_AC_TABLE,
    MAX_AC_SIZE,
    MAX_CODE_LENGTH,
    MAX_DC,
    MAX_DC_SIZE,
    NUM_HUFFMAN_TABLES,
    RST0,
    ZRL,
)
from shardio.images.kernel.compiled.memory import kernel_function, load_word, pointer
from shardio.images.kernel.compiled.records import (
    COMPONENT,
    DAMAGED,
    EXCESS_DATA,
    HUFFMAN_TABLE,
    LOOKUP_BITS,
    NO_TOKEN,
    OUT_OF_RANGE,
    READER,
    RECODED,
    VALUE_BITS,
    WRONG_MARKER,
)
from shardio.images.kernel.compiled.streams import unstuff

# The fields of an entry of a lookup table: the bits of the code and of the value (bits 0 to 5), the value's mask (6 to
# 16), what to add to the index of the coefficient (17 to 23), and the token for a value of 0 (32 to 63). An entry of 0
# means that the code is longer than LOOKUP_BITS, or that no baseline image has its symbol.
_MASK, _STEP, _TOKEN = np.uint64(6), np.uint64(17), np.uint64(32)
_TOTAL_FIELD, _MASK_FIELD, _STEP_FIELD = np.uint64(63), np.uint64(0x7FF), np.uint64(127)

_TO_END = 64
"""What the symbol for the end of the block adds to the index of the coefficient. Runs add up to 16."""

_THREE, _SEVEN, _EIGHT = np.uint64(3), np.uint64(7), np.uint64(8)
_TOP, _WORD = np.uint64(64 - LOOKUP_BITS), np.uint64(64)


@kernel_function
def read_scan(call):
    """Read a scan as tokens, and count its symbols; set the results in ``call``, a SCAN."""
    data = carray(pointer(call.data), call.num_bytes, np.uint8)
    components = carray(pointer(call.components), call.num_components, COMPONENT)
    blocks = carray(pointer(call.blocks), call.num_blocks, np.int64)
    tokens = carray(pointer(call.tokens), call.max_tokens, np.uint32)
    stops = carray(pointer(call.stops), call.num_intervals, np.int64)
    reader = carray(pointer(call.reader), 1, READER)[0]
    bits = carray(pointer(call.unstuffed), call.num_unstuffed, np.uint8)
    _make_lookups(carray(pointer(call.tables), NUM_HUFFMAN_TABLES, HUFFMAN_TABLE), reader)
    reader.counts[:] = 0
    at = num_tokens = 0
    bit = limit = np.uint64(0)
    outcome, call.mcu = RECODED, 0
    for mcu in range(call.num_mcus):
        call.mcu = mcu
        if mcu == 0 or (call.old_interval and mcu % call.old_interval == 0):
            if mcu:
                outcome, at = _skip_marker(data, at, limit - bit, mcu // call.old_interval - 1)
                if outcome != RECODED:
                    break
            at, num_bytes = unstuff(data, at, len(data), bits, 0)
            bit, limit = np.uint64(0), np.uint64(8 * num_bytes)
            for component in components:
                component.dc_read = 0
        if mcu == 0 or (call.new_interval and mcu % call.new_interval == 0):
            if mcu:
                num_tokens = _finish_interval(tokens, num_tokens, stops, mcu // call.new_interval - 1)
            for component in components:
                component.dc_written = 0
        for block in blocks:
            outcome, bit, num_tokens = _read_block(bits, bit, limit, components[block], reader, tokens, num_tokens)
            if outcome != RECODED:
                break
        if outcome != RECODED:
            break
    if outcome == RECODED:
        call.mcu = call.num_mcus
        if limit - bit >= _EIGHT:
            outcome = EXCESS_DATA
        num_tokens = _finish_interval(tokens, num_tokens, stops, call.num_intervals - 1)
    call.outcome, call.num_tokens, call.stop = outcome, num_tokens, at


@kernel_function
def _finish_interval(tokens, num_tokens, stops, interval):
    """Make the number of tokens even, and note where the next restart interval begins."""
    if num_tokens & 1:
        tokens[num_tokens] = NO_TOKEN
        num_tokens += 1
    stops[interval] = num_tokens
    return num_tokens


@kernel_function
def _skip_marker(data, at, num_left, interval):
    """Read the marker at the end of a restart interval, which fill bytes may precede.

    Args:
        data: uint8, the scan.
        at: The offset of the end of the interval.
        num_left: The bits of the interval that were not read.
        interval: The index of the interval.

    Returns:
        The outcome, and the offset after the marker.
    """
    if num_left >= _EIGHT:
        return EXCESS_DATA, at
    if at >= len(data):
        return WRONG_MARKER, at
    while at < len(data) and data[at] == 0xFF:
        at += 1
    if at >= len(data) or data[at] != RST0 + interval % 8:
        return WRONG_MARKER, at
    return RECODED, at + 1


@kernel_function
def _read_block(bits, bit, limit, component, reader, tokens, num_tokens):
    """Read a block's tokens; return the outcome, the next bit, and the number of tokens.

    Bits beyond the limit have any values. Their tokens are not used.
    """
    word = load_word(bits, bit >> _THREE) << (bit & _SEVEN)
    entry = reader.lookups[(component.dc_table << LOOKUP_BITS) + np.int64(word >> _TOP)]
    if entry == 0:
        outcome, entry = _find_long_code(reader, component.dc_table, word, limit - bit)
        if outcome != RECODED:
            return outcome, bit, num_tokens
    total = entry & _TOTAL_FIELD
    bit += total
    if bit > limit:
        return DAMAGED, bit, num_tokens
    mask = (entry >> _MASK) & _MASK_FIELD
    value = np.int64((word >> (_WORD - total)) & mask)
    # A value whose first bit is 0 is negative (figure F.12).
    dc = component.dc_read + (value - np.int64(mask) if value <= np.int64(mask) >> 1 else value)
    difference = dc - component.dc_written
    size = np.int64(0)
    while abs(difference) >> size:
        size += 1
    if abs(dc) > MAX_DC or size > MAX_DC_SIZE:
        return OUT_OF_RANGE, bit, num_tokens
    component.dc_read = component.dc_written = dc
    symbol = component.dc_table << 8 | size
    tokens[num_tokens] = symbol << VALUE_BITS | (difference if difference >= 0 else difference + (1 << size) - 1)
    reader.counts[symbol] += 1
    num_tokens += 1

    first, k = component.ac_table << LOOKUP_BITS, np.int64(1)
    while True:
        # From any bit on, a word has at least 57 bits. Two AC symbols have at most 52.
        word = load_word(bits, bit >> _THREE) << (bit & _SEVEN)
        entry = reader.lookups[first + np.int64(word >> _TOP)]
        if entry == 0:
            outcome, entry = _find_long_code(reader, component.ac_table, word, limit - bit)
            if outcome != RECODED:
                return outcome, bit, num_tokens
        total = entry & _TOTAL_FIELD
        token = (entry >> _TOKEN) | ((word >> (_WORD - total)) & (entry >> _MASK) & _MASK_FIELD)
        tokens[num_tokens] = token
        reader.counts[np.int64(token) >> VALUE_BITS] += 1
        num_tokens += 1
        step = np.int64((entry >> _STEP) & _STEP_FIELD)
        k += step
        bit += total
        if k >= 64:
            break
        word <<= total
        entry = reader.lookups[first + np.int64(word >> _TOP)]
        if entry == 0:
            outcome, entry = _find_long_code(reader, component.ac_table, word, limit - bit)
            if outcome != RECODED:
                return outcome, bit, num_tokens
        total = entry & _TOTAL_FIELD
        token = (entry >> _TOKEN) | ((word >> (_WORD - total)) & (entry >> _MASK) & _MASK_FIELD)
        tokens[num_tokens] = token
        reader.counts[np.int64(token) >> VALUE_BITS] += 1
        num_tokens += 1
        step = np.int64((entry >> _STEP) & _STEP_FIELD)
        k += step
        bit += total
        if k >= 64:
            break
    is_good = bit <= limit and (k == 64 or step == _TO_END)
    return RECODED if is_good else DAMAGED, bit, num_tokens


@kernel_function
def _find_long_code(reader, table, word, num_left):
    """Return the outcome and the entry of a code of more than LOOKUP_BITS bits, or of an invalid symbol.

    Args:
        reader: The READER.
        table: The index of the table.
        word: The next bits, at the top of a number of 64 bits.
        num_left: The number of bits up to the end of the restart interval; negative (as uint64) beyond it.
    """
    ahead = np.int64(word >> np.uint64(64 - MAX_CODE_LENGTH))
    for length in range(1, MAX_CODE_LENGTH + 1):
        code = ahead >> (MAX_CODE_LENGTH - length)
        if code < reader.limits[table, length]:
            symbol = np.int64(reader.symbols[table, code + reader.offsets[table, length]])
            if length + (symbol & 15) > np.int64(num_left):
                return DAMAGED, np.uint64(0)
            return _make_entry(table, symbol, length)
    return DAMAGED, np.uint64(0)


@kernel_function
def _make_entry(table, symbol, length):
    """Return the outcome and the entry of a code; 0 if no baseline image has its symbol (F.1.2.1 and F.1.2.2)."""
    size = symbol & 15
    step = (symbol >> 4) + 1
    if table < FIRST_AC_TABLE:
        if symbol > MAX_DC_SIZE:
            return OUT_OF_RANGE, np.uint64(0)
    else:
        if size == 0 and symbol != EOB and symbol != ZRL:
            return DAMAGED, np.uint64(0)
        if size > MAX_AC_SIZE:
            return OUT_OF_RANGE, np.uint64(0)
        if symbol == EOB:
            step = _TO_END
    token = np.uint64((table << 8 | symbol) << VALUE_BITS)
    mask = np.uint64((1 << size) - 1)
    return RECODED, np.uint64(length + size) | mask << _MASK | np.uint64(step) << _STEP | token << _TOKEN


@kernel_function
def _make_lookups(tables, reader):
    """Make the tables that codes are looked up in (F.2.2.3). Tables without any codes contain no symbols."""
    for index in range(NUM_HUFFMAN_TABLES):
        table, base = tables[index], index << LOOKUP_BITS
        reader.lookups[base : base + (1 << LOOKUP_BITS)] = 0
        code = first = 0
        for length in range(1, MAX_CODE_LENGTH + 1):
            num_codes = np.int64(table.lengths[length - 1])
            reader.limits[index, length], reader.offsets[index, length] = code + num_codes, first - code
            for i in range(num_codes):
                symbol = np.int64(table.symbols[first + i])
                reader.symbols[index, first + i] = symbol
                if length <= LOOKUP_BITS:
                    _, entry = _make_entry(index, symbol, length)
                    shift = LOOKUP_BITS - length
                    for at in range(base + ((code + i) << shift), base + ((code + i + 1) << shift)):
                        reader.lookups[at] = entry
            code, first = (code + num_codes) << 1, first + num_codes
