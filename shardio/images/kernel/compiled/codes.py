"""The lookup tables of the entropy decoder: Huffman codes (C.2 and F.2.2.3) and the states of an MCU.

A stream's progress within an MCU is one number, the *state*. For each state ``states`` says where the coefficient
that led to it goes, and which lookup table decodes the next code:

=====================  ===============================================================================================
``BLOCK b + DC``       block b's DC coefficient comes next (after the last block: the MCU is complete)
``BLOCK (b + 1) + k``  block b's coefficient k comes next, in zigzag order, 1 ≤ k ≤ 63; k = 64 is the state above
``… k`` from 65 to 79  a run of zeros went beyond the block's end: the file is damaged
=====================  ===============================================================================================

States are shifted so that a complete MCU's state is ``DONE``, whatever its number of blocks. That state and those of
overlong runs after it are the only ones with bit 11 set. Rare codes, which are longer than nine bits or invalid, also
jump there. The entry of a code says by how much the state grows: 65 for DC, run + 1 for AC. The end of a block first
sets the state's low six bits.
"""

from __future__ import annotations

import numpy as np

from shardio.images.jpeg.standard import (
    EOB,
    FIRST_AC_TABLE,
    MAX_AC_SIZE,
    MAX_CODE_LENGTH,
    MAX_DC_SIZE,
    MAX_DC_SYMBOL,
    NATURAL_ORDER,
    NUM_HUFFMAN_TABLES,
    ZRL,
)
from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.records import AREA, LOOKUP_BITS

# The fields of an entry: the bits of the code and the value after it (bits 0 to 5), the shift for the value (8 to 13),
# the value's mask (16 to 31), what to set in the state (40 to 47), and what to add to it (48 to 63).
SHIFT, MASK, SET, ADD = np.uint64(8), np.uint64(16), np.uint64(40), np.uint64(48)

LOOKUP = np.uint64(32)
"""An element of ``states`` is the index of the coefficient, and above it the next lookup table."""

DONE = AREA // 2
"""The state of a complete MCU."""

BLOCK, DC = 128, 64
"""The number of states of a block, and the first one: that of its DC coefficient."""

MAX_OVERSHOOT = 15
"""The maximum number of coefficients by which a run overshoots its block, if it begins at the last one."""

AFTER = MAX_OVERSHOOT + 1
"""Added to a complete MCU's state instead of the second symbol of a round. No run overshoots that far."""

STAY, WAIT, JUMP = 0, 1 << LOOKUP_BITS, 2 << LOOKUP_BITS
"""Lookup tables whose codes have no bits: nothing happens, the MCU is complete, or the state is invalid."""

FIRST_LOOKUP = 3 << LOOKUP_BITS
"""The first lookup table that belongs to an image."""


@kernel_function
def prepare_tables(work):
    """Fill in the entries that are the same for all images, once for each workspace. They must be zeros before."""
    for i in range(1 << LOOKUP_BITS):
        work.entries[WAIT + i] = np.uint64(AFTER) << ADD
        work.entries[JUMP + i] = np.uint64(DONE) << ADD


@kernel_function
def read_huffman_tables(data, member, work):
    """Make the lookup tables of an image (F.2.2.3). Return whether a baseline image may have its Huffman tables.

    For codes of more than nine bits, there are two arrays by length. ``limits`` holds the smallest number of that many
    bits that neither is nor begins a code. ``offsets`` holds what to add to a code to get its symbol's index in
    ``symbols``.
    """
    head = work.heads[member]
    for c in range(head.num_components):
        for table in (head.dc_table[c], head.ac_table[c]):
            if not _read_table(data, head.huffman[table], table, member, work):
                return False
    return True


