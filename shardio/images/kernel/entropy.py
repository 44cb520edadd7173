"""Huffman decoding of up to three streams side by side (ITU-T T.81, F.2.2).

Decoding a symbol is a chain in which each step waits for the one before: look up the code, shift it away, look up the
next. One chain leaves most of a core idle; three, taken in turns by one thread, fill it. (Four have no registers left.)
There are hardly any branches in it: :mod:`codes` says how one number, the state, replaces them. So each round of the
loop, two symbols a stream, has a single one.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.codes import ADD, AFTER, DONE, FIRST_TABLE, MASK, MAX_DC, SET, SHIFT, STAY, TABLE, make_entry
from shardio.images.kernel.memory import compiled, load_word
from shardio.images.kernel.records import AREA, FIRST_AC_SLOT, MAX_LENGTH, MAX_SEATS, NUM_CHAINS, NUM_SLOTS, SHORT

_DONE, _NOT_DONE_YET = np.uint64(DONE), np.uint64(DONE - 1 - AFTER)
_SIX_BITS, _LOW_8, _LOW_16, _PLACE = np.uint64(63), np.uint64(0xFF), np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
_ONE, _THREE, _SEVEN, _TOP = np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(64 - SHORT)


@compiled
def decode_streams(work):
    """Decode all streams of the workspace into its coefficients, DC coefficients as they are, no differences.

    Args:
        work: The workspace, in which the coefficients of needed MCUs are zeros; ``good`` becomes 0 for images whose
            streams are not as they should be.
    """
    bits, entries, states, coefficients, chains = work.bits, work.entries, work.states, work.coefficients, work.chains
    work.next_stream, work.num_busy = 0, NUM_CHAINS
    for i in range(NUM_CHAINS):
        chains[i].number = i
    # Of each chain: its bit, state and table, the place of its MCU among the coefficients, MCUs that are left, word.
    b0, s0, t0, a0, m0 = _next_stream(chains[0], work)
    b1, s1, t1, a1, m1 = _next_stream(chains[1], work)
    b2, s2, t2, a2, m2 = _next_stream(chains[2], work)
    while work.num_busy:
        while True:
            # From any bit, a word has at least 57 bits; two symbols with short codes have 40 at the most.
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
                s0, t0, a0, m0 = chains[0].start, chains[0].table, a0 + _ONE, m0 - 1
            else:
                b0, s0, t0, a0, m0 = _go_on(chains[0], b0, s0, a0, m0, work)
        if s1 & _DONE:
            if m1 > 1 and s1 & _NOT_DONE_YET == 0 and b1 <= chains[1].limit:
                s1, t1, a1, m1 = chains[1].start, chains[1].table, a1 + _ONE, m1 - 1
            else:
                b1, s1, t1, a1, m1 = _go_on(chains[1], b1, s1, a1, m1, work)
        if s2 & _DONE:
            if m2 > 1 and s2 & _NOT_DONE_YET == 0 and b2 <= chains[2].limit:
                s2, t2, a2, m2 = chains[2].start, chains[2].table, a2 + _ONE, m2 - 1
            else:
                b2, s2, t2, a2, m2 = _go_on(chains[2], b2, s2, a2, m2, work)


@compiled
def _decode_symbol(word, bit, state, table, base, entries, states, coefficients):
    """Decode a code and the value behind it (F.2.2.1 and F.2.2.2); return the word, bit, state and table after it."""
    return _decode_value(entries[table + (word >> _TOP)], word, bit, state, base, states, coefficients)


@compiled
def _decode_value(entry, word, bit, state, base, states, coefficients):
    mask = (entry >> MASK) & _LOW_16
    value = (word >> ((entry >> SHIFT) & _SIX_BITS)) & mask
    # A value whose first bit is 0 is negative (figure F.12).
    signed = np.int64(value) - (np.int64(mask) if value <= mask >> _ONE else np.int64(0))
    state = (state | ((entry >> SET) & _LOW_8)) + (entry >> ADD)
    step = states[state]
    coefficients[base + (step & _PLACE)] = np.int16(signed)
    total = entry & _SIX_BITS
    return word << total, bit + total, state, step >> TABLE


@compiled
def _go_on(chain, bit, state, base, left, work):
    """Do what the fast loop does not: decode a long code, finish a run, go on with the next run or stream."""
    stream = work.streams[chain.stream]
    is_good = bit <= chain.limit
    if is_good and state & _NOT_DONE_YET:
        bit, state = _decode_long(bit, state - _DONE, base, stream.seat, work)
        if state:
            return bit, state, work.states[state] >> TABLE, base, left
        is_good = False
    if is_good and _sum_up_dc(chain, stream.seat, work):
        chain.mcu += chain.run
        if chain.left:
            _begin_run(chain, stream.seat, work)
            return bit, chain.start, chain.table, np.uint64(chain.base), chain.run
        is_good = not stream.is_whole or (np.int64(bit) + 7) >> 3 == stream.stop >> 3
    else:
        is_good = False
    if not is_good:
        work.good[stream.seat] = 0
    return _next_stream(chain, work)


@compiled
def _next_stream(chain, work):
    """Give a chain the next stream of an image that is good so far, or let it wait for the others' end."""
    while work.next_stream < work.num_streams:
        chain.stream = work.next_stream
        work.next_stream += 1
        stream = work.streams[chain.stream]
        if work.good[stream.seat]:
            chain.mcu, chain.left, chain.limit = stream.mcu, stream.num_mcus, np.uint64(stream.stop)
            chain.dc[:] = 0
            _begin_run(chain, stream.seat, work)
            return np.uint64(stream.start), chain.start, chain.table, np.uint64(chain.base), chain.run
    work.num_busy -= 1
    return np.uint64(0), np.uint64(2 * MAX_SEATS * AREA), np.uint64(STAY), np.uint64(0), np.int64(0)


