// Recode a scan: read its entropy-coded data as tokens, which can be written with different Huffman tables and restart
// intervals.
//
// Decoding follows F.2.2, and encoding F.1.2. Coefficients are not assembled: a token is a symbol and the bits that
// follow its code. AC tokens are kept. DC tokens change only where prediction restarts in the old or the new scan.
//
// The coefficients of a progressive image become the tokens of a baseline image.
//
// Why no read or write is out of bounds: entropy-coded data is copied to a buffer with 4096 more bytes, and each block
// begins at or before the data's end. A block has at most 27 bits (DC) and 63 times 26 bits (AC), or 208 bytes; a
// look-ahead reads 16 bytes more. A token has at least one bit, and a block at most 64 tokens. So Python provides room
// for eight tokens per byte of data or 64 per block, whichever is less; one more token per interval; and 64 more for
// the block that goes beyond the data. For writing, it provides eight bytes per token, because a token has at most 27
// bits and all its bytes may need stuffing; four bytes per interval, for its last byte and marker; and 64 more bytes,
// because whole words are written.

#include "bits.h"
#include "decoder.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_DC_SIZE = 11,
    MAX_AC_SIZE = 10,
    TO_END = 128,  // Added to the coefficient's index at the end of the block. A run takes the index to at most 79.
};

// The meaning of a code. `bits` is 0 if the code is too long for a lookup, or if no baseline image has its symbol.
typedef struct {
    uint8_t bits;    // The number of bits of the code and the value.
    uint8_t step;    // The increment of the coefficient's index.
    uint16_t mask;   // A mask for the bits of the value.
    uint32_t token;  // The token for a value of 0.
} Code;

typedef struct {
    Codes codes;
    Code lookups[1 << LOOKUP_BITS];
} Table;

static Code make_code(int table, int symbol, int length) {
    Symbol meaning = read_symbol(symbol, table < FIRST_AC_TABLE);
    int size = symbol & 15;
    return (Code){
        .bits = (uint8_t)(meaning.is_known ? length + size : 0),
        .step = (uint8_t)(meaning.is_end ? TO_END : meaning.step),
        .mask = (uint16_t)((1 << size) - 1),
        .token = (uint32_t)(table << 8 | symbol) << VALUE_BITS,
    };
}

// Build the lookup table of a Huffman table (F.2.2.3).
static void make_table(int index, const StoredTable *stored, Table *table) {
    const Codes *codes = &table->codes;
    number_codes(stored->lengths, stored->symbols, &table->codes);
    memset(table->lookups, 0, sizeof table->lookups);
    for (int length = 1; length <= LOOKUP_BITS; length++) {
        int span = 1 << (LOOKUP_BITS - length);
        for (int code = codes->firsts[length]; code < codes->limits[length]; code++) {
            Code found = make_code(index, get_symbol(codes, code, length), length);
            for (int i = 0; i < span; i++) table->lookups[code * span + i] = found;
        }
    }
}

// Find a code that is not in the lookup table. Return the outcome. If this function were inlined, reading would take
// twice as long.
static __attribute__((noinline)) Outcome find_long_code(const Table *table, int index, uint64_t word, int64_t num_left,
                                                        Code *found) {
    int length, symbol = find_symbol(&table->codes, word, &length), size = symbol & 15;
    if (symbol < 0 || length + size > num_left) return DAMAGED;
    *found = make_code(index, symbol, length);
    if (found->bits) return RECODED;
    return index >= FIRST_AC_TABLE && size == 0 ? DAMAGED : OUT_OF_RANGE;
}

// Take a code and its value. Bits beyond the interval's end may have any values; their tokens are not used.
static inline Outcome take_token(const Table *table, int64_t index, Bits *bits, Code *code, uint32_t *value) {
    *code = table->lookups[bits->word >> (64 - LOOKUP_BITS)];
    if (code->bits == 0) {
        Code found;
        Outcome outcome = find_long_code(table, (int)index, bits->word, count_left(bits), &found);
        if (outcome != RECODED) return outcome;
        *code = found;
    }
    *value = (uint32_t)(bits->word >> (64 - code->bits)) & code->mask;
    bits->word <<= code->bits;
    bits->num_bits -= code->bits;
    return RECODED;
}

