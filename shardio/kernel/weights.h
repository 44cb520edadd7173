// The pixels that are summed for a pixel of a resized row, and their weights: those of OpenCV's INTER_LINEAR
// (resize.cpp) and of Pillow (Resample.c), bit for bit. Columns are resized in the same way.

#ifndef SHARDIO_WEIGHTS_H
#define SHARDIO_WEIGHTS_H

#include "shared.h"

#ifndef __CUDACC__  // CUDA has these functions.
#include <math.h>
#endif

enum { BILINEAR_BITS = 11, WEIGHT_BITS = 22 };  // OpenCV's INTER_RESIZE_COEF_BITS, and Pillow's PRECISION_BITS.

// The rows or columns of a window that are within the resized part.
static inline Range find_visible(int64_t start, int64_t num_resized, int64_t num_in_window) {
    int64_t first = start < 0 ? -start : 0, stop = num_resized - start;
    Range visible = {first, stop < num_in_window ? stop : num_in_window};
    return visible;
}

// The two pixels that OpenCV mixes for a new pixel, and their weights.
typedef struct {
    int64_t first;
    int32_t weights[2];
} Mix;

// The position, in the original row, of the center of a pixel of the resized row.
static inline float find_position(int64_t num_before, int64_t num_after, int64_t i) {
    return (float)(((double)i + 0.5) * (1.0 / ((double)num_after / (double)num_before)) - 0.5);
}

// `is_clamped`: whether the border pixel gets all the weight beyond the border, as in OpenCV's horizontal pass. Beyond
// the border in OpenCV's vertical pass, both pixels are the border pixel.
static inline Mix find_mix(int64_t num_before, int64_t num_after, int64_t i, bool is_clamped) {
    const float one = 1 << BILINEAR_BITS;
    float position = find_position(num_before, num_after, i);
    int64_t first = (int64_t)floorf(position);
    float part = position - (float)first;
    if (is_clamped && (first < 0 || first >= num_before - 1)) {
        first = first < 0 ? 0 : num_before - 1;
        part = 0;
    }
    Mix mix = {first, {(int32_t)rintf((1.0f - part) * one), (int32_t)rintf(part * one)}};
    return mix;
}

static inline double find_support(double scale, int resampling) {
    double support = resampling == PILLOW_BICUBIC ? 2.0 : resampling == PILLOW_BOX ? 0.5 : 1.0;
    return support * fmax(scale, 1.0);
}

// The range of pixels that Pillow sums for a new pixel.
static inline Range find_reach(int64_t num_before, int64_t num_after, int64_t i, int resampling) {
    double scale = (double)num_before / (double)num_after, center = ((double)i + 0.5) * scale;
    double support = find_support(scale, resampling);
    int64_t start = (int64_t)(center - support + 0.5), stop = (int64_t)(center + support + 0.5);
    Range reach = {start > 0 ? start : 0, stop < num_before ? stop : num_before};
    return reach;
}

// The weight of a pixel at a given distance from the center (box_filter, bilinear_filter and bicubic_filter).
static inline double weigh_distance(double x, int resampling) {
    const double a = -0.5;
    if (resampling == PILLOW_BOX) return x > -0.5 && x <= 0.5;
    x = fabs(x);
    if (resampling == PILLOW_BILINEAR) return x < 1.0 ? 1.0 - x : 0.0;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

// A weight, before or after rounding.
typedef union {
    double value;
    int64_t weight;
} Tap;

// Find the pixels that Pillow sums for a new pixel, and their weights, rounded as in precompute_coeffs and
// normalize_coeffs_8bpc. Taps after the last pixel, up to `num_taps`, are 0. Return the first pixel.
static inline int64_t find_taps(int64_t num_before, int64_t num_after, int64_t i, int resampling, int64_t num_taps,
                                Tap *taps) {
    Range reach = find_reach(num_before, num_after, i, resampling);
    double scale = (double)num_before / (double)num_after, center = ((double)i + 0.5) * scale;
    double shrinking = 1.0 / fmax(scale, 1.0), total = 0.0;
    int64_t count = reach.stop - reach.start;
    for (int64_t k = 0; k < count; k++) {
        taps[k].value = weigh_distance(((double)(reach.start + k) - center + 0.5) * shrinking, resampling);
        total += taps[k].value;
    }
    for (int64_t k = 0; k < count; k++) {
        double weight = (total != 0.0 ? taps[k].value / total : taps[k].value) * (1 << WEIGHT_BITS);
        taps[k].weight = (int32_t)(weight < 0 ? weight - 0.5 : weight + 0.5);
    }
    for (int64_t k = count; k < num_taps; k++) taps[k].weight = 0;
    return reach.start;
}

// The largest number of pixels that Pillow sums for any one of the new pixels from `start` to `stop` - 1.
static inline int64_t count_taps(int64_t num_before, int64_t num_after, int64_t start, int64_t stop, int resampling) {
    int64_t num_taps = 0;
    for (int64_t i = start; i < stop; i++) {
        Range reach = find_reach(num_before, num_after, i, resampling);
        int64_t count = reach.stop - reach.start;
        if (count > num_taps) num_taps = count;
    }
    return num_taps;
}

// The pixels that the new pixels from `start` to `stop` - 1 need.
static inline Range find_needed(int64_t num_before, int64_t num_after, int64_t start, int64_t stop, int resampling) {
    Range needed;
    if (resampling == OPENCV_BILINEAR) {
        int64_t first = (int64_t)floorf(find_position(num_before, num_after, start));
        int64_t end = (int64_t)floorf(find_position(num_before, num_after, stop - 1)) + 2;
        needed.start = first > 0 ? first : 0;
        needed.stop = end < num_before ? end : num_before;
    } else {
        needed.start = find_reach(num_before, num_after, start, resampling).start;
        needed.stop = find_reach(num_before, num_after, stop - 1, resampling).stop;
    }
    return needed;
}

#endif
