"""What the entropy decoder looks up: Huffman tables (ITU-T T.81, C.2 and F.2.2.3), and the states of an MCU.

Where a stream is inside of its MCU is one number, the *state*. A table says for each state where the coefficient goes
that led to it, and which Huffman table the next code is of:

=====================  ===============================================================================================
``BLOCK b + DC``       block b's DC coefficient comes next (so after the last block: the MCU is complete)
``BLOCK (b + 1) + k``  block b's coefficient k comes next, in zigzag order, 1 ≤ k ≤ 63; k = 64 is the state above
``… k`` from 65 to 79  a run went beyond the block's end: no JPEG
=====================  ===============================================================================================

All that is shifted, so that a complete MCU's state is ``DONE``, whatever number of blocks it has: with the states of
runs behind it, they and no others have bit 11 set. The rare cases jump there, too: a code of more than nine bits, or
one that does not exist. A code's entry says by how much the state grows: 65 for DC, run + 1 for AC; the end of a block
sets the state's low six bits first.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.heads import NATURAL_ORDER
from shardio.images.kernel.memory import compiled
from shardio.images.kernel.records import AREA, FIRST_AC_SLOT, MAX_LENGTH, NUM_SLOTS, SHORT

MAX_DC_SIZE, MAX_AC_SIZE = 11, 10
"""Bits of a value behind a code, in a baseline image of 8 bits (tables F.1 and F.2)."""

MAX_DC = 2047
"""The largest absolute value of a DC coefficient: differences add up, and must not leave 12 bits."""

MAX_DC_SYMBOL = 15
"""libjpeg refuses tables with larger ones (jdhuff.c), used or not."""

ZRL_RUN = 15

# An entry's bits: how many bits the code and the value behind it have (0 to 5), how far to shift for the value (8 to
# 13), the value's mask (16 to 31), what to set in the state (40 to 47), what to add to it (48 to 63).
SHIFT, MASK, SET, ADD = np.uint64(8), np.uint64(16), np.uint64(40), np.uint64(48)

TABLE = np.uint64(32)
"""A state's next table is above the place of its coefficient."""

DONE = AREA // 2
"""The state of a complete MCU."""

BLOCK, DC = 128, 64
"""States of a block, and the first one: that of its DC coefficient."""

MAX_OVERSHOOT = 15
"""Coefficients by which a run can go beyond its block: one that begins at the last one."""

AFTER = MAX_OVERSHOOT + 1
"""What is added to a complete MCU's state where the second symbol of a round would be: no overshoot is as long."""

STAY, WAIT, JUMP = 0, 1 << SHORT, 2 << SHORT
"""Tables whose codes have no bits: nothing happens, the MCU is complete, or the state is one that must not be."""

FIRST_TABLE = 3 << SHORT
"""Of those that images have."""


@compiled
def prepare_tables(work):
    """Fill in what is the same for all images, once for each workspace; what it holds must be zeros."""
    for i in range(1 << SHORT):
        work.entries[WAIT + i] = np.uint64(AFTER) << ADD
        work.entries[JUMP + i] = np.uint64(DONE) << ADD


@compiled
def read_huffman_tables(data, seat, work):
    """Make the tables of an image (F.2.2.3); return whether they are such as a baseline image may have.

    For codes of more than nine bits ``limits`` has, by the length, the first number of so many bits that is no code,
    nor begins with one; and ``offsets`` what to add to a code for its symbol's place among ``symbols``.
    """
    head = work.heads[seat]
    for c in range(head.num_components):
        for slot in (head.dc_slot[c], head.ac_slot[c]):
            if not _read_table(data, head.huffman[slot], slot, seat, work):
                return False
    return True


@compiled
def _read_table(data, counts, slot, seat, work):
    entries, symbols, limits, offsets = work.entries, work.symbols[seat, slot], work.limits, work.offsets
    symbol = 0  # The number of the next one.
    first = _table(seat, slot)
    for i in range(first, first + (1 << SHORT)):
        entries[i] = np.uint64(DONE) << ADD
    code = np.int64(0)
    for length in range(1, MAX_LENGTH + 1):
        number = np.int64(data[counts + length - 1])
        if code + number > (1 << length) - (number > 0):  # A code of ones alone is kept free (C.2).
            return False
        limits[seat, slot, length], offsets[seat, slot, length] = code + number, symbol - code
        for i in range(number):
            value = np.int64(data[counts + MAX_LENGTH + symbol + i])
            symbols[symbol + i] = value
            if slot < FIRST_AC_SLOT and value > MAX_DC_SYMBOL:
                return False
            if length <= SHORT:
                span = 1 << (SHORT - length)
                entry = make_entry(value, length, slot < FIRST_AC_SLOT)
                at = first + (code + i) * span
                for j in range(span):
                    entries[at + j] = entry
        code = (code + number) << 1
        symbol += number
    return True


@compiled
def _table(seat, slot):
    return FIRST_TABLE + ((seat * NUM_SLOTS + slot) << SHORT)


@compiled
def make_entry(symbol, length, is_dc):
    """Return what a code does; a jump if no baseline image has its symbol (F.1.2.1 and F.1.2.2)."""
    run, size, low_bits = symbol >> 4, symbol & 15, 0
    if is_dc:
        step = DC + 1
        is_known = symbol <= MAX_DC_SIZE
    else:
        step = run + 1
        is_known = size <= MAX_AC_SIZE and (size > 0 or run == 0 or run == ZRL_RUN)
        if symbol == 0:  # The end of the block.
            low_bits = 63
    if not is_known:
        return np.uint64(DONE) << ADD
    total = np.uint64(length + size)
    shift = np.uint64(64 - length - size) << SHIFT
    mask = np.uint64((1 << size) - 1) << MASK
    return total | shift | mask | np.uint64(low_bits) << SET | np.uint64(step) << ADD


@compiled
def lay_out_states(seat, work):
    """Fill in an image's two areas of ``states``: where its coefficients go, and which table comes next.

    Needed MCUs have a row of lanes for each coefficient, behind one for what is not looked at. Of the others only the
    DC coefficients are kept, as the next ones are differences.
    """
    head, region, states = work.heads[seat], work.regions[seat], work.states
    needed, skipped = 2 * seat * AREA, (2 * seat + 1) * AREA
    first = DONE - BLOCK * region.num_blocks
    for area in (needed, skipped):
        is_needed = area == needed
        row = region.num_lanes if is_needed else head.columns
        state = area + first
        states[state] = _next(0, _table(seat, head.dc_slot[0]))
        for block in range(region.num_blocks):
            ac_table = _table(seat, head.ac_slot[region.component[block]])
            state = area + first + BLOCK * (block + 1) - DC
            place = (1 + 64 * block) * row if is_needed else (1 + block) * row
            states[state + 1] = _next(place, ac_table)
            for k in range(1, 64):
                table = ac_table
                if k == 63:
                    is_last = block == region.num_blocks - 1
                    table = WAIT if is_last else _table(seat, head.dc_slot[region.component[block + 1]])
                states[state + k + 1] = _next((1 + 64 * block + NATURAL_ORDER[k]) * row if is_needed else 0, table)
            for k in range(DC + 1, DC + MAX_OVERSHOOT + 1):  # Behind the last block they are done already.
                states[state + k] = _next(0, STAY if block == region.num_blocks - 1 else JUMP)
    work.starts[seat] = first


@compiled
def _next(place, table):
    return np.uint64(place) | np.uint64(table) << TABLE
