// Decode progressive JPEGs (annex G).
//
// Each scan has some of the coefficients, or more bits of coefficients from earlier scans. So the coefficients of the
// whole image are kept until the last scan. Then the MCUs of the region are transformed, as in baseline images, or the
// coefficients are recoded (tokens.c).
//
// Why no read or write is out of bounds: entropy-coded data is copied to a buffer with PADDING more bytes, and each
// block begins before the data's end. A block has at most 64 codes of 16 bits, each with a value of at most 15 bits,
// and 64 more bits. The places of blocks follow from the image's size, and indices of coefficients are compared with
// the scan's last index.

#include "bits.h"
#include "decoder.h"

enum { SHORT_CODE = 9, MAX_LOW = 13 };

// A Huffman table. `lookups` is indexed by the next SHORT_CODE bits: length << 8 | symbol, or 0 for longer codes.
typedef struct {
    Codes codes;
    uint16_t lookups[1 << SHORT_CODE];
} Table;

// Build the lookup table of a Huffman table from the contents of its DHT segment. Return false if the table is invalid.
static bool make_table(const uint8_t *counts, bool is_dc, Table *table) {
    const Codes *codes = &table->codes;
    if (!counts || !number_codes(counts, counts + MAX_CODE_LENGTH, &table->codes)) return false;
    memset(table->lookups, 0, sizeof table->lookups);
    for (int length = 1; length <= MAX_CODE_LENGTH; length++) {
        for (int code = codes->firsts[length]; code < codes->limits[length]; code++) {
            int symbol = get_symbol(codes, code, length);
            if (is_dc && symbol > 15) return false;  // libjpeg rejects the table (jdhuff.c).
            int span = length <= SHORT_CODE ? 1 << (SHORT_CODE - length) : 0;
            for (int i = 0; i < span; i++) table->lookups[code * span + i] = (uint16_t)(length << 8 | symbol);
        }
    }
    return true;
}

static inline int take_bits(Bits *bits, int count) {
    if (count == 0) return 0;
    int value = (int)(bits->word >> (64 - count));
    bits->word <<= count;
    bits->num_bits -= (uint64_t)count;
    return value;
}

// Take a code. Return its symbol, or -1 if the bits are not a code.
static inline int take_symbol(const Table *table, Bits *bits) {
    int found = table->lookups[bits->word >> (64 - SHORT_CODE)];
    if (found) {
        take_bits(bits, found >> 8);
        return found & 0xFF;
    }
    int length, symbol = find_symbol(&table->codes, bits->word, &length);
    if (symbol >= 0) take_bits(bits, length);
    return symbol;
}

// Take a value. The value is negative if its first bit is 0 (figure F.12).
static inline int take_value(Bits *bits, int size) {
    int value = take_bits(bits, size);
    return size && value < 1 << (size - 1) ? value - ((1 << size) - 1) : value;
}

// A scan that is being decoded.
typedef struct {
    const ScanHeader *header;
    Table dc[MAX_COMPONENTS], ac;
    Bits bits;
    int dc_before[MAX_COMPONENTS];  // The last DC coefficients, by component of the scan.
    int64_t num_ended;              // The number of following blocks without more coefficients: EOBRUN.
} ScanState;

// G.1.2.1: the first bits of a DC coefficient.
static Outcome decode_dc_first(ScanState *scan, int component, int16_t *block) {
    int size = take_symbol(&scan->dc[component], &scan->bits);
    if (size < 0) return DAMAGED;
    if (size > 11) return OUT_OF_RANGE;
    scan->dc_before[component] += take_value(&scan->bits, size);
    int dc = scan->dc_before[component] * (1 << scan->header->low);
    if (dc < -MAX_DC - 1 || dc > MAX_DC) return OUT_OF_RANGE;
    block[0] = (int16_t)dc;
    return RECODED;
}

