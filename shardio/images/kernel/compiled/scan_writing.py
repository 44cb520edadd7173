"""Write a scan's tokens as entropy-coded data (F.1.2)."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.jpeg.standard import MAX_CODE_LENGTH, NUM_HUFFMAN_TABLES, RST0
from shardio.images.kernel.compiled.memory import (
    COPIED_AT_ONCE,
    copy_up_to_ff,
    kernel_function,
    pointer,
    store_word,
)
from shardio.images.kernel.compiled.records import HUFFMAN_TABLE, VALUE_BITS, WRITER

_TOTAL, _VALUE = np.uint64(0xFF), np.uint64((1 << VALUE_BITS) - 1)
_ONE, _THREE, _SEVEN, _EIGHT, _WORD, _TOP = (np.uint64(number) for number in (1, 3, 7, 8, 64, 56))


@kernel_function
def write_scan(call):
    """Write a scan's tokens with other Huffman tables; set the results in ``call``, a CODED_SCAN."""
    tokens = carray(pointer(call.tokens), call.num_tokens, np.uint32)
    stops = carray(pointer(call.stops), call.num_intervals, np.int64)
    lengths = carray(pointer(call.lengths), call.num_intervals, np.int64)
    between = carray(pointer(call.between), call.between_size, np.uint8)
    out = carray(pointer(call.out), call.out_size, np.uint8)
    codes = carray(pointer(call.writer), 1, WRITER)[0].codes
    _make_codes(carray(pointer(call.tables), NUM_HUFFMAN_TABLES, HUFFMAN_TABLE), codes)
    size = start = 0
    for interval in range(call.num_intervals):
        if interval:
            out[size], out[size + 1] = 0xFF, RST0 + (interval - 1) % 8
            size += 2
        num_bytes = _write_interval(tokens, start, stops[interval], codes, between)
        end = _stuff(between, num_bytes, out, size)
        lengths[interval] = end - size
        size, start = end, stops[interval]
    call.size = size


@kernel_function
def _make_codes(tables, codes):
    """Note how to write each symbol (C.2): its code, followed by zeros for its value's bits, << 8 | the number of both.

    A symbol without a code has no bits.
    """
    codes[:] = 0
    for index in range(NUM_HUFFMAN_TABLES):
        table = tables[index]
        code = first = 0
        for length in range(1, MAX_CODE_LENGTH + 1):
            num_codes = np.int64(table.lengths[length - 1])
            for i in range(num_codes):
                symbol = np.int64(table.symbols[first + i])
                size = symbol & 15
                codes[index << 8 | symbol] = (code + i) << (size + 8) | (length + size)
            code, first = (code + num_codes) << 1, first + num_codes


@kernel_function
def _write_interval(tokens, start, stop, codes, out):
    """Write an even number of tokens without stuffing, and fill the last byte with ones; return the number of bytes."""
    at = word = num_bits = np.uint64(0)  # The word's top bits, fewer than eight, are not written yet.
    for i in range(start, stop, 2):
        one, two = np.uint64(tokens[i]), np.uint64(tokens[i + 1])
        code, next_code = codes[np.int64(one) >> VALUE_BITS], codes[np.int64(two) >> VALUE_BITS]
        # Two tokens have at most 54 bits.
        bits = ((code >> _EIGHT) | (one & _VALUE)) << (next_code & _TOTAL) | (next_code >> _EIGHT) | (two & _VALUE)
        num_bits += (code & _TOTAL) + (next_code & _TOTAL)
        word |= bits << (_WORD - num_bits)
        store_word(out, at, word)
        num_bytes = num_bits >> _THREE
        word <<= num_bytes << _THREE
        at += num_bytes
        num_bits &= _SEVEN
    if num_bits:
        out[at] = (word >> _TOP) | (np.uint64(0xFF) >> num_bits)
        at += _ONE
    return at


@kernel_function
def _stuff(data, num_bytes, out, size):
    """Copy data, with a zero after each 0xFF (F.1.2.3); return the end of the copy.

    Some bytes after it may be overwritten.
    """
    at, to = np.uint64(0), np.uint64(size)
    while at < num_bytes:
        num_copied = copy_up_to_ff(data, at, out, to)
        num_left = num_bytes - at
        if num_copied >= num_left:
            return np.int64(to + num_left)
        at += num_copied
        to += num_copied
        if num_copied < np.uint64(COPIED_AT_ONCE):
            out[to], out[to + _ONE] = 0xFF, 0
            at += _ONE
            to += np.uint64(2)
    return np.int64(to)
