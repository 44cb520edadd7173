// The data that horizontal resizing needs: for every 32 output columns, the bytes from which they are computed.

#ifndef SHARDIO_RESIZE_H
#define SHARDIO_RESIZE_H

#include "decoder.h"
#include "vectors.h"
#include "weights.h"

enum {
    COLUMNS = 32,  // The number of columns of the output that are computed together.
    GROUP = 4,     // The number of columns in a group.
};

// The places of the input bytes for 32 columns of the output: for each column, the first of some adjacent bytes.
typedef struct {
    uint8_t indices[2 * COLUMNS], fours[4 * COLUMNS];  // The places of 2 and of 4 bytes per column, from its base.
    int32_t sources[COLUMNS], bases[COLUMNS / GROUP];  // The base of each group of columns.
    bool is_near;     // Whether all bytes are among the 128 starting at the first base; all groups then have that base.
    bool is_grouped;  // Whether the bytes of each group are among the 64 starting at its base.
} Gather;

// Prepare to gather bytes. The columns' sources are in ascending or descending order.
void make_gather(const int32_t *sources, Gather *gather);

// Two adjacent bytes for each of 32 columns, 16 columns in each half.
typedef struct {
    u8x32 halves[2];
} Twos;

// Return two adjacent bytes for each column, `offset` bytes after the column's first two bytes.
static inline __attribute__((always_inline)) Twos gather_twos(const uint8_t *bytes, const Gather *gather,
                                                              int64_t offset) {
    Twos twos;
#if defined(__AVX512VBMI__)
    if (gather->is_near) {
        const uint8_t *first = bytes + gather->bases[0] + offset;
        __m512i low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(first + 64);
        __m512i both = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(gather->indices), high);
        twos.halves[0] = (u8x32)_mm512_castsi512_si256(both);
        twos.halves[1] = (u8x32)_mm512_extracti64x4_epi64(both, 1);
        return twos;
    }
#endif
    uint16_t gathered[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) memcpy(&gathered[i], bytes + gather->sources[i] + offset, 2);
    memcpy(&twos, gathered, sizeof twos);
    return twos;
}

#if defined(__AVX512VBMI__)
// Four adjacent bytes for each of 32 columns, 16 columns in each part.
typedef struct {
    __m512i parts[2];
} Fours;

static inline __attribute__((always_inline)) Fours gather_fours(const uint8_t *bytes, const Gather *gather,
                                                                int64_t offset) {
    Fours fours;
    if (gather->is_near) {
        const uint8_t *first = bytes + gather->bases[0] + offset;
        __m512i low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(first + 64);
        for (int i = 0; i < 2; i++)
            fours.parts[i] = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(gather->fours + 64 * i), high);
        return fours;
    }
    if (gather->is_grouped) {
        for (int i = 0; i < 2; i++) {
            __m512i indices = _mm512_loadu_si512(gather->fours + 64 * i), part = {};
            for (int j = 0; j < 4; j++) {
                __m512i group = _mm512_loadu_si512(bytes + gather->bases[4 * i + j] + offset);
                part = _mm512_mask_permutexvar_epi8(part, 0xFFFFull << 16 * j, indices, group);
            }
            fours.parts[i] = part;
        }
        return fours;
    }
    uint32_t gathered[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) memcpy(&gathered[i], bytes + gather->sources[i] + offset, 4);
    memcpy(&fours, gathered, sizeof fours);
    return fours;
}
#endif

// The order in which weights for sixteen columns are kept, so that sum_products(widen_low(twos), weights[0]) and
// sum_products(widen_high(twos), weights[1]) return the columns' sums in the order that pack() takes.
static inline int find_weight(int column) { return (column >> 2 & 1) * 16 + (column >> 3) * 8 + 2 * (column & 3); }

// Three colors of `count` pixels, at most 32, side by side.
static inline void join_some_colors(u8x32 red, u8x32 green, u8x32 blue, int64_t count, uint8_t *out) {
    if (count >= COLUMNS) {
        join_colors(red, green, blue, out);
        return;
    }
    uint8_t joined[3 * COLUMNS];
    join_colors(red, green, blue, joined);
    memcpy(out, joined, 3 * (size_t)count);
}

// Return a row of the part that a plan resizes, beginning at the part's first column.
typedef Pixels (*ReadRow)(const void *source, int64_t row, int place);

// The visible part of a crop: its rows and columns in the resized part, and their place in the output.
typedef struct {
    const Plan *plan;
    int64_t first_row, num_rows, first_column, num_columns;
    int column_step;  // 1, or -1 to mirror the columns.
    uint8_t *out;     // The first pixel of the output.
    int64_t out_stride;
} Window;

bool resize_bilinear(const Window *window, ReadRow read_row, const void *source, Workspace *work);
bool resize_antialiased(const Window *window, ReadRow read_row, const void *source, Workspace *work);

#endif