// G.1.2.2: the first bits of AC coefficients.
static Outcome decode_ac_first(ScanState *scan, int16_t *block) {
    if (scan->num_ended > 0) {
        scan->num_ended--;
        return RECODED;
    }
    for (int k = scan->header->start; k <= scan->header->end; k++) {
        refill(&scan->bits);
        int symbol = take_symbol(&scan->ac, &scan->bits), run = symbol >> 4, size = symbol & 15;
        if (symbol < 0) return DAMAGED;
        if (size > 10) return OUT_OF_RANGE;
        if (size == 0 && run < 15) {
            scan->num_ended = (1 << run) + take_bits(&scan->bits, run) - 1;
            return RECODED;
        }
        k += run;
        if (size == 0) continue;
        if (k > scan->header->end) return DAMAGED;
        int value = take_value(&scan->bits, size) * (1 << scan->header->low);
        if (value < -MAX_AC - 1 || value > MAX_AC) return OUT_OF_RANGE;
        block[k] = (int16_t)value;
    }
    return RECODED;
}

// Take the next bit of a nonzero coefficient.
static inline void refine(ScanState *scan, int16_t *coefficient) {
    if (scan->bits.num_bits < 8) refill(&scan->bits);
    int bit = 1 << scan->header->low;
    if (take_bits(&scan->bits, 1) && !(*coefficient & bit))
        *coefficient = (int16_t)(*coefficient + (*coefficient > 0 ? bit : -bit));
}

// G.1.2.3: one more bit of AC coefficients.
static Outcome decode_ac_refined(ScanState *scan, int16_t *block) {
    const ScanHeader *header = scan->header;
    int k = header->start;
    while (scan->num_ended == 0 && k <= header->end) {
        refill(&scan->bits);
        int symbol = take_symbol(&scan->ac, &scan->bits), run = symbol >> 4, size = symbol & 15;
        if (symbol < 0 || size > 1) return DAMAGED;
        if (size == 0 && run < 15) {
            scan->num_ended = (1 << run) + take_bits(&scan->bits, run);
            break;
        }
        int value = size == 0 ? 0 : take_bits(&scan->bits, 1) ? 1 << header->low : -(1 << header->low);
        // The run counts only coefficients that are 0.
        for (; k <= header->end; k++) {
            if (block[k])
                refine(scan, &block[k]);
            else if (run-- == 0)
                break;
        }
        if (value) {
            if (k > header->end) return DAMAGED;
            block[k] = (int16_t)value;
        }
        k++;
    }
    if (scan->num_ended > 0) {
        for (; k <= header->end; k++) {
            if (block[k]) refine(scan, &block[k]);
        }
        scan->num_ended--;
    }
    return RECODED;
}

static Outcome decode_block(ScanState *scan, int component, int16_t *block) {
    if (count_left(&scan->bits) < 0) return DAMAGED;
    refill(&scan->bits);
    if (scan->header->start == 0) {
        if (scan->header->high == 0) return decode_dc_first(scan, component, block);
        if (take_bits(&scan->bits, 1)) block[0] = (int16_t)(block[0] | 1 << scan->header->low);
        return RECODED;
    }
    return scan->header->high == 0 ? decode_ac_first(scan, block) : decode_ac_refined(scan, block);
}

int16_t *find_block(const Coefficients *coefficients, int component, int64_t row, int64_t column) {
    return coefficients->blocks[component] + 64 * (row * coefficients->stride[component] + column);
}

int64_t count_coefficients(const Head *head) {
    return (int64_t)64 * head->rows * head->columns * (head->across * head->down + head->num_components - 1);
}

