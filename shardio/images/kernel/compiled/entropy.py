"""Huffman decoding of up to three streams side by side (F.2.2).

Decoding is a chain of dependent steps: look up the code, shift it away, look up the next one. One chain leaves most of
a core idle. Three interleaved chains in one thread fill it. (Four need more registers than processors have.) A number,
the state, replaces most branches: see :mod:`codes`. So each round of the loop, which decodes two symbols per stream,
has a single branch.
"""

from __future__ import annotations

import numpy as np

from shardio.images.jpeg.standard import FIRST_AC_TABLE, MAX_CODE_LENGTH, MAX_DC, NUM_HUFFMAN_TABLES
from shardio.images.kernel.compiled.codes import (
    ADD,
    AFTER,
    DONE,
    FIRST_LOOKUP,
    LOOKUP,
    MASK,
    SET,
    SHIFT,
    STAY,
    make_entry,
)
from shardio.images.kernel.compiled.memory import kernel_function, load_word
from shardio.images.kernel.compiled.records import AREA, GROUP_SIZE, LOOKUP_BITS, NUM_CHAINS

_DONE, _NOT_DONE_YET = np.uint64(DONE), np.uint64(DONE - 1 - AFTER)
_SIX_BITS, _LOW_8, _LOW_16, _LOW_32 = np.uint64(63), np.uint64(0xFF), np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
_ONE, _THREE, _SEVEN, _TOP = np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(64 - LOOKUP_BITS)


@kernel_function
def decode_streams(work):
    """Decode all streams of the workspace into its coefficients. DC coefficients are final, not differences.

    Args:
        work: The workspace, in which the coefficients of needed MCUs are zeros; ``is_good`` becomes 0 for images whose
            streams are damaged.
    """
    bits, entries, states, coefficients, chains = work.bits, work.entries, work.states, work.coefficients, work.chains
    work.next_stream, work.num_busy = 0, NUM_CHAINS
    for i in range(NUM_CHAINS):
        chains[i].index = i
    # For each chain, b is its bit, s its state, t its lookup table, a the index of its MCU among the coefficients, m
    # the number of MCUs left in the run, and w a word of the data.
    b0, s0, t0, a0, m0 = _next_stream(chains[0], work)
    b1, s1, t1, a1, m1 = _next_stream(chains[1], work)
    b2, s2, t2, a2, m2 = _next_stream(chains[2], work)
    while work.num_busy:
        while True:
            # From any bit on, a word has at least 57 bits; two symbols with short codes have at most 40.
            w0 = load_word(bits, b0 >> _THREE) << (b0 & _SEVEN)
            w1 = load_word(bits, b1 >> _THREE) << (b1 & _SEVEN)
            w2 = load_word(bits, b2 >> _THREE) << (b2 & _SEVEN)
            w0, b0, s0, t0 = _decode_symbol(w0, b0, s0, t0, a0, entries, states, coefficients)
            w1, b1, s1, t1 = _decode_symbol(w1, b1, s1, t1, a1, entries, states, coefficients)
            w2, b2, s2, t2 = _decode_symbol(w2, b2, s2, t2, a2, entries, states, coefficients)
            w0, b0, s0, t0 = _decode_symbol(w0, b0, s0, t0, a0, entries, states, coefficients)
            w1, b1, s1, t1 = _decode_symbol(w1, b1, s1, t1, a1, entries, states, coefficients)
            w2, b2, s2, t2 = _decode_symbol(w2, b2, s2, t2, a2, entries, states, coefficients)
            if (s0 | s1 | s2) & _DONE:
                break
        if s0 & _DONE:
            if m0 > 1 and s0 & _NOT_DONE_YET == 0 and b0 <= chains[0].limit:
                s0, t0, a0, m0 = chains[0].start, chains[0].lookup, a0 + _ONE, m0 - 1
            else:
                b0, s0, t0, a0, m0 = _continue(chains[0], b0, s0, a0, m0, work)
        if s1 & _DONE:
            if m1 > 1 and s1 & _NOT_DONE_YET == 0 and b1 <= chains[1].limit:
                s1, t1, a1, m1 = chains[1].start, chains[1].lookup, a1 + _ONE, m1 - 1
            else:
                b1, s1, t1, a1, m1 = _continue(chains[1], b1, s1, a1, m1, work)
        if s2 & _DONE:
            if m2 > 1 and s2 & _NOT_DONE_YET == 0 and b2 <= chains[2].limit:
                s2, t2, a2, m2 = chains[2].start, chains[2].lookup, a2 + _ONE, m2 - 1
            else:
                b2, s2, t2, a2, m2 = _continue(chains[2], b2, s2, a2, m2, work)


@kernel_function
def _decode_symbol(word, bit, state, lookup, base, entries, states, coefficients):
    """Decode a code and its value (F.2.2.1 and F.2.2.2); return the next word, bit, state and lookup table."""
    return _decode_value(entries[lookup + (word >> _TOP)], word, bit, state, base, states, coefficients)


@kernel_function
def _decode_value(entry, word, bit, state, base, states, coefficients):
    mask = (entry >> MASK) & _LOW_16
    value = (word >> ((entry >> SHIFT) & _SIX_BITS)) & mask
    # A value whose first bit is 0 is negative (figure F.12).
    signed = np.int64(value) - (np.int64(mask) if value <= mask >> _ONE else np.int64(0))
    state = (state | ((entry >> SET) & _LOW_8)) + (entry >> ADD)
    step = states[state]
    coefficients[base + (step & _LOW_32)] = np.int16(signed)
    total = entry & _SIX_BITS
    return word << total, bit + total, state, step >> LOOKUP


