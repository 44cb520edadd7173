// Make the Huffman table that needs the fewest bits for given counts of symbols, as figures K.1 to K.4 and libjpeg do:
// find code sizes, count codes by size, limit sizes to 16 bits, and sort symbols by size.
//
// The code of all ones stays unused (C.2): it belongs to an extra symbol, which is treated as if it occurred once.

#include "decoder.h"

#include <string.h>

enum {
    UNUSED = 256,  // The symbol for the code of all ones.
    SYMBOL_BITS = 9,
};

// Trees of symbols. An element of `heap` is a tree: the sum of its symbols' counts and, in the low bits, 256 minus one
// of its symbols, which is the tree's name. So, among equally frequent trees, the one that is named after the highest
// symbol compares as the smallest.
typedef struct {
    int64_t heap[UNUSED + 1];
    int num_trees;
    int16_t code_sizes[UNUSED + 1];
    int16_t others[UNUSED + 1];  // The next symbol in the same tree; -1 if there is none.
} Forest;

// Move a tree down in the heap until none below it is less frequent.
static void sift_down(Forest *forest, int place) {
    int64_t *heap = forest->heap, tree = heap[place];
    for (;;) {
        int below = 2 * place + 1;
        if (below >= forest->num_trees) break;
        if (below + 1 < forest->num_trees && heap[below + 1] < heap[below]) below++;
        if (tree <= heap[below]) break;
        heap[place] = heap[below];
        place = below;
    }
    heap[place] = tree;
}

static int name_of(int64_t tree) { return UNUSED - (int)(tree & ((1 << SYMBOL_BITS) - 1)); }

// Make the codes of a tree one bit longer. Return the tree's last symbol.
static int lengthen(Forest *forest, int symbol) {
    forest->code_sizes[symbol]++;
    while (forest->others[symbol] >= 0) {
        symbol = forest->others[symbol];
        forest->code_sizes[symbol]++;
    }
    return symbol;
}

// Join the two least frequent trees repeatedly until one is left. For each symbol, count how often its tree was joined.
static void find_code_sizes(const int64_t *counts, Forest *forest) {
    memset(forest->code_sizes, 0, sizeof forest->code_sizes);
    memset(forest->others, -1, sizeof forest->others);
    int64_t *heap = forest->heap;
    heap[0] = 1 << SYMBOL_BITS;
    forest->num_trees = 1;
    for (int i = 0; i < UNUSED; i++) {
        if (counts[i] > 0) heap[forest->num_trees++] = counts[i] << SYMBOL_BITS | (UNUSED - i);
    }
    for (int place = forest->num_trees / 2 - 1; place >= 0; place--) sift_down(forest, place);
    while (forest->num_trees > 1) {
        int64_t least = heap[0];
        heap[0] = heap[--forest->num_trees];
        sift_down(forest, 0);
        int first = name_of(least), second = name_of(heap[0]);
        heap[0] = least + (heap[0] >> SYMBOL_BITS << SYMBOL_BITS);
        sift_down(forest, 0);
        forest->others[lengthen(forest, first)] = (int16_t)second;
        lengthen(forest, second);
    }
}

// Sort the symbols by the sizes of their codes, before the sizes are limited. Return the number of symbols.
static int64_t sort_symbols(const Forest *forest, const int64_t *num_codes, int64_t *symbols) {
    int64_t places[UNUSED + 2], place = 0;  // The place of the next symbol, by the length of its code.
    for (int length = 1; length <= UNUSED + 1; length++) {
        places[length] = place;
        place += num_codes[length] - (length == forest->code_sizes[UNUSED]);
    }
    for (int i = 0; i < UNUSED; i++) {
        if (forest->code_sizes[i]) symbols[places[forest->code_sizes[i]]++] = i;
    }
    return place;
}

// Shorten codes of more than 16 bits, and remove the code that must stay unused.
static void limit_lengths(int64_t *num_codes) {
    for (int length = UNUSED + 1; length > MAX_CODE_LENGTH; length--) {
        while (num_codes[length] > 0) {
            int shorter = length - 2;
            while (num_codes[shorter] == 0) shorter--;
            num_codes[length] -= 2;
            num_codes[length - 1]++;
            num_codes[shorter + 1] += 2;
            num_codes[shorter]--;
        }
    }
    int longest = MAX_CODE_LENGTH;
    while (num_codes[longest] == 0) longest--;
    num_codes[longest]--;
}

void shardio_make_best_table(BestTable *call) {
    Forest forest;
    find_code_sizes(call->counts, &forest);
    memset(call->num_codes, 0, sizeof call->num_codes);
    for (int i = 0; i <= UNUSED; i++) call->num_codes[forest.code_sizes[i]]++;
    call->num_codes[0] = 0;
    call->num_symbols = sort_symbols(&forest, call->num_codes, call->symbols);
    if (call->num_symbols) limit_lengths(call->num_codes);
}
