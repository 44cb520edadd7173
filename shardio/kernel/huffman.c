// Lookup tables of Huffman codes (C.2 and F.2.2.3).
//
// A lookup takes the next LOOKUP_BITS bits, and gives all that entropy.c needs: the bits of a code and of the value
// after it, or of two AC codes with their values. The progress of a stream in an MCU is one number, its state:
//
//     state                   what comes next
//     first + 128 b           the DC coefficient of block b
//     first + 128 b + 64 + k  coefficient k of block b, in zigzag order, 1 <= k <= 63; k = 64 is the state of the next
//                             DC coefficient, and k from 65 to 79 follows a run of zeros beyond the block: damage
//
// `first` is chosen so that a complete MCU has the state DONE. The index of a coefficient is one less than the state
// after the coefficient, so a block's coefficients are the 64 before the state of the next block. Some states have an
// additional bit:
//
//     DONE                    a complete MCU, or a state whose code is not in the tables: entropy.c leaves its
//                             fast loop
//     REST                    the first PREFIX_BITS bits of a long code are decoded: all of them are ones
//
// A round has more lookups than an MCU may need. Lookups after DONE give the state WAITING, to which no code
// leads: what they write is outside the last block.

#include "decoder.h"

#include <string.h>

static const Entry JUMP = {.place = -1, .step = DONE, .keep = -1};

// Set `count` entries. The compiler combines stores of numbers, but not of structs, into vector stores.
static void set_entries(Entry *entries, int count, Entry entry) {
    uint64_t number;
    _Static_assert(sizeof entry == sizeof number, "an entry is stored as a number");
    memcpy(&number, &entry, sizeof number);
    for (int i = 0; i < count; i++) memcpy(&entries[i], &number, sizeof number);
}

// Add a code to a lookup table, unless it is too long: the first bit of the value must be among the bits of the
// lookup. `code` has `length` bits.
static void add_code(Entry *entries, Symbol symbol, int code, int length, int added_step) {
    int num_bits = length + symbol.size;
    if (length + (symbol.size > 0) > LOOKUP_BITS || num_bits > MAX_LOOKUP_BITS) return;
    // The value is computed, modulo 2^16, from bits that include those of the code, so the bias subtracts the code. A
    // value whose first bit is 0 is negative (figure F.12).
    Entry positive = {
        .bits = (uint8_t)num_bits,
        .place = -1,
        .bias = (int16_t)-(code << symbol.size),
        .step = (int16_t)(symbol.step + added_step),
        .keep = symbol.is_end ? -64 : -1,
    };
    Entry negative = positive;
    negative.bias = (int16_t)(positive.bias - ((1 << symbol.size) - 1));
    int span = 1 << (LOOKUP_BITS - length), num_negative = symbol.size ? span / 2 : 0;
    set_entries(entries + code * span, num_negative, negative);
    set_entries(entries + code * span + num_negative, span - num_negative, positive);
}

// Add a second code to each entry of an AC table that leaves enough bits for it.
static void make_pairs(const Entry *single, Entry *pairs) {
    memcpy(pairs, single, sizeof(Entry) << LOOKUP_BITS);
    for (int i = 0; i < 1 << LOOKUP_BITS; i++) {
        Entry one = single[i];
        Entry two = single[(i << one.bits) & ((1 << LOOKUP_BITS) - 1)];
        int num_bits = one.bits + two.bits;
        bool is_pair = one.bits && two.bits && num_bits <= LOOKUP_BITS && one.step < 64 && two.step < 64;
        if (!is_pair) continue;
        int first = (i >> (LOOKUP_BITS - one.bits)) + one.bias;
        int second = (i >> (LOOKUP_BITS - num_bits) & ((1 << two.bits) - 1)) + two.bias;
        Entry pair = {
            .bits = (uint8_t)num_bits,
            .place = (int8_t)(-1 - two.step),
            .bias = (int16_t)(first - (i >> (LOOKUP_BITS - num_bits))),
            .step = (int16_t)(one.step + two.step),
            .keep = -1,
            .second = (int8_t)second,
        };
        set_entries(&pairs[i], 1, pair);
    }
}

