// Apply operations that process each pixel independently, block by block, so that a block stays in the L1 cache.
//
// Some operations need statistics of the whole image first: the mean gray value, or each color's lowest and highest
// values or frequencies. Such an operation begins a new pass; it and the operations that follow become steps that are
// applied together. Operations that process each color independently are functions of bytes. On processors that look
// up bytes fast, tables replace any number of functions.
//
// A block has room for whole vectors: unused pixels at its end are also edited, but neither read from the image nor
// written.

#include "edit.h"
#include "vectors.h"

enum { MAX_STEPS = 8 };

// A product that gives the same bytes as a table. Integer arithmetic is four times as fast as looking up bytes one by
// one, and such a product exists for four in five of the ranges that ImageOps.autocontrast stretches.
typedef struct {
    bool is_used;
    uint32_t start, factor;  // The new byte is (byte - start) * factor >> 16.
} Multiple;

// One of the operations that are applied to each block.
typedef struct {
    enum { EDIT_BYTES, LOOK_UP, SATURATE, TURN_HUE, MAKE_GRAY } kind;
    const Operation *operation;
    uint8_t mean;                         // EDIT_BYTES: the mean gray value.
    bool is_common;                       // LOOK_UP: whether the colors have the same table.
    _Alignas(64) uint8_t tables[3][256];  // LOOK_UP.
    Multiple multiples[3];                // LOOK_UP.
    Blend blend;                          // SATURATE.
} Step;

static bool needs_statistics(int64_t code) { return code == CONTRAST || code == AUTOCONTRAST || code == EQUALIZE; }

bool is_pointwise(int64_t code) { return code >= NONE && code <= EQUALIZE; }

// Read pixels as a block. Return the block's length, a multiple of 64. Unused pixels are 0.
static int64_t split_block(const uint8_t *pixels, int64_t num_pixels, Block *block) {
    int64_t whole = num_pixels / 32 * 32, length = (num_pixels + 63) / 64 * 64;
    u8x32 colors[3];
    for (int64_t i = 0; i < length; i += 32) {
        if (i < whole) {
            split_colors(pixels + 3 * i, colors);
        } else {
            uint8_t rest[96] = {0};
            if (i < num_pixels) memcpy(rest, pixels + 3 * i, (size_t)(3 * (num_pixels - i)));
            split_colors(rest, colors);
        }
        for (int c = 0; c < 3; c++) STORE(block->colors[c] + i, colors[c]);
    }
    return length;
}

static void join_block(const Block *block, int64_t num_pixels, uint8_t *pixels) {
    int64_t whole = num_pixels / 32 * 32;
    const uint8_t (*colors)[BLOCK_LENGTH] = block->colors;
    for (int64_t i = 0; i < whole; i += 32)
        join_colors(LOAD(u8x32, colors[0] + i), LOAD(u8x32, colors[1] + i), LOAD(u8x32, colors[2] + i), pixels + 3 * i);
    for (int64_t i = whole; i < num_pixels; i++)
        for (int c = 0; c < 3; c++) pixels[3 * i + c] = colors[c][i];
}

static uint8_t find_mean_gray(const uint8_t *pixels, int64_t num_pixels) {
    int64_t total = 0;
    for (int64_t first = 0; first < num_pixels; first += BLOCK_LENGTH) {
        Block block;
        uint8_t gray[BLOCK_LENGTH];
        int64_t length = split_block(pixels + 3 * first, min(BLOCK_LENGTH, num_pixels - first), &block);
        total += make_gray(&block, length, gray);
    }
    return (uint8_t)((double)total / (double)num_pixels + 0.5);
}

// The lowest and highest values of each color.
static void find_limits(const uint8_t *pixels, int64_t num_pixels, uint8_t low[3], uint8_t high[3]) {
    uint8_t lowest[96], highest[96];
    u8x32 lows[3], highs[3];
    for (int i = 0; i < 3; i++) {
        lows[i] = (u8x32){} + 255;
        highs[i] = (u8x32){};
    }
    int64_t size = 3 * num_pixels, whole = size / 96 * 96;
    for (int64_t i = 0; i < whole; i += 96) {
        for (int j = 0; j < 3; j++) {
            u8x32 bytes = LOAD(u8x32, pixels + i + 32 * j);
            lows[j] = __builtin_elementwise_min(lows[j], bytes);
            highs[j] = __builtin_elementwise_max(highs[j], bytes);
        }
    }
    for (int j = 0; j < 3; j++) {
        STORE(lowest + 32 * j, lows[j]);
        STORE(highest + 32 * j, highs[j]);
    }
    for (int64_t i = whole; i < size; i++) {
        lowest[i % 96] = (uint8_t)min(lowest[i % 96], pixels[i]);
        highest[i % 96] = (uint8_t)max(highest[i % 96], pixels[i]);
    }
    for (int c = 0; c < 3; c++) {
        low[c] = 255;
        high[c] = 0;
        for (int i = c; i < 96; i += 3) {
            low[c] = (uint8_t)min(low[c], lowest[i]);
            high[c] = (uint8_t)max(high[c], highest[i]);
        }
    }
}

