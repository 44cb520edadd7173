// The bits of entropy-coded data, without stuffed bytes.

#ifndef SHARDIO_BITS_H
#define SHARDIO_BITS_H

#include "vectors.h"

// A restart interval that is being read. The next bits are the highest `num_bits` bits of `word`, and then the bits
// at `from`. The lower bits of `word` are zeros, or some of the bits at `from`.
typedef struct {
    uint64_t word, num_bits;
    const uint8_t *from, *stop;
} Bits;

// Fill `word` to at least 56 bits.
static inline void refill(Bits *bits) {
    bits->word |= load_word(bits->from) >> bits->num_bits;
    bits->from += (63 - bits->num_bits) >> 3;
    bits->num_bits |= 56;
}

// The number of bits up to the interval's end; negative beyond the end.
static int64_t count_left(const Bits *bits) { return 8 * (bits->stop - bits->from) + (int64_t)bits->num_bits; }

#endif
