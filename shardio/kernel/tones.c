// Operations on each byte, or on the three colors of each pixel. The results are the same as Pillow's.
//
// Pillow blends two images as 32-bit floating-point numbers, rounds toward 0, and clamps the result to a byte
// (Blend.c). It computes gray values with 16-bit weights (Convert.c, L24).

#include "edit.h"
#include "vectors.h"

#include <math.h>

// Prepare to blend, given the weight of the first bytes.
//
// Pillow computes other + factor * (byte - other). Rounding that sum to 32 bits does not carry it to the next integer
// if the product is an integer, or more than 2^-16 away from one: sums from 128 to 256 are rounded to multiples of
// 2^-16, smaller ones have more bits, and larger ones are clamped to 255. If all products meet this condition, they are
// rounded first.
void prepare_blend(double number, Blend *blend) {
    float factor = limit_factor(number);
    const float margin = 0x1p-16f;
    blend->factor = factor;
    blend->has_tables = false;
    if (!LOOKS_UP_VECTORS || !(factor >= 0 && factor < 256)) return;
    int num_close = 0;
    for (int i = 0; i < 256; i++) {
        float product = factor * (float)i, below = floorf(product), part = product - below;
        blend->rises[i] = as_byte(below);
        blend->falls[i] = as_byte(part > 0 ? below + 1 : below);
        num_close += (part > 0) & ((part <= margin) | (part >= 1 - margin)) & (product < 256);
    }
    blend->has_tables = num_close == 0;
}

// Blend eight bytes, given 2^16 times their differences from `others`. limit_factor() keeps the results in range.
static inline __attribute__((always_inline)) i32x8 blend_eight(i16x16 differences, i16x16 others, float factor) {
    f32x8 products = __builtin_convertvector((i32x8)differences, f32x8) * (factor * 0x1p-16f);
    return __builtin_convertvector(__builtin_convertvector((i32x8)others, f32x8) + products, i32x8);
}

static inline __attribute__((always_inline)) i16x16 blend_sixteen(i16x16 bytes, i16x16 others, float factor) {
    const i16x16 zero = {};
    i16x16 differences = bytes - others;
    return pack(blend_eight(zip_low(zero, differences), zip_low(others, zero), factor),
                blend_eight(zip_high(zero, differences), zip_high(others, zero), factor));
}

static inline __attribute__((always_inline)) u8x32 blend_vectors(u8x32 bytes, u8x32 others, float factor) {
    return pack_bytes(blend_sixteen(widen_low(bytes), widen_low(others), factor),
                      blend_sixteen(widen_high(bytes), widen_high(others), factor));
}

// Blend every plane of bytes with `others`, which is the same for all planes. `count` is a multiple of 64.
static inline __attribute__((always_inline)) void blend_planes(uint8_t (*planes)[BLOCK_LENGTH], int num_planes,
                                                               const uint8_t *others, int64_t count,
                                                               const Blend *blend) {
    for (int64_t i = 0; i < count && !blend->has_tables; i += 32) {
        u8x32 other = LOAD(u8x32, others + i);
        for (int p = 0; p < num_planes; p++)
            STORE(planes[p] + i, blend_vectors(LOAD(u8x32, planes[p] + i), other, blend->factor));
    }
    for (int64_t i = 0; i < count && blend->has_tables; i += 64) {
        u8x64 other = LOAD(u8x64, others + i);
        for (int p = 0; p < num_planes; p++) {
            u8x64 bytes = LOAD(u8x64, planes[p] + i);
            u8x64 fall = look_up_bytes(blend->falls, __builtin_elementwise_sub_sat(other, bytes));
            u8x64 rise = look_up_bytes(blend->rises, __builtin_elementwise_sub_sat(bytes, other));
            STORE(planes[p] + i, __builtin_elementwise_add_sat(__builtin_elementwise_sub_sat(other, fall), rise));
        }
    }
}

void blend_bytes(uint8_t bytes[BLOCK_LENGTH], const uint8_t *others, int64_t count, const Blend *blend) {
    blend_planes((uint8_t (*)[BLOCK_LENGTH])bytes, 1, others, count, blend);
}

void blend_colors(Block *block, const uint8_t *others, int64_t count, const Blend *blend) {
    blend_planes(block->colors, 3, others, count, blend);
}

// The gray values of 16 pixels whose red and blue values alternate: (19595 red + 38470 green + 7471 blue + 2^15) >> 16.
// The weights are 256 × 77 - 117, 256 × 150 + 70 and 256 × 29 + 47, so that the sum of each part, and the total, fit
// into 16 bits.
static inline __attribute__((always_inline)) u16x16 mix_colors(u8x32 red_and_blue, u16x16 green) {
    u16x16 high = (u16x16)sum_byte_products(red_and_blue, 77, 29) + green * 150;
    i16x16 low = sum_byte_products(red_and_blue, -117, 47) + (i16x16)(green * 70);
    return (high + (u16x16)(low >> 8) + 128) >> 8;
}

// Write the gray values of `count` pixels, a multiple of 32 and at most BLOCK_LENGTH, and return their sum.
int64_t make_gray(const Block *block, int64_t count, uint8_t *gray) {
    u16x16 total = {};  // Each sum is at most 255 × BLOCK_LENGTH / 16.
    for (int64_t i = 0; i < count; i += 32) {
        u8x32 red = LOAD(u8x32, block->colors[0] + i), green = LOAD(u8x32, block->colors[1] + i);
        u8x32 blue = LOAD(u8x32, block->colors[2] + i);
        u16x16 low = mix_colors((u8x32)zip_bytes_low(red, blue), (u16x16)widen_low(green));
        u16x16 high = mix_colors((u8x32)zip_bytes_high(red, blue), (u16x16)widen_high(green));
        STORE(gray + i, pack_bytes((i16x16)low, (i16x16)high));
        total += low + high;
    }
    return __builtin_reduce_add(__builtin_convertvector(total, i32x16));
}

// Make the table of ImageOps.autocontrast, which stretches values from `low` to `high`. Return whether values change.
bool make_stretching_table(int64_t low, int64_t high, uint8_t *table) {
    if (high <= low || (low == 0 && high == 255)) return false;
    double scale = 255.0 / (double)(high - low), offset = -(double)low * scale;
    for (int64_t value = 0; value < 256; value++)
        table[value] = (uint8_t)min(max((int64_t)((double)value * scale + offset), 0), 255);
    return true;
}

// Make the table of ImageOps.equalize, which makes all values equally frequent. Return whether values change.
bool make_equalizing_table(const uint32_t *counts, int64_t num_pixels, uint8_t *table) {
    int last = 0, num_values = 0;
    for (int value = 0; value < 256; value++) {
        if (!counts[value]) continue;
        last = value;
        num_values++;
    }
    int64_t step = (num_pixels - counts[last]) / 255, total = step / 2;
    if (num_values <= 1 || step == 0) return false;
    for (int value = 0; value < 256; value++) {
        table[value] = (uint8_t)min(total / step, 255);
        total += counts[value];
    }
    return true;
}