enum { NUM_COUNTERS = 4 };

// Count how often each value of each color occurs. Adjacent pixels have separate counters, because equal pixels would
// wait for each other. Eight pixels are read together.
static void count_values(const uint8_t *pixels, int64_t num_pixels, uint32_t counts[3][256]) {
    uint32_t counters[NUM_COUNTERS][3][256] = {0};
    int64_t i = 0;
    for (; i + 8 <= num_pixels; i += 8) {
        uint64_t words[3];  // The first byte is the least significant on all supported processors.
        memcpy(words, pixels + 3 * i, sizeof words);
#pragma clang loop unroll(full)
        for (int j = 0; j < 24; j++) counters[j / 3 % NUM_COUNTERS][j % 3][words[j / 8] >> 8 * (j % 8) & 255]++;
    }
    for (; i < num_pixels; i++)
        for (int c = 0; c < 3; c++) counters[0][c][pixels[3 * i + c]]++;
    for (int c = 0; c < 3; c++)
        for (int value = 0; value < 256; value++) {
            counts[c][value] = 0;
            for (int j = 0; j < NUM_COUNTERS; j++) counts[c][value] += counters[j][c][value];
        }
}

static uint8_t multiply(uint8_t value, Multiple multiple) {
    return (uint8_t)((value - multiple.start) * multiple.factor >> 16);
}

static Multiple find_multiple(const uint8_t *table, int64_t low, int64_t high) {
    Multiple multiple = {true, (uint32_t)low, (uint32_t)(((255 << 16) + high - low - 1) / (high - low))};
    for (int64_t value = low; value <= high; value++)
        multiple.is_used &= table[value] == multiply((uint8_t)value, multiple);
    return multiple;
}

static void start_tables(Step *step) {
    step->kind = LOOK_UP;
    step->is_common = true;
    for (int i = 0; i < 3 * 256; i++) step->tables[i / 256][i % 256] = (uint8_t)i;
    for (int c = 0; c < 3; c++) step->multiples[c].is_used = false;
}

// Make the tables of an operation. Return whether pixels change.
static bool make_tables(const uint8_t *pixels, int64_t num_pixels, int64_t code, Step *step) {
    bool is_changed = false;
    start_tables(step);
    step->is_common = false;
    if (code == EQUALIZE) {
        uint32_t counts[3][256];
        count_values(pixels, num_pixels, counts);
        for (int c = 0; c < 3; c++) is_changed |= make_equalizing_table(counts[c], num_pixels, step->tables[c]);
    } else {
        uint8_t low[3], high[3];
        find_limits(pixels, num_pixels, low, high);
        for (int c = 0; c < 3; c++) {
            if (!make_stretching_table(low[c], high[c], step->tables[c])) continue;
            is_changed = true;
            if (!LOOKS_UP_VECTORS) step->multiples[c] = find_multiple(step->tables[c], low[c], high[c]);
        }
    }
    return is_changed;
}

// Invert the bytes that are at or above a threshold. If this function were inlined, it would compare 64-bit values.
static __attribute__((noinline)) void solarize(uint8_t *bytes, int64_t count, uint8_t threshold) {
    for (int64_t i = 0; i < count; i++) bytes[i] = bytes[i] < threshold ? bytes[i] : (uint8_t)~bytes[i];
}

// Apply an operation that processes each byte independently.
static void edit_bytes(const Operation *operation, uint8_t mean, uint8_t *bytes, int64_t count) {
    double number = operation->numbers[0];
    uint8_t byte = (uint8_t)as_integer(number);
    float factor = limit_factor(number);
    switch (operation->code) {
    case BRIGHTNESS:
        for (int64_t i = 0; i < count; i++) bytes[i] = blend_byte(bytes[i], 0, factor);
        break;
    case CONTRAST:
        for (int64_t i = 0; i < count; i++) bytes[i] = blend_byte(bytes[i], mean, factor);
        break;
    case SOLARIZE:
        if (number < 256) solarize(bytes, count, byte);
        break;
    case POSTERIZE:
        for (int64_t i = 0; i < count; i++) bytes[i] &= byte;
        break;
    case INVERT:
        for (int64_t i = 0; i < count; i++) bytes[i] = (uint8_t)~bytes[i];
        break;
    default: break;
    }
}

