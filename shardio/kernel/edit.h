// Declarations that the files of pixel operations share.

#ifndef SHARDIO_EDIT_H
#define SHARDIO_EDIT_H

#include "kernel.h"

// pointwise.c

enum { BLOCK_LENGTH = 1024 };  // The number of pixels that are edited together in the L1 cache. A multiple of 64.

// Colors of pixels. Each function edits a multiple of 64 pixels, the last of which may be unused zeros.
typedef struct {
    _Alignas(64) uint8_t colors[3][BLOCK_LENGTH];
} Block;

// Return whether an operation processes each pixel independently, once statistics of all pixels are known.
bool is_pointwise(int64_t code);

// Apply the first operation, which is pointwise, and the following operations that can be applied together with it.
// Return the number of applied operations.
int64_t edit_pixels(uint8_t *pixels, int64_t num_pixels, const Operation *operations, int64_t num_operations);

// tones.c

// A blend of bytes with other bytes. If the processor can look up bytes fast and `has_tables` is set, the blend is the
// other byte plus rises[byte - other], or minus falls[other - byte].
typedef struct {
    float factor;
    bool has_tables;
    _Alignas(64) uint8_t rises[256];
    _Alignas(64) uint8_t falls[256];
} Blend;

void prepare_blend(double factor, Blend *blend);
void blend_bytes(uint8_t bytes[BLOCK_LENGTH], const uint8_t *others, int64_t count, const Blend *blend);
void blend_colors(Block *block, const uint8_t *others, int64_t count, const Blend *blend);
int64_t make_gray(const Block *block, int64_t count, uint8_t *gray);
bool make_stretching_table(int64_t low, int64_t high, uint8_t *table);
bool make_equalizing_table(const uint32_t *counts, int64_t num_pixels, uint8_t *table);

// hue.c

void turn_hue(Block *block, int64_t count, int32_t shift);

// neighbors.c: `before` is a copy of the image with 4 readable bytes after it, and the result goes to `pixels`.

void fill_pixels(uint8_t *pixels, int64_t num_pixels, const double *color);
void sharpen(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, double factor);
void erase(uint8_t *pixels, int64_t height, int64_t width, const double *numbers);
void flip_vertically(uint8_t *pixels, int64_t height, int64_t width);
void transform_affinely(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, const double *numbers);

// warping.c and blurring.c, with `before` and `pixels` as above.

void warp(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, const double *numbers,
          bool is_perspective);
bool moves_by_whole_pixels(const double *numbers);
void blur(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, const double *numbers, float *memory);

// An operation's number as an integer. Very large numbers are clamped, because C does not define their conversion.
static inline int64_t as_integer(double number) {
    const double limit = 1ll << 40;
    if (!(number > -limit)) return -(1ll << 40);
    return number < limit ? (int64_t)number : 1ll << 40;
}

// A number as a byte, clamped and rounded toward 0. The lower limit, 0.5, becomes 0; a limit of 0 would take one more
// instruction.
static inline uint8_t as_byte(float number) {
    number = number > 0.5f ? number : 0.5f;
    return (uint8_t)(int32_t)(number < 255 ? number : 255);
}

// The factor of a blend, clamped. Larger factors would overflow the integers, and would give the same blends anyway.
static inline float limit_factor(double number) {
    const float limit = 1 << 20;
    float factor = (float)number;
    factor = factor > -limit ? factor : -limit;
    return factor < limit ? factor : limit;
}

// Blend a byte with another byte: `factor` is the weight of the first byte.
static inline uint8_t blend_byte(uint8_t byte, uint8_t other, float factor) {
    int32_t blended = (int32_t)((float)other + factor * (float)(int16_t)(byte - other));
    blended = blended > 0 ? blended : 0;
    return (uint8_t)(blended < 255 ? blended : 255);
}

#endif