@kernel_function
def _continue(chain, bit, state, base, num_left, work):
    """Do what the fast loop does not: decode a long code, finish a run, begin the next run or stream."""
    stream = work.streams[chain.stream]
    is_good = bit <= chain.limit
    if is_good and state & _NOT_DONE_YET:
        bit, state = _decode_long(bit, state - _DONE, base, stream.member, work)
        if state:
            return bit, state, work.states[state] >> LOOKUP, base, num_left
        is_good = False
    if is_good and _sum_up_dc(chain, stream.member, work):
        chain.mcu += chain.run
        if chain.num_left:
            _begin_run(chain, stream.member, work)
            return bit, chain.start, chain.lookup, np.uint64(chain.base), chain.run
        is_good = not stream.is_whole or (np.int64(bit) + 7) >> 3 == stream.stop >> 3
    else:
        is_good = False
    if not is_good:
        work.is_good[stream.member] = 0
    return _next_stream(chain, work)


@kernel_function
def _next_stream(chain, work):
    """Assign the next stream of an undamaged image to a chain, or make the chain wait until the other chains finish."""
    while work.next_stream < work.num_streams:
        chain.stream = work.next_stream
        work.next_stream += 1
        stream = work.streams[chain.stream]
        if work.is_good[stream.member]:
            chain.mcu, chain.num_left, chain.limit = stream.mcu, stream.num_mcus, np.uint64(stream.stop)
            chain.dc[:] = 0
            _begin_run(chain, stream.member, work)
            return np.uint64(stream.start), chain.start, chain.lookup, np.uint64(chain.base), chain.run
    work.num_busy -= 1
    return np.uint64(0), np.uint64(2 * GROUP_SIZE * AREA), np.uint64(STAY), np.uint64(0), np.int64(0)


@kernel_function
def _begin_run(chain, member, work):
    """Begin the next run of a stream: the MCUs up to the start or end of the needed columns, or the end of the row."""
    head, region = work.heads[member], work.regions[member]
    row, column = chain.mcu // head.columns, chain.mcu % head.columns
    stop = head.columns
    chain.is_needed = 0
    if region.first_row <= row < region.stop_row:
        if column < region.first_column:
            stop = region.first_column
        elif column < region.stop_column:
            stop = region.stop_column
            chain.is_needed = 1
    chain.run = min(stop - column, chain.num_left)
    chain.num_left -= chain.run
    if chain.is_needed:
        chain.base = region.coefficients + (row - region.first_row) * region.stride + column - region.first_column
        chain.start = np.uint64(2 * member * AREA + work.starts[member])
    else:
        chain.base = region.skipped + chain.index * (1 + region.num_blocks) * head.columns
        chain.start = np.uint64((2 * member + 1) * AREA + work.starts[member])
    chain.lookup = work.states[chain.start] >> LOOKUP


@kernel_function
def _sum_up_dc(chain, member, work):
    """Convert a run's DC differences to coefficients (F.1.1.5.1). Return whether they are in range."""
    region, coefficients = work.regions[member], work.coefficients
    row = region.num_lanes if chain.is_needed else work.heads[member].columns
    step = 64 * row if chain.is_needed else row
    for mcu in range(chain.run):
        for block in range(region.num_blocks):
            index = chain.base + mcu + row + block * step
            component = region.component[block]
            dc = chain.dc[component] + np.int64(coefficients[index])
            if not -MAX_DC <= dc <= MAX_DC:
                return False
            chain.dc[component] = dc
            coefficients[index] = dc
    return True


@kernel_function
def _decode_long(bit, state, base, member, work):
    """Decode a symbol whose code has more than nine bits (F.2.2.3).

    Returns:
        The bit and the state after it. The state is 0 if there is no such code, or if ``state`` expects no code.
    """
    limits, offsets, symbols = work.limits[member], work.offsets[member], work.symbols[member]
    lookup = np.int64(work.states[state] >> LOOKUP)
    if lookup < FIRST_LOOKUP:
        return bit, np.uint64(0)
    table = ((lookup - FIRST_LOOKUP) >> LOOKUP_BITS) % NUM_HUFFMAN_TABLES
    word = load_word(work.bits, bit >> _THREE) << (bit & _SEVEN)
    ahead = np.int64(word >> np.uint64(64 - MAX_CODE_LENGTH))
    if ahead >> (MAX_CODE_LENGTH - LOOKUP_BITS) < limits[table, LOOKUP_BITS]:  # A short code with an invalid symbol.
        return bit, np.uint64(0)
    for length in range(LOOKUP_BITS + 1, MAX_CODE_LENGTH + 1):
        code = ahead >> (MAX_CODE_LENGTH - length)
        if code < limits[table, length]:
            entry = make_entry(np.int64(symbols[table, code + offsets[table, length]]), length, table < FIRST_AC_TABLE)
            if entry >> ADD != _DONE:
                _, bit, state, _ = _decode_value(entry, word, bit, state, base, work.states, work.coefficients)
                return bit, state
            break
    return bit, np.uint64(0)
