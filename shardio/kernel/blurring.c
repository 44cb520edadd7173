// Gaussian blur: each pixel becomes a weighted mean of its neighbors, first vertically, then horizontally, in float32.
//
// Values are added from the middle outward, so a computation with the same steps gives the same pixels: see blur() in
// images/rendering.py. torchvision adds them in a different order, so its pixels may differ by 1.
//
// Rows are computed in blocks. The last block of a row overlaps the one before it, so that no block reads or writes
// beyond the row. Rows that are shorter than a block are copied into a block.

#include "edit.h"
#include "vectors.h"

enum { BLOCK = 32 };  // The number of values that are computed together.

// The smallest weight to use. Smaller weights are negligible in sums of 32-bit floats.
static const double SMALLEST_WEIGHT = 0x1p-26;

// Set the weights of a pixel and of its neighbors up to a radius, except negligible weights. Return how many weights
// follow the first.
static int64_t make_weights(float *weights, int64_t radius, double ratio) {
    double total = 1, weight = 1, step = ratio;
    for (int64_t i = 0; i < radius; i++) {
        weight *= step;
        step *= ratio * ratio;
        total += 2 * weight;
    }
    weight = 1 / total;
    step = ratio;
    int64_t count = 0;
    for (int64_t i = 0; i <= radius && !(weight < SMALLEST_WEIGHT); i++) {
        weights[i] = (float)weight;
        count = i;
        weight *= step;
        step *= ratio * ratio;
    }
    return count;
}

// The pixel that appears at a place, even beyond the border: the image is mirrored at the centers of its border pixels.
static __attribute__((noinline)) int64_t mirror(int64_t place, int64_t length) {
    if (place < 0) place = -place;
    if (place < length) return place;
    if (length == 1) return 0;
    int64_t period = 2 * (length - 1);
    place %= period;
    return min(place, period - place);
}

static inline u16x32 load_bytes(const uint8_t *bytes, int64_t count) {
    u8x32 loaded = {};
    memcpy(&loaded, bytes, (size_t)count);
    return __builtin_convertvector(loaded, u16x32);
}

static inline f32x32 load_floats(const float *numbers, int64_t count) {
    f32x32 loaded = {};
    memcpy(&loaded, numbers, (size_t)count * sizeof(float));
    return loaded;
}

// The weights of a pixel and its neighbors, indexed by the distance from the pixel.
typedef struct {
    const float *weights;
    int64_t count;  // The number of weights after the first.
} Weights;

// Blur part of a row vertically: `count` values, at most a block.
static inline __attribute__((always_inline)) void blur_down(const uint8_t *before, int64_t height, int64_t length,
                                                            int64_t y, int64_t count, Weights down, float *out) {
    f32x32 total = down.weights[0] * __builtin_convertvector(load_bytes(before + y * length, count), f32x32);
    for (int64_t i = 1; i <= down.count; i++) {
        int64_t upper = y - i < 0 ? mirror(y - i, height) : y - i;
        int64_t lower = y + i >= height ? mirror(y + i, height) : y + i;
        u16x32 above = load_bytes(before + upper * length, count), below = load_bytes(before + lower * length, count);
        total = total + down.weights[i] * __builtin_convertvector(above + below, f32x32);
    }
    memcpy(out, &total, (size_t)count * sizeof(float));
}

// Blur part of a row horizontally, and round the result half to even.
static inline __attribute__((always_inline)) void blur_across(const float *row, int64_t count, Weights across,
                                                              uint8_t *out) {
    f32x32 total = across.weights[0] * load_floats(row, count);
    for (int64_t i = 1; i <= across.count; i++) {
        total = total + across.weights[i] * (load_floats(row - 3 * i, count) + load_floats(row + 3 * i, count));
    }
    i32x32 rounded = __builtin_convertvector(__builtin_elementwise_roundeven(total), i32x32);
    rounded = __builtin_elementwise_min(__builtin_elementwise_max(rounded, (i32x32){}), (i32x32){} + 255);
    u8x32 bytes = __builtin_convertvector(rounded, u8x32);
    memcpy(out, &bytes, (size_t)count);
}

// Extend a row at both ends by `count` pixels.
static void extend(float *row, int64_t width, int64_t count) {
    for (int64_t i = 1; i <= count; i++) {
        int64_t left = mirror(-i, width), right = mirror(width - 1 + i, width);
        memcpy(row - 3 * i, row + 3 * left, 3 * sizeof(float));
        memcpy(row + 3 * (width - 1 + i), row + 3 * right, 3 * sizeof(float));
    }
}

void blur(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, const double *numbers, float *memory) {
    int64_t radius_down = max(as_integer(numbers[0]), 0), radius_across = max(as_integer(numbers[2]), 0),
            length = 3 * width;
    float *weights_down = memory, *weights_across = weights_down + radius_down + 1;
    Weights down = {weights_down, make_weights(weights_down, radius_down, numbers[1])};
    Weights across = {weights_across, make_weights(weights_across, radius_across, numbers[3])};
    float *row = weights_across + radius_across + 1 + 3 * across.count;  // The row has room on both sides.
    for (int64_t y = 0; y < height; y++) {
        uint8_t *out = pixels + y * length;
        if (length < BLOCK) {
            blur_down(before, height, length, y, length, down, row);
            extend(row, width, across.count);
            blur_across(row, length, across, out);
            continue;
        }
        for (int64_t start = 0; start < length; start += BLOCK) {
            int64_t at = min(start, length - BLOCK);
            blur_down(before + at, height, length, y, BLOCK, down, row + at);
        }
        extend(row, width, across.count);
        for (int64_t start = 0; start < length; start += BLOCK) {
            int64_t at = min(start, length - BLOCK);
            blur_across(row + at, BLOCK, across, out + at);
        }
    }
}
