// Decode Huffman codes of up to three streams side by side (F.2.2).
//
// Decoding is a chain of dependent steps: look up the code, shift it out, look up the next one. One chain leaves most
// of a core idle; three interleaved chains fill it. A number, the state, replaces most branches: see huffman.c. So each
// round of the loop, which makes three lookups for each stream, has a single branch.

#include "decoder.h"
#include "vectors.h"

static const uint64_t PARKED =
    NUM_CHAINS * NUM_STATES + 64;  // The state of a chain without a stream; no code leaves this state.

static uint64_t find_start(const Member *member) { return (uint64_t)(member->state_offset + member->first_state); }

static void next_stream(Chain *chain, Workspace *work) {
    for (;;) {
        if (work->current && work->current->has_more && work->current->is_good && take_stream(work->current, chain)) {
            chain->member->num_busy++;
            chain->state = find_start(chain->member);
            for (int c = 0; c < MAX_COMPONENTS; c++) chain->dc[c] = 0;
            return;
        }
        if (work->current) {
            work->current->has_more = false;
            if (work->current->num_busy == 0) finish_image(work->current, work);
        }
        if (!open_next_image(work)) break;
    }
    work->num_busy--;
    chain->member = NULL;
    chain->bit = 8 * (uint64_t)(uintptr_t)work->zeros;
    chain->state = PARKED;
}

// Finish a chain's stream, and begin the next one.
static void end_stream(Chain *chain, bool is_good, Workspace *work) {
    Member *member = chain->member;
    if (!is_good) member->is_good = false;
    if (--member->num_busy == 0 && !member->has_more) finish_image(member, work);
    next_stream(chain, work);
}

// Decode a code that is not in the lookup tables, and its value (F.2.2.3). Return false if there is no such code.
static bool decode_long_code(Chain *chain) {
    const Member *member = chain->member;
    uint64_t state = chain->state - (uint64_t)member->state_offset - DONE;
    if (state & REST) {
        state -= REST;
        chain->bit -= PREFIX_BITS;
    }
    if (state < (uint64_t)member->first_state || state >= DONE) return false;
    uint64_t in_block = (state - (uint64_t)member->first_state) & 127,
             block = (state - (uint64_t)member->first_state) / 128;
    if (in_block > 0 && in_block <= 64) return false;  // A run of zeros went beyond the previous block.
    int component = member->component[block];
    const HuffmanTable *table =
        member->tables[in_block ? member->head.scan.ac_table[component] : member->head.scan.dc_table[component]];
    uint64_t word = load_word((const uint8_t *)(uintptr_t)(chain->bit >> 3)) << (chain->bit & 7);
    int length, found = find_symbol(&table->codes, word, &length);
    if (found < 0) return false;
    Symbol symbol = read_symbol(found, table->is_dc);
    if (!symbol.is_known) return false;
    int value = symbol.size ? (int)(word << length >> (64 - symbol.size)) : 0;
    if (symbol.size && value < 1 << (symbol.size - 1)) value -= (1 << symbol.size) - 1;
    chain->bit += (uint64_t)(length + symbol.size);
    uint64_t next = symbol.is_end ? (state + 64) & ~63ull : state + (uint64_t)symbol.step;
    chain->coefficients[(uint64_t)member->state_offset + next - 1] = (int16_t)value;
    chain->state = (uint64_t)member->state_offset + next;
    return true;
}

// Sum up the DC differences of a complete MCU (F.1.1.5.1), and transform the MCU if the region needs it. Return whether
// all coefficients are in range.
static bool finish_mcu(Chain *chain) {
    const Member *member = chain->member;
    const Region *region = &member->region;
    int16_t *coefficients = chain->coefficients + find_start(member);
    int dc[MAX_BLOCKS];
    for (int block = 0; block < member->num_blocks; block++) {
        int component = member->component[block];
        dc[block] = chain->dc[component] += coefficients[128 * block + 64];
        if (dc[block] < -MAX_DC || dc[block] > MAX_DC) return false;
    }
    bool is_needed = chain->row >= region->first_row && chain->row < region->stop_row &&
                     chain->column >= region->first_column && chain->column < region->stop_column;
    if (is_needed && !transform_mcu(member, coefficients, dc, chain->row, chain->column)) return false;
    for (int block = 0; block < member->num_blocks; block++) memset(coefficients + 128 * block + 64, 0, 128);
    return true;
}