@compiled
def _begin_run(chain, seat, work):
    """Begin the next run of a stream: the MCUs up to where the needed columns begin or end, or the row."""
    head, region = work.heads[seat], work.regions[seat]
    row, column = chain.mcu // head.columns, chain.mcu % head.columns
    stop = head.columns
    chain.is_needed = 0
    if region.first_row <= row < region.stop_row:
        if column < region.first_column:
            stop = region.first_column
        elif column < region.stop_column:
            stop = region.stop_column
            chain.is_needed = 1
    chain.run = min(stop - column, chain.left)
    chain.left -= chain.run
    if chain.is_needed:
        chain.base = region.coefficients + (row - region.first_row) * region.stride + column - region.first_column
        chain.start = np.uint64(2 * seat * AREA + work.starts[seat])
    else:
        chain.base = region.skipped + chain.number * (1 + region.num_blocks) * head.columns
        chain.start = np.uint64((2 * seat + 1) * AREA + work.starts[seat])
    chain.table = work.states[chain.start] >> TABLE


@compiled
def _sum_up_dc(chain, seat, work):
    """Turn a run's DC differences into coefficients (F.1.1.5.1); return whether they are in range."""
    region, coefficients = work.regions[seat], work.coefficients
    row = region.num_lanes if chain.is_needed else work.heads[seat].columns
    step = 64 * row if chain.is_needed else row
    for mcu in range(chain.run):
        for block in range(region.num_blocks):
            place = chain.base + mcu + row + block * step
            component = region.component[block]
            dc = chain.dc[component] + np.int64(coefficients[place])
            if not -MAX_DC <= dc <= MAX_DC:
                return False
            chain.dc[component] = dc
            coefficients[place] = dc
    return True


@compiled
def _decode_long(bit, state, base, seat, work):
    """Decode a symbol whose code has more than nine bits (F.2.2.3).

    Returns:
        The bit and the state after it; state 0 if there is no such code, or no code comes in that state.
    """
    limits, offsets, symbols = work.limits[seat], work.offsets[seat], work.symbols[seat]
    table = np.int64(work.states[state] >> TABLE)
    if table < FIRST_TABLE:
        return bit, np.uint64(0)
    slot = ((table - FIRST_TABLE) >> SHORT) % NUM_SLOTS
    word = load_word(work.bits, bit >> _THREE) << (bit & _SEVEN)
    ahead = np.int64(word >> np.uint64(64 - MAX_LENGTH))
    if ahead >> (MAX_LENGTH - SHORT) < limits[slot, SHORT]:  # It is a short one, with a symbol that must not be.
        return bit, np.uint64(0)
    for length in range(SHORT + 1, MAX_LENGTH + 1):
        code = ahead >> (MAX_LENGTH - length)
        if code < limits[slot, length]:
            entry = make_entry(np.int64(symbols[slot, code + offsets[slot, length]]), length, slot < FIRST_AC_SLOT)
            if entry >> ADD != _DONE:
                _, bit, state, _ = _decode_value(entry, word, bit, state, base, work.states, work.coefficients)
                return bit, state
            break
    return bit, np.uint64(0)
