// Huffman codes, as numbered by annex C.2: codes of one length are successive numbers.

#ifndef SHARDIO_CODES_H
#define SHARDIO_CODES_H

#include "shared.h"

enum { MAX_CODE_LENGTH = 16 };

// The meaning of a code.
typedef struct {
    int size, step;         // The number of bits of the value, and what to add to the state (huffman.c).
    bool is_end, is_known;  // Whether the block ends, and whether a baseline image may have this symbol.
} Symbol;

// Return the meaning of a symbol (F.1.2.1 and F.1.2.2).
static inline Symbol read_symbol(int symbol, bool is_dc) {
    int run = symbol >> 4, size = symbol & 15;
    bool is_end = symbol == 0, is_known = size <= 10 && (size > 0 || is_end || symbol == 0xF0);
    Symbol dc = {symbol, 65, false, symbol <= 11}, ac = {size, is_end ? 64 : run + 1, is_end, is_known};
    return is_dc ? dc : ac;
}

// The codes of a table. The codes of each length are the numbers from firsts[length] to limits[length] - 1.
typedef struct {
    const uint8_t *symbols;                // In the order of their codes.
    int32_t firsts[MAX_CODE_LENGTH + 1];   // By code length.
    int32_t limits[MAX_CODE_LENGTH + 1];   // By code length.
    int32_t offsets[MAX_CODE_LENGTH + 1];  // By code length: what to add to a code to get its symbol's index.
} Codes;

// Number the codes of a table, given the number of codes of each length, 1 to 16. Return false if there are more codes
// than their lengths allow.
static inline bool number_codes(const uint8_t *counts, const uint8_t *symbols, Codes *codes) {
    codes->symbols = symbols;
    int code = 0, index = 0;
    for (int length = 1; length <= MAX_CODE_LENGTH; length++) {
        int count = counts[length - 1];
        if (code + count > (1 << length) - (count > 0)) return false;  // The code of all ones stays unused (C.2).
        codes->firsts[length] = code;
        codes->limits[length] = code + count;
        codes->offsets[length] = index - code;
        index += count;
        code = (code + count) << 1;
    }
    return true;
}

static inline int get_symbol(const Codes *codes, int code, int length) {
    return codes->symbols[code + codes->offsets[length]];
}

// Find the code with which the highest bits of a word begin (F.2.2.3). Return the code's symbol and set its length, or
// return -1 if there is no such code.
static inline int find_symbol(const Codes *codes, uint64_t word, int *length) {
    int ahead = (int)(word >> (64 - MAX_CODE_LENGTH));
    for (*length = 1; *length <= MAX_CODE_LENGTH; ++*length) {
        int code = ahead >> (MAX_CODE_LENGTH - *length);
        if (code < codes->limits[*length]) return get_symbol(codes, code, *length);
    }
    return -1;
}

#endif