// Handle the cases that the fast loop does not, and set the chain's next state.
static __attribute__((noinline)) void leave_loop(Chain *chain, Workspace *work) {
    bool is_good = chain->bit <= chain->stop;
    uint64_t complete = (uint64_t)chain->member->state_offset + DONE;
    if (is_good && chain->state != complete && chain->state != complete + WAITING - DONE) {
        is_good = decode_long_code(chain);
        if (is_good && !(chain->state & DONE)) return;
        is_good = is_good && chain->state == complete && chain->bit <= chain->stop;
    }
    if (!is_good || !finish_mcu(chain)) {
        memset(chain->coefficients + chain->member->state_offset, 0, NUM_STATES * sizeof(int16_t));
        end_stream(chain, false, work);
        return;
    }
    if (--chain->num_left == 0) {
        end_stream(chain, !chain->is_whole || (chain->bit + 7) >> 3 == chain->stop >> 3, work);
        return;
    }
    if (++chain->column == chain->member->head.columns) {
        chain->column = 0;
        chain->row++;
    }
    chain->state = find_start(chain->member);
}

// Return a word that begins with the next bits: at least 57 of them, which is enough for three lookups.
static inline uint64_t look_ahead(uint64_t bit) {
    return load_word((const uint8_t *)(uintptr_t)(bit >> 3)) << (bit & 7);
}

// The part of a chain that the loop keeps in registers.
typedef struct {
    uint64_t bit, state;
} Progress;

static inline __attribute__((always_inline)) uint64_t take_codes(Workspace *work, int chain, Progress *at,
                                                                 uint64_t word) {
    int16_t (*coefficients)[ALL_STATES] = &work->chains[chain].coefficients;
    const Entry *entry = work->next[at->state] + (word >> (64 - LOOKUP_BITS));
    at->state = (at->state + (uint64_t)entry->step) & (uint64_t)entry->keep;
    (*coefficients)[at->state - 1] = entry->second;
    uint64_t first = at->state + (uint64_t)entry->place;
    __asm__("" : "+r"(first));  // Make the compiler compute a single index, as for the second value.
    (*coefficients)[first] = (int16_t)((word >> (-entry->bits & 63)) + (uint64_t)entry->bias);
    at->bit += entry->bits;
    word <<= entry->bits;
    // Without this barrier, the compiler postpones some of these computations, and runs out of registers.
    __asm__ volatile("" : "+r"(word), "+r"(at->state), "+r"(at->bit));
    return word;
}

void decode_streams(Workspace *work) {
    Chain *chains = work->chains;
    work->num_busy = NUM_CHAINS;
    for (int i = 0; i < NUM_CHAINS; i++) next_stream(&chains[i], work);
    while (work->num_busy) {
        Progress a = {chains[0].bit, chains[0].state}, b = {chains[1].bit, chains[1].state},
                 c = {chains[2].bit, chains[2].state};
        do {
            uint64_t word_a = look_ahead(a.bit), word_b = look_ahead(b.bit), word_c = look_ahead(c.bit);
#pragma clang loop unroll(full)
            for (int i = 0; i < 3; i++) {
                word_a = take_codes(work, 0, &a, word_a);
                word_b = take_codes(work, 1, &b, word_b);
                word_c = take_codes(work, 2, &c, word_c);
            }
        } while (!((a.state | b.state | c.state) & DONE));
        const Progress *all[] = {&a, &b, &c};
        for (int i = 0; i < NUM_CHAINS; i++) {
            chains[i].bit = all[i]->bit;
            chains[i].state = all[i]->state;
            if (chains[i].state & DONE) leave_loop(&chains[i], work);
        }
    }
}