static void clear_coefficients(const Head *head, Coefficients *coefficients) {
    int16_t *memory = coefficients->blocks[0];
    memset(memory, 0, (size_t)count_coefficients(head) * sizeof *memory);
    memset(coefficients->missing, -1, sizeof coefficients->missing);
    for (int c = 0; c < head->num_components; c++) {
        int across = c ? head->across : 1, down = c ? head->down : 1;  // The subsampling.
        coefficients->across[c] = c ? 1 : head->across;
        coefficients->down[c] = c ? 1 : head->down;
        coefficients->rows[c] = (head->height + 8 * down - 1) / (8 * down);
        coefficients->columns[c] = (head->width + 8 * across - 1) / (8 * across);
        coefficients->stride[c] = head->columns * coefficients->across[c];
        coefficients->blocks[c] = memory;
        memory += (int64_t)64 * coefficients->stride[c] * head->rows * coefficients->down[c];
    }
}

// Record which bits a scan has. Return false if the scan must not follow the earlier scans (G.1.1.1).
static bool note_bits(const ScanHeader *header, Coefficients *coefficients) {
    bool is_dc = header->start == 0;
    if (is_dc ? header->end != 0 : header->num_components != 1 || header->end < header->start || header->end > 63)
        return false;
    if (header->low > MAX_LOW || (header->high > 0 && header->low != header->high - 1)) return false;
    for (int i = 0; i < header->num_components; i++) {
        int8_t *missing = coefficients->missing[header->components[i]];
        if (!is_dc && missing[0] < 0) return false;
        for (int k = header->start; k <= header->end; k++) {
            if (missing[k] != (header->high ? header->high : -1)) return false;
            missing[k] = (int8_t)header->low;
        }
    }
    return true;
}

// Decode the blocks of an MCU. A scan of one component has MCUs of one block (A.2).
static Outcome decode_mcu(ScanState *scan, const Coefficients *coefficients, int64_t mcu, int64_t columns) {
    const ScanHeader *header = scan->header;
    int64_t row = mcu / columns, column = mcu % columns;
    if (header->num_components == 1)
        return decode_block(scan, 0, find_block(coefficients, header->components[0], row, column));
    for (int i = 0; i < header->num_components; i++) {
        int c = header->components[i], across = coefficients->across[c], down = coefficients->down[c];
        for (int j = 0; j < across * down; j++) {
            int16_t *block = find_block(coefficients, c, row * down + j / across, column * across + j % across);
            Outcome outcome = decode_block(scan, i, block);
            if (outcome != RECODED) return outcome;
        }
    }
    return RECODED;
}

// Check the end of a restart interval, or of a scan.
static Outcome check_end(const ScanState *scan) {
    int64_t num_left = count_left(&scan->bits);
    return num_left >= 8 ? EXCESS_DATA : num_left < 0 || scan->num_ended ? DAMAGED : RECODED;
}

// Read the marker before a restart interval, skipping any fill bytes before it, and move `at` past the marker.
static Outcome skip_marker(const uint8_t **at, const uint8_t *stop, int64_t interval) {
    while (stop - *at > 2 && (*at)[0] == 0xFF && (*at)[1] == 0xFF) ++*at;
    if (stop - *at < 2 || (*at)[0] != 0xFF || (*at)[1] != RST0 + (interval - 1) % 8) return WRONG_MARKER;
    *at += 2;
    return RECODED;
}

// Decode a scan, and move `at` to the end of its data.
static Outcome decode_scan(const Head *head, const uint8_t **at, const uint8_t *stop, uint8_t *unstuffed,
                           const Coefficients *coefficients) {
    ScanState scan = {.header = &head->scan};
    bool is_dc = head->scan.start == 0, is_lone = head->scan.num_components == 1;
    for (int i = 0; i < head->scan.num_components && is_dc && head->scan.high == 0; i++) {
        if (!make_table(head->huffman[head->scan.dc_table[i]], true, &scan.dc[i])) return DAMAGED;
    }
    if (!is_dc && !make_table(head->huffman[head->scan.ac_table[0]], false, &scan.ac)) return DAMAGED;
    int c = head->scan.components[0];
    int64_t columns = is_lone ? coefficients->columns[c] : head->columns;
    int64_t rows = is_lone ? coefficients->rows[c] : head->rows;
    int64_t num_mcus = rows * columns, interval = head->interval ? head->interval : num_mcus;
    Outcome outcome = RECODED;
    for (int64_t mcu = 0; mcu < num_mcus && outcome == RECODED; mcu++) {
        if (mcu % interval == 0) {
            if (mcu) outcome = check_end(&scan);
            if (mcu && outcome == RECODED) outcome = skip_marker(at, stop, mcu / interval);
            if (outcome != RECODED) return outcome;
            uint8_t *end = unstuffed;
            *at = unstuff(*at, stop, &end);
            scan.bits = (Bits){.from = unstuffed, .stop = end};
            memset(scan.dc_before, 0, sizeof scan.dc_before);
        }
        outcome = decode_mcu(&scan, coefficients, mcu, columns);
    }
    return outcome == RECODED ? check_end(&scan) : outcome;
}