// The number of bits of a value (figure F.1).
static inline int count_bits(int value) { return value ? 32 - __builtin_clz((unsigned)abs(value)) : 0; }

// A token with a value of `size` bits. The bits of a negative value are those of value - 1.
static inline uint32_t make_token(int64_t table, int symbol, int size, int value) {
    return (uint32_t)(table << 8 | symbol) << VALUE_BITS | (uint32_t)(value < 0 ? value + (1 << size) - 1 : value);
}

// Write the token of a block's DC coefficient.
static inline Outcome write_dc(Component *component, int dc, uint32_t *token) {
    int difference = dc - (int)component->dc_written, size = count_bits(difference);
    if (abs(dc) > MAX_DC || size > MAX_DC_SIZE) return OUT_OF_RANGE;
    component->dc_written = dc;
    *token = make_token(component->dc_table, size, size, difference);
    return RECODED;
}

// Read the token of a block's DC coefficient, and write the token of its new difference.
static inline Outcome read_dc(const Table *tables, Component *component, Bits *bits, uint32_t *token) {
    Code code;
    uint32_t value;
    Outcome outcome = take_token(&tables[component->dc_table], component->dc_table, bits, &code, &value);
    if (outcome != RECODED) return outcome;
    if (count_left(bits) < 0) return DAMAGED;
    // A value whose first bit is 0 is negative (figure F.12).
    component->dc_read += (int)value - (value <= code.mask >> 1 ? code.mask : 0);
    return write_dc(component, (int)component->dc_read, token);
}

// Read a block's tokens, and move `out` to their end. Return the outcome.
static inline Outcome read_block(const Table *tables, Component *component, Bits *bits, uint32_t **out,
                                 int64_t *counts) {
    uint32_t *to = *out;
    refill(bits);
    Outcome outcome = read_dc(tables, component, bits, to);
    if (outcome != RECODED) return outcome;
    counts[*to++ >> VALUE_BITS]++;
    int k = 1;
    while (k < 64) {
        refill(bits);  // Together, two AC tokens have at most 52 bits.
        for (int i = 0; i < 2 && k < 64; i++) {
            Code code;
            uint32_t value;
            outcome = take_token(&tables[component->ac_table], component->ac_table, bits, &code, &value);
            if (outcome != RECODED) return outcome;
            *to = code.token | value;
            counts[*to++ >> VALUE_BITS]++;
            k += code.step;
        }
    }
    *out = to;
    return count_left(bits) >= 0 && (k == 64 || k > TO_END) ? RECODED : DAMAGED;
}

// Read the marker at the end of a restart interval, skipping any fill bytes before it, and move `at` past the marker.
static Outcome skip_marker(const uint8_t **at, const uint8_t *stop, int64_t num_left, int64_t interval) {
    if (num_left >= 8) return EXCESS_DATA;
    if (*at >= stop) return WRONG_MARKER;
    while (*at < stop && **at == 0xFF) ++*at;
    if (*at >= stop || **at != RST0 + interval % 8) return WRONG_MARKER;
    ++*at;
    return RECODED;
}

// Make the number of tokens even, and note where the next restart interval begins.
static void end_interval(ScanReading *call, uint32_t **out, int64_t interval) {
    if ((*out - call->tokens) % 2) *(*out)++ = NO_TOKEN;
    call->stops[interval] = *out - call->tokens;
}

static bool begins_interval(int64_t mcu, int64_t interval) { return mcu == 0 || (interval && mcu % interval == 0); }