static bool fill(HuffmanTable *table) {
    set_entries(table->single, 1 << LOOKUP_BITS, JUMP);
    set_entries(table->rest, 1 << LOOKUP_BITS, JUMP);
    const int prefix = (1 << PREFIX_BITS) - 1;
    const Codes *codes = &table->codes;
    if (!number_codes(table->counts, table->symbols, &table->codes)) return false;
    for (int length = 1; length <= MAX_CODE_LENGTH; length++) {
        for (int code = codes->firsts[length]; code < codes->limits[length]; code++) {
            int symbol = get_symbol(codes, code, length);
            Symbol meaning = read_symbol(symbol, table->is_dc);
            if (table->is_dc && symbol > 15) return false;
            if (!meaning.is_known) continue;
            add_code(table->single, meaning, code, length, 0);
            int rest_length = length - PREFIX_BITS;
            if (rest_length > 0 && code >> rest_length == prefix)
                add_code(table->rest, meaning, code & ((1 << rest_length) - 1), rest_length, -REST);
        }
    }
    if (table->is_dc) return true;
    for (int i = prefix << (LOOKUP_BITS - PREFIX_BITS); i < 1 << LOOKUP_BITS; i++) {
        if (table->single[i].bits == 0)
            table->single[i] = (Entry){.bits = PREFIX_BITS, .place = -1, .bias = -prefix, .step = REST, .keep = -1};
    }
    make_pairs(table->single, table->pairs);
    return true;
}

static bool is_used(const HuffmanTable *table, const Workspace *work) {
    for (int i = 0; i < NUM_CHAINS; i++) {
        for (int j = 0; j < NUM_TABLES; j++) {
            if (work->members[i].tables[j] == table) return true;
        }
    }
    return false;
}

// Return a table with the codes of a DHT segment: the cached one, or a new one that replaces the least recently used
// table. Return NULL if no baseline image may have the table.
static const HuffmanTable *find_table(const uint8_t *counts, bool is_dc, Workspace *work) {
    int num_symbols = 0;
    for (int i = 0; i < MAX_CODE_LENGTH; i++) num_symbols += counts[i];
    if (num_symbols == 0) return NULL;  // Unused entries of the cache also have no symbols, but must not match.
    HuffmanTable *oldest = NULL;
    for (int i = 0; i < NUM_CACHED_TABLES; i++) {
        HuffmanTable *table = &work->tables[i];
        if (table->num_symbols == num_symbols && table->is_dc == is_dc &&
            !memcmp(table->counts, counts, MAX_CODE_LENGTH) &&
            !memcmp(table->symbols, counts + MAX_CODE_LENGTH, (size_t)num_symbols)) {
            table->last_use = ++work->num_uses;
            return table;
        }
        if (!is_used(table, work) && (!oldest || table->last_use < oldest->last_use)) oldest = table;
    }
    oldest->is_dc = is_dc;
    memcpy(oldest->counts, counts, MAX_CODE_LENGTH);
    memcpy(oldest->symbols, counts + MAX_CODE_LENGTH, (size_t)num_symbols);
    oldest->num_symbols = fill(oldest) ? num_symbols : 0;
    oldest->last_use = ++work->num_uses;
    return oldest->num_symbols ? oldest : NULL;
}

void prepare_tables(Workspace *work) {
    set_entries(work->stay, 1 << LOOKUP_BITS, (Entry){.place = -1, .keep = -1});
    set_entries(work->wait, 1 << LOOKUP_BITS, (Entry){.place = -1, .step = WAITING - DONE, .keep = -1});
    set_entries(work->jump, 1 << LOOKUP_BITS, JUMP);
    for (int i = 0; i < ALL_STATES; i++) work->next[i] = work->stay;
}

bool make_tables(Member *member, Workspace *work) {
    const Head *head = &member->head;
    for (int c = 0; c < head->num_components; c++) {
        int dc = head->scan.dc_table[c], ac = head->scan.ac_table[c];
        member->tables[dc] = find_table(head->huffman[dc], true, work);
        member->tables[ac] = find_table(head->huffman[ac], false, work);
        if (!member->tables[dc] || !member->tables[ac]) return false;
    }
    member->first_state = DONE - 128 * member->num_blocks;
    member->state_offset = NUM_STATES * (int)(member - work->members);
    const Entry **next = work->next + member->state_offset;
    for (int block = 0; block < member->num_blocks; block++) {
        int component = member->component[block], state = member->first_state + 128 * block;
        const HuffmanTable *ac = member->tables[head->scan.ac_table[component]];
        next[state] = member->tables[head->scan.dc_table[component]]->single;
        for (int k = 1; k < 64; k++) {
            next[state + 64 + k] = k < 48 ? ac->pairs : ac->single;  // Two codes must not go beyond the block's end.
            next[state + 64 + k + REST] = ac->rest;
        }
        for (int k = 65; k < 80 && block + 1 < member->num_blocks; k++) next[state + 64 + k] = work->jump;
    }
    next[DONE] = work->wait;  // After DONE, and after a jump, the rest of a round decodes nothing.
    return true;
}