static void look_up(const uint8_t *restrict table, Multiple multiple, uint8_t *restrict bytes, int64_t count) {
    if (multiple.is_used) {
        for (int64_t i = 0; i < count; i++) bytes[i] = multiply(bytes[i], multiple);
        return;
    }
    int64_t i = 0;
    for (; i + 64 <= count && LOOKS_UP_VECTORS; i += 64) STORE(bytes + i, look_up_bytes(table, LOAD(u8x64, bytes + i)));
    for (; i + 8 <= count; i += 8) {  // Eight bytes are read together.
        uint64_t word = LOAD(uint64_t, bytes + i);
#pragma clang loop unroll(full)
        for (int j = 0; j < 8; j++) bytes[i + j] = table[word >> 8 * j & 255];
    }
    for (; i < count; i++) bytes[i] = table[bytes[i]];
}

// Add a step for an operation that needs no statistics, or whose mean is known. Return the number of steps.
static int add_step(const Operation *operation, uint8_t mean, Step *steps, int num_steps) {
    Step *step = &steps[num_steps];
    step->operation = operation;
    step->mean = mean;
    switch (operation->code) {
    case NONE: return num_steps;
    case SATURATION:
        step->kind = SATURATE;
        prepare_blend(operation->numbers[0], &step->blend);
        return num_steps + 1;
    case HUE: step->kind = TURN_HUE; return num_steps + 1;
    case GRAYSCALE: step->kind = MAKE_GRAY; return num_steps + 1;
    default: break;
    }
    if (LOOKS_UP_VECTORS && num_steps && steps[num_steps - 1].kind == LOOK_UP) {
        edit_bytes(operation, mean, (uint8_t *)steps[num_steps - 1].tables, 3 * 256);
        return num_steps;
    }
    if (!LOOKS_UP_VECTORS || (operation->code != BRIGHTNESS && operation->code != CONTRAST)) {  // These need no table.
        step->kind = EDIT_BYTES;
        return num_steps + 1;
    }
    start_tables(step);
    edit_bytes(operation, mean, (uint8_t *)step->tables, 3 * 256);
    return num_steps + 1;
}

static void edit_block(const Step *step, Block *block, int64_t length) {
    uint8_t gray[BLOCK_LENGTH];
    switch (step->kind) {
    case EDIT_BYTES:
        for (int c = 0; c < 3; c++) edit_bytes(step->operation, step->mean, block->colors[c], length);
        break;
    case LOOK_UP:
        for (int c = 0; c < 3; c++) look_up(step->tables[c], step->multiples[c], block->colors[c], length);
        break;
    case SATURATE:
        make_gray(block, length, gray);
        blend_colors(block, gray, length, &step->blend);
        break;
    case TURN_HUE: turn_hue(block, length, (int32_t)as_integer(step->operation->numbers[0])); break;
    case MAKE_GRAY:
        make_gray(block, length, block->colors[0]);
        for (int c = 1; c < 3; c++) memcpy(block->colors[c], block->colors[0], (size_t)length);
        break;
    }
}

static void apply_steps(const Step *steps, int num_steps, uint8_t *pixels, int64_t num_pixels) {
    bool is_split = false;
    for (int k = 0; k < num_steps; k++)
        is_split |= steps[k].kind == LOOK_UP ? !steps[k].is_common : steps[k].kind != EDIT_BYTES;
    for (int64_t first = 0; first < num_pixels && num_steps; first += BLOCK_LENGTH) {
        int64_t count = min(BLOCK_LENGTH, num_pixels - first);
        uint8_t *part = pixels + 3 * first;
        if (is_split) {
            Block block;
            int64_t length = split_block(part, count, &block);
            for (int k = 0; k < num_steps; k++) edit_block(&steps[k], &block, length);
            join_block(&block, count, part);
            continue;
        }
        for (int k = 0; k < num_steps; k++) {
            if (steps[k].kind == LOOK_UP)
                look_up(steps[k].tables[0], steps[k].multiples[0], part, 3 * count);
            else
                edit_bytes(steps[k].operation, steps[k].mean, part, 3 * count);
        }
    }
}

int64_t edit_pixels(uint8_t *pixels, int64_t num_pixels, const Operation *operations, int64_t num_operations) {
    Step steps[MAX_STEPS];
    int num_steps = 0;
    int64_t count = 0;
    for (; count < num_operations && num_steps < MAX_STEPS; count++) {
        int64_t code = operations[count].code;
        if (!is_pointwise(code) || (count && needs_statistics(code))) break;
        if (code == AUTOCONTRAST || code == EQUALIZE) {
            num_steps += make_tables(pixels, num_pixels, code, &steps[num_steps]);
            continue;
        }
        uint8_t mean = code == CONTRAST ? find_mean_gray(pixels, num_pixels) : 0;
        num_steps = add_step(&operations[count], mean, steps, num_steps);
    }
    apply_steps(steps, num_steps, pixels, num_pixels);
    return count;
}