// Read a scan as tokens, and count its symbols.
void shardio_read_scan(ScanReading *call) {
    Table tables[NUM_TABLES];
    for (int i = 0; i < NUM_TABLES; i++) make_table(i, &call->tables[i], &tables[i]);
    int64_t *counts = call->counts;
    memset(counts, 0, NUM_TABLES * 256 * sizeof *counts);
    const uint8_t *at = call->data, *stop = call->data + call->num_bytes;
    uint32_t *out = call->tokens;
    Bits bits = {0};
    Outcome outcome = RECODED;
    int64_t mcu = 0;
    for (; mcu < call->num_mcus; mcu++) {
        if (begins_interval(mcu, call->old_interval)) {
            if (mcu) outcome = skip_marker(&at, stop, count_left(&bits), mcu / call->old_interval - 1);
            if (outcome != RECODED) break;
            bits = (Bits){.from = call->unstuffed, .stop = call->unstuffed};
            uint8_t *end = call->unstuffed;
            at = unstuff(at, stop, &end);
            bits.stop = end;
            for (int64_t i = 0; i < call->num_components; i++) call->components[i].dc_read = 0;
        }
        if (begins_interval(mcu, call->new_interval)) {
            if (mcu) end_interval(call, &out, mcu / call->new_interval - 1);
            for (int64_t i = 0; i < call->num_components; i++) call->components[i].dc_written = 0;
        }
        for (int64_t i = 0; i < call->num_blocks && outcome == RECODED; i++)
            outcome = read_block(tables, &call->components[call->blocks[i]], &bits, &out, counts);
        if (outcome != RECODED) break;
    }
    if (outcome == RECODED) {
        if (count_left(&bits) >= 8) outcome = EXCESS_DATA;
        end_interval(call, &out, call->new_interval ? (call->num_mcus - 1) / call->new_interval : 0);
    }
    call->outcome = outcome;
    call->reached = mcu;
    call->num_tokens = out - call->tokens;
    call->stop = at - call->data;
}

// Write a block's tokens, and move `out` to their end. A block outside the image repeats the DC coefficient, as in
// libjpeg.
static Outcome write_block(const int16_t *block, bool is_inside, Component *component, uint32_t **out,
                           int64_t *counts) {
    uint32_t *to = *out;
    Outcome outcome = write_dc(component, is_inside ? block[0] : (int)component->dc_written, to);
    if (outcome != RECODED) return outcome;
    counts[*to++ >> VALUE_BITS]++;
    uint64_t left = 0;  // The AC coefficients that are not 0.
    for (int k = 1; k < 64 && is_inside; k++) left |= (uint64_t)(block[k] != 0) << k;
    int last = 0;
    for (; left; left &= left - 1) {
        int k = __builtin_ctzll(left), run = k - last - 1, size = count_bits(block[k]);
        if (size > MAX_AC_SIZE) return OUT_OF_RANGE;
        for (; run >= 16; run -= 16) {
            *to = make_token(component->ac_table, 0xF0, 0, 0);
            counts[*to++ >> VALUE_BITS]++;
        }
        *to = make_token(component->ac_table, run << 4 | size, size, block[k]);
        counts[*to++ >> VALUE_BITS]++;
        last = k;
    }
    if (last < 63) {
        *to = make_token(component->ac_table, 0, 0, 0);
        counts[*to++ >> VALUE_BITS]++;
    }
    *out = to;
    return RECODED;
}

// Write the blocks of an MCU, and move `out` to their end.
static Outcome write_mcu(const ScanReading *call, const Coefficients *coefficients, int64_t row, int64_t column,
                         uint32_t **out) {
    for (int c = 0; c < (int)call->num_components; c++) {
        int across = coefficients->across[c], down = coefficients->down[c];
        for (int j = 0; j < across * down; j++) {
            int64_t y = row * down + j / across, x = column * across + j % across;
            bool is_inside = y < coefficients->rows[c] && x < coefficients->columns[c];
            const int16_t *block = find_block(coefficients, c, y, x);
            Outcome outcome = write_block(block, is_inside, &call->components[c], out, call->counts);
            if (outcome != RECODED) return outcome;
        }
    }
    return RECODED;
}

// Read a progressive image as the tokens of a baseline scan, and count its symbols.
void shardio_read_progressive(ScanReading *call) {
    Head head;
    Coefficients coefficients = {.blocks = {call->coefficients}, .stop = call->data};
    memset(call->counts, 0, NUM_TABLES * 256 * sizeof *call->counts);
    uint32_t *out = call->tokens;
    Outcome outcome = UNSUPPORTED;
    bool is_read = read_head(call->data, call->num_bytes, &head) && head.num_components == call->num_components &&
                   count_coefficients(&head) == 64 * call->num_blocks * call->num_mcus;
    if (is_read) outcome = decode_scans(call->data, call->num_bytes, &head, call->unstuffed, &coefficients);
    for (int64_t mcu = 0; mcu < call->num_mcus && outcome == RECODED; mcu++) {
        if (begins_interval(mcu, call->new_interval)) {
            if (mcu) end_interval(call, &out, mcu / call->new_interval - 1);
            for (int64_t i = 0; i < call->num_components; i++) call->components[i].dc_written = 0;
        }
        outcome = write_mcu(call, &coefficients, mcu / head.columns, mcu % head.columns, &out);
    }
    if (outcome == RECODED)
        end_interval(call, &out, call->new_interval ? (call->num_mcus - 1) / call->new_interval : 0);
    call->outcome = outcome;
    call->reached = coefficients.num_scans;
    call->num_tokens = out - call->tokens;
    call->stop = coefficients.stop - call->data;
}

