// The states of an MCU and the symbols of codes: see huffman.c.

#ifndef SHARDIO_ENTROPY_H
#define SHARDIO_ENTROPY_H

#include "decoder.h"

enum {
    DONE = 1 << 10,
    WAITING = DONE + 16,
    REST = 1 << 11,
    PREFIX_BITS = 6,
    MAX_LOOKUP_BITS = 18,  // The maximum bits of a code and its value: three times as many bits fit into a word.
};

typedef struct {
    int size, step;         // The number of bits of the value, and what to add to the state.
    bool is_end, is_known;  // Whether the block ends, and whether a baseline image may have this symbol.
} Symbol;

Symbol read_symbol(int symbol, bool is_dc);

#endif