// Decode all scans of an image whose first scan has been found. `unstuffed` has PADDING more bytes than the file, and
// `coefficients->blocks[0]` has room for all coefficients.
Outcome decode_scans(const uint8_t *data, int64_t length, Head *head, uint8_t *unstuffed, Coefficients *coefficients) {
    // Each MCU takes at least one bit. The check keeps small files from using much memory.
    if ((int64_t)head->rows * head->columns > 8 * length) return DAMAGED;
    clear_coefficients(head, coefficients);
    coefficients->stop = data + head->scan_start;
    coefficients->num_scans = 0;
    for (int marker = SOS; marker == SOS; coefficients->num_scans++) {
        if (!note_bits(&head->scan, coefficients)) return UNSUPPORTED;
        coefficients->stop = data + head->scan_start;
        Outcome outcome = decode_scan(head, &coefficients->stop, data + length, unstuffed, coefficients);
        if (outcome != RECODED) return outcome;
        marker = read_markers(data, length, coefficients->stop - data, head);
        if (marker == 0) return NO_END;
    }
    for (int c = 0; c < head->num_components; c++) {
        for (int k = 0; k < 64; k++) {
            if (coefficients->missing[c][k] != 0) return MISSING_SCANS;  // libjpeg would smooth the image.
        }
    }
    return RECODED;
}

// Transform the MCUs of the region.
static bool transform_region(const Member *member, const Coefficients *coefficients) {
    const Region *region = &member->region;
    int16_t blocks[128 * MAX_BLOCKS];
    int dc[MAX_BLOCKS];
    for (int row = region->first_row; row < region->stop_row; row++) {
        for (int column = region->first_column; column < region->stop_column; column++) {
            for (int block = 0; block < member->num_blocks; block++) {
                int c = member->component[block], across = coefficients->across[c], part = c ? 0 : block;
                const int16_t *from = find_block(coefficients, c, (int64_t)row * coefficients->down[c] + part / across,
                                                 (int64_t)column * across + part % across);
                memcpy(blocks + 128 * block + 64, from, 64 * sizeof(int16_t));
                dc[block] = from[0];
            }
            if (!transform_mcu(member, blocks, dc, row, column)) return false;
        }
    }
    return true;
}

// Decode a progressive image whose first scan has been found, and transform its region.
bool decode_progressive(const uint8_t *data, int64_t length, Member *member, Workspace *work) {
    Head *head = &member->head;
    Coefficients coefficients;
    if (data[length - 2] != 0xFF || data[length - 1] != EOI) return false;  // Require EOI, as scan.c does.
    if (!reserve(&work->coefficients, (size_t)count_coefficients(head) * sizeof(int16_t))) return false;
    if (!reserve(&work->scan, (size_t)length + PADDING)) return false;
    coefficients.blocks[0] = (int16_t *)(void *)work->coefficients.bytes;
    if (decode_scans(data, length, head, work->scan.bytes, &coefficients) != RECODED) return false;
    prepare_quantizers(member);
    return transform_region(member, &coefficients);
}