// How to write a symbol (C.2): its code, followed by zeros for its value's bits, and the total number of bits.
typedef struct {
    uint32_t bits, num_bits;
} Written;

// Make the codes of all tables, indexed by the token without its value. A symbol without a code has no bits.
static void make_codes(const StoredTable *tables, Written *codes) {
    memset(codes, 0, NUM_TABLES * 256 * sizeof *codes);
    for (int index = 0; index < NUM_TABLES; index++) {
        Codes numbered;
        number_codes(tables[index].lengths, tables[index].symbols, &numbered);
        for (int length = 1; length <= MAX_CODE_LENGTH; length++) {
            for (int code = numbered.firsts[length]; code < numbered.limits[length]; code++) {
                int symbol = get_symbol(&numbered, code, length), size = symbol & 15;
                codes[index << 8 | symbol] = (Written){(uint32_t)(code << size), (uint32_t)(length + size)};
            }
        }
    }
}

static inline void store_word(uint8_t *out, uint64_t word) {
    word = __builtin_bswap64(word);
    memcpy(out, &word, sizeof word);
}

// Whether any byte is 0xFF, and therefore 0 in ~word. Subtracting 1 from each byte sets a high bit that was 0 only if a
// byte is 0.
static inline bool has_ff(uint64_t word) { return (~word - 0x0101010101010101) & word & 0x8080808080808080; }

// Write the first bytes of a word, and a zero after each 0xFF (F.1.2.3). Return the end.
static uint8_t *write_stuffed(uint8_t *out, uint64_t word, uint64_t num_bytes) {
    for (; num_bytes > 0; num_bytes--, word <<= 8) {
        *out++ = (uint8_t)(word >> 56);
        if (out[-1] == 0xFF) *out++ = 0;
    }
    return out;
}

// Write an even number of tokens, and fill the last byte with ones. Return the end.
static uint8_t *write_interval(const uint32_t *tokens, const uint32_t *stop, const Written *codes, uint8_t *out) {
    const uint32_t mask = (1 << VALUE_BITS) - 1;
    uint64_t word = 0, num_bits = 0;  // The word's top bits, fewer than eight, have not been written yet.
    for (; tokens < stop; tokens += 2) {
        Written one = codes[tokens[0] >> VALUE_BITS], two = codes[tokens[1] >> VALUE_BITS];
        // Together, two tokens have at most 54 bits.
        uint64_t first = one.bits | (tokens[0] & mask), second = two.bits | (tokens[1] & mask);
        num_bits += one.num_bits + two.num_bits;
        if (num_bits == 0) continue;  // Neither token has a code.
        word |= (first << two.num_bits | second) << (64 - num_bits);
        uint64_t num_bytes = num_bits >> 3;
        if (has_ff(word)) {
            out = write_stuffed(out, word, num_bytes);
        } else {
            store_word(out, word);
            out += num_bytes;
        }
        word <<= 8 * num_bytes;
        num_bits &= 7;
    }
    return num_bits ? write_stuffed(out, word | ~0ull >> num_bits, 1) : out;
}

// Write a scan's tokens with different Huffman tables.
void shardio_write_scan(ScanWriting *call) {
    Written codes[NUM_TABLES * 256];
    make_codes(call->tables, codes);
    uint8_t *out = call->out;
    int64_t start = 0;
    for (int64_t i = 0; i < call->num_intervals; i++) {
        if (i) {
            *out++ = 0xFF;
            *out++ = (uint8_t)(RST0 + (i - 1) % 8);
        }
        uint8_t *end = write_interval(call->tokens + start, call->tokens + call->stops[i], codes, out);
        call->lengths[i] = end - out;
        out = end;
        start = call->stops[i];
    }
    call->size = out - call->out;
}