@kernel_function
def _read_table(data, counts, table, member, work):
    """Make the lookup table of one Huffman table, whose code counts begin at ``counts``."""
    entries, symbols, limits, offsets = work.entries, work.symbols[member, table], work.limits, work.offsets
    symbol = 0  # The index of the next one.
    first = _find_lookup(member, table)
    for i in range(first, first + (1 << LOOKUP_BITS)):
        entries[i] = np.uint64(DONE) << ADD
    code = np.int64(0)
    for length in range(1, MAX_CODE_LENGTH + 1):
        num_codes = np.int64(data[counts + length - 1])
        if code + num_codes > (1 << length) - (num_codes > 0):  # The code of all ones stays unused (C.2).
            return False
        limits[member, table, length], offsets[member, table, length] = code + num_codes, symbol - code
        for i in range(num_codes):
            value = np.int64(data[counts + MAX_CODE_LENGTH + symbol + i])
            symbols[symbol + i] = value
            if table < FIRST_AC_TABLE and value > MAX_DC_SYMBOL:
                return False
            if length <= LOOKUP_BITS:
                span = 1 << (LOOKUP_BITS - length)
                entry = make_entry(value, length, table < FIRST_AC_TABLE)
                at = first + (code + i) * span
                for j in range(span):
                    entries[at + j] = entry
        code = (code + num_codes) << 1
        symbol += num_codes
    return True


@kernel_function
def _find_lookup(member, table):
    """Return where the lookup table of a Huffman table begins among the entries."""
    return FIRST_LOOKUP + ((member * NUM_HUFFMAN_TABLES + table) << LOOKUP_BITS)


@kernel_function
def make_entry(symbol, length, is_dc):
    """Return the entry of a code, or a jump if no baseline image has its symbol (F.1.2.1 and F.1.2.2)."""
    run, size, low_bits = symbol >> 4, symbol & 15, 0
    if is_dc:
        step = DC + 1
        is_known = symbol <= MAX_DC_SIZE
    else:
        step = run + 1
        is_known = size <= MAX_AC_SIZE and (size > 0 or symbol in (EOB, ZRL))
        if symbol == EOB:
            low_bits = 63
    if not is_known:
        return np.uint64(DONE) << ADD
    total = np.uint64(length + size)
    shift = np.uint64(64 - length - size) << SHIFT
    mask = np.uint64((1 << size) - 1) << MASK
    return total | shift | mask | np.uint64(low_bits) << SET | np.uint64(step) << ADD


@kernel_function
def lay_out_states(member, work):
    """Fill in an image's two areas of ``states``: where its coefficients go, and which lookup table comes next.

    Needed MCUs have a row of lanes for each coefficient, after one for values that are ignored. The others keep only
    their DC coefficients, as later ones are differences from them.
    """
    head, region, states = work.heads[member], work.regions[member], work.states
    needed, skipped = 2 * member * AREA, (2 * member + 1) * AREA
    first = DONE - BLOCK * region.num_blocks
    for area in (needed, skipped):
        is_needed = area == needed
        row = region.num_lanes if is_needed else head.columns
        state = area + first
        states[state] = _next(0, _find_lookup(member, head.dc_table[0]))
        for block in range(region.num_blocks):
            ac_lookup = _find_lookup(member, head.ac_table[region.component[block]])
            state = area + first + BLOCK * (block + 1) - DC
            index = (1 + 64 * block) * row if is_needed else (1 + block) * row
            states[state + 1] = _next(index, ac_lookup)
            for k in range(1, 64):
                lookup = ac_lookup
                if k == 63:
                    is_last = block == region.num_blocks - 1
                    lookup = WAIT if is_last else _find_lookup(member, head.dc_table[region.component[block + 1]])
                states[state + k + 1] = _next((1 + 64 * block + NATURAL_ORDER[k]) * row if is_needed else 0, lookup)
            for k in range(DC + 1, DC + MAX_OVERSHOOT + 1):  # After the last block, the MCU is already complete.
                states[state + k] = _next(0, STAY if block == region.num_blocks - 1 else JUMP)
    work.starts[member] = first


@kernel_function
def _next(index, lookup):
    return np.uint64(index) | np.uint64(lookup) << LOOKUP
