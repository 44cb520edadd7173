// Affine and perspective transforms, with the same results as Pillow's ImagingGenericTransform (Geometry.c).
//
// Pillow finds where the center of each pixel of the result is in the original. It interpolates between the centers of
// the nearest pixels there. Beyond the border, pixels are equal to those at the border.
//
// Pillow interpolates in double precision, in a fixed order, and rounds toward 0. Weighted sums in single precision
// give the same result in less time, unless the result is so close to a whole number that rounding errors matter. Such
// pixels are computed as in Pillow.
//
// All rows and columns that are read are in the image. A pixel is read with the byte after it, and two adjacent pixels
// are read with the two bytes after them. These bytes are ignored: they belong to the next pixels, or are among the
// four bytes that can be read after the image.

#include "edit.h"
#include "vectors.h"

#include <math.h>

enum { LENGTH = 32 };  // The number of pixels whose places are computed at once.

enum { INNER, AT_BORDER, OUTSIDE };  // In the image, as are all neighbors; elsewhere in the image; outside.

// The places of some pixels of the result in the original, and the neighbors to mix.
typedef struct {
    double x[LENGTH], y[LENGTH];          // The places; later, their distances from `column` and `row`.
    int32_t column[LENGTH], row[LENGTH];  // The last columns and rows whose centers are at or before the places.
    int32_t kind[LENGTH];                 // INNER, AT_BORDER or OUTSIDE.
    float x_weights[4][LENGTH], y_weights[4][LENGTH];  // The weights of the neighboring columns and rows.
} Places;

// An image to transform.
typedef struct {
    const uint8_t *before, *stop;  // The image, and the end of the result.
    int64_t height, width;
    uint32_t fill;  // The color of pixels outside the image.
} Job;

bool moves_by_whole_pixels(const double *numbers) {
    double right = numbers[2], down = numbers[5];
    return numbers[0] == 1 && numbers[1] == 0 && numbers[3] == 0 && numbers[4] == 1 && fabs(right) < 32768 &&
           fabs(down) < 32768 && right == trunc(right) && down == trunc(down);
}

// Compute where some pixels of a row lie in the original: the matrix times their places in the result. A perspective
// transform has a divisor.
static void find_places(const double *numbers, bool is_perspective, int64_t row, int64_t first, Places *places) {
    double y = (double)row + 0.5;
    double x_of_row = numbers[1] * y, y_of_row = numbers[4] * y, divisor_of_row = numbers[11] * y;
    for (int i = 0; i < LENGTH; i++) {
        double x = (double)((int32_t)first + i) + 0.5;
        places->x[i] = numbers[0] * x + x_of_row + numbers[2];
        places->y[i] = numbers[3] * x + y_of_row + numbers[5];
    }
    for (int i = 0; i < LENGTH && is_perspective; i++) {
        double divisor = numbers[10] * ((double)((int32_t)first + i) + 0.5) + divisor_of_row + 1;
        places->x[i] /= divisor;
        places->y[i] /= divisor;
    }
}

// Find the pixels at the places. `center`: 0.5 for the centers of pixels, or 0 to round places down. `num_before` and
// `num_after`: how many more columns and rows before and after a place matter. Places that are NaN are outside.
static inline __attribute__((always_inline)) void find_neighbors(int64_t height, int64_t width, double center,
                                                                 int num_before, int num_after, Places *places) {
    double bottom = (double)height, right = (double)width;
    int32_t last_row = (int32_t)height - 1, last_column = (int32_t)width - 1;
    for (int i = 0; i < LENGTH; i++) {
        double x = places->x[i], y = places->y[i];
        bool is_in_image = (x >= 0) & (x < right) & (y >= 0) & (y < bottom);
        x = (is_in_image ? x : 0) - center;  // Conversions of other numbers to integers may be undefined.
        y = (is_in_image ? y : 0) - center;
        int32_t column = (int32_t)floor(x), row = (int32_t)floor(y);
        bool is_inner = (column >= num_before) & (column + num_after <= last_column) & (row >= num_before) &
                        (row + num_after <= last_row);
        places->x[i] = x - floor(x);
        places->y[i] = y - floor(y);
        places->column[i] = column;
        places->row[i] = row;
        places->kind[i] = is_in_image ? is_inner ? INNER : AT_BORDER : OUTSIDE;
    }
}

// Set the weights of two neighbors, given the distances from the first neighbor.
static void weigh_linearly(const double *distances, float weights[][LENGTH]) {
    for (int i = 0; i < LENGTH; i++) {
        weights[0][i] = (float)(1 - distances[i]);
        weights[1][i] = (float)distances[i];
    }
}

// Set the weights of four neighbors, given the distances from the second neighbor.
static void weigh_cubically(const double *distances, float weights[][LENGTH]) {
    for (int i = 0; i < LENGTH; i++) {
        double d = distances[i];
        weights[0][i] = (float)(d * (d * (2 - d) - 1));
        weights[1][i] = (float)(1 + d * d * (d - 2));
        weights[2][i] = (float)(d * (1 + d * (1 - d)));
        weights[3][i] = (float)(d * d * (d - 1));
    }
}

// The pixels that are mixed into one pixel: those of adjacent rows and columns.
typedef struct {
    const uint8_t *first;
    int64_t stride;
} Neighbors;

enum { PATCH_STRIDE = 16 };  // Four pixels, and the bytes that load_two reads after them.

static inline int64_t limit(int64_t index, int64_t count) { return max(0, min(index, count - 1)); }

// Find `count` rows and columns to mix. At the border, the pixels are copied to `patch`, uint8 [4 PATCH_STRIDE].
static inline __attribute__((always_inline)) Neighbors list_neighbors(const Job *job, const Places *places, int i,
                                                                      int count, uint8_t *patch) {
    int64_t column = places->column[i] - (count == 4), row = places->row[i] - (count == 4), stride = 3 * job->width;
    if (places->kind[i] == INNER) return (Neighbors){job->before + row * stride + 3 * column, stride};
    for (int j = 0; j < count; j++) {
        const uint8_t *line = job->before + limit(row + j, job->height) * stride;
        uint8_t *copy = patch + PATCH_STRIDE * j;
        for (int k = 0; k < count; k++) memcpy(copy + 3 * k, line + 3 * limit(column + k, job->width), 4);
    }
    return (Neighbors){patch, PATCH_STRIDE};
}

// Load two adjacent pixels, and two other bytes.
static inline u8x8 load_two(Neighbors neighbors, int row, int column) {
    return LOAD(u8x8, neighbors.first + row * neighbors.stride + 3 * column);
}

static inline u8x4 load_one(Neighbors neighbors, int row, int column) {
    return LOAD(u8x4, neighbors.first + row * neighbors.stride + 3 * column);
}

// More than twice the error of a weighted sum over 2 x 2, or 4 x 4, pixels. The absolute values of two
// weights add up to 1, and those of four to at most 1.5. Rounding weights, products and sums changes the sum of a
// column by up to 3 * 255 * 2^-24, or 5 * 1.5 * 255 * 2^-24. The error of the final sum is two or three
// times that of a column.
static const float MARGIN_OF_TWO = 0x1p-12f, MARGIN_OF_FOUR = 0x1p-10f;

// Round numbers toward 0. If four values are mixed, weights may be negative, so sums must be clamped.
static inline i32x4 round_floats(f32x4 numbers, int count) {
    i32x4 rounded = __builtin_convertvector(numbers, i32x4);
    if (count == 2) return rounded;
    return __builtin_elementwise_min(__builtin_elementwise_max(rounded, (i32x4){}), (i32x4){} + 255);
}

// Mix colors by their weights. Return whether the result is certain.
static inline __attribute__((always_inline)) bool mix_quickly(Neighbors neighbors, const Places *places, int i,
                                                              int count, uint32_t *pixel) {
#pragma STDC FP_CONTRACT ON  // With or without fused operations, errors are within the margins.
    f32x4 mixed = {};
    for (int k = 0; k < count / 2; k++) {
        f32x8 pair = __builtin_convertvector(load_two(neighbors, 0, 2 * k), f32x8) * places->y_weights[0][i];
        for (int j = 1; j < count; j++) {
            pair = pair + __builtin_convertvector(load_two(neighbors, j, 2 * k), f32x8) * places->y_weights[j][i];
        }
        f32x4 left = __builtin_shufflevector(pair, pair, 0, 1, 2, 3);
        f32x4 right = __builtin_shufflevector(pair, pair, 3, 4, 5, 6);
        mixed = k ? mixed + left * places->x_weights[2 * k][i] : left * places->x_weights[0][i];
        mixed = mixed + right * places->x_weights[2 * k + 1][i];
    }
    float margin = count == 2 ? MARGIN_OF_TWO : MARGIN_OF_FOUR;
    u8x4 low = __builtin_convertvector(round_floats(mixed - margin, count), u8x4);
    u8x4 high = __builtin_convertvector(round_floats(mixed + margin, count), u8x4);
    *pixel = (uint32_t)high;
    return (((uint32_t)low ^ (uint32_t)high) & 0xFFFFFF) == 0;
}

// Mix two values as in Pillow's BILINEAR, or four as in its BICUBIC, with the same order of operations. `distance` is
// the distance from the first of two values, or from the second of four.
static inline __attribute__((always_inline)) f64x4 interpolate(const f64x4 *values, double distance, int count) {
    f64x4 v1 = values[0], v2 = values[1];
    if (count == 2) return v1 + (v2 - v1) * distance;
    f64x4 v3 = values[2], v4 = values[3];
    f64x4 p2 = v3 - v1, p3 = (v1 - v2) + (v1 - v2) + v3 - v4, p4 = v2 - v1 - v3 + v4;
    return v2 + distance * (p2 + distance * (p3 + distance * p4));
}

// Whether all pixels to mix are equal. Their mixture is the same color, but mix_quickly reports it as uncertain.
static inline __attribute__((always_inline)) bool are_equal(Neighbors neighbors, int count) {
    uint64_t first = (uint64_t)load_two(neighbors, 0, 0), difference = (first ^ first >> 24) & 0xFFFFFF;
    for (int j = 0; j < count; j++) {
        for (int k = 0; k < count / 2; k++) difference |= ((uint64_t)load_two(neighbors, j, 2 * k) ^ first) << 16;
    }
    return difference == 0;
}

// Mix colors as Pillow does.
static inline __attribute__((always_inline)) uint32_t mix_exactly(Neighbors neighbors, double dx, double dy,
                                                                  int count) {
    f64x4 rows[4], values[4];
    for (int j = 0; j < count; j++) {
        for (int k = 0; k < count; k++) values[k] = __builtin_convertvector(load_one(neighbors, j, k), f64x4);
        rows[j] = interpolate(values, dx, count);
    }
    i32x4 color = __builtin_convertvector(interpolate(rows, dy, count), i32x4);
    color = __builtin_elementwise_min(__builtin_elementwise_max(color, (i32x4){}), (i32x4){} + 255);
    return (uint32_t)__builtin_convertvector(color, u8x4);
}

// Write a pixel, and perhaps a byte of the next pixel, so pixels must be written in order.
static inline void store_pixel(uint32_t pixel, uint8_t *out, const uint8_t *stop) {
    if (stop - out >= 4)
        memcpy(out, &pixel, 4);
    else
        memcpy(out, &pixel, 3);
}

// Make some pixels by mixing `count` columns and rows.
static inline __attribute__((always_inline)) void mix(const Job *job, const Places *places, int64_t num_pixels,
                                                      int count, uint8_t *out) {
    uint8_t patch[4 * PATCH_STRIDE] = {};
    for (int i = 0; i < num_pixels; i++) {
        uint32_t pixel = job->fill;
        if (places->kind[i] != OUTSIDE) {
            Neighbors neighbors = list_neighbors(job, places, i, count, patch);
            if (!mix_quickly(neighbors, places, i, count, &pixel)) {
                pixel = are_equal(neighbors, count) ? (uint32_t)load_one(neighbors, 0, 0)
                                                    : mix_exactly(neighbors, places->x[i], places->y[i], count);
            }
        }
        store_pixel(pixel, out + 3 * i, job->stop);
    }
}

static void copy_nearest(const Job *job, const Places *places, int64_t num_pixels, uint8_t *out) {
    for (int i = 0; i < num_pixels; i++) {
        uint32_t pixel = job->fill;
        if (places->kind[i] != OUTSIDE) {
            pixel = LOAD(uint32_t, job->before + 3 * (places->row[i] * job->width + places->column[i]));
        }
        store_pixel(pixel, out + 3 * i, job->stop);
    }
}

void warp(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, const double *numbers,
          bool is_perspective) {
    uint32_t fill = 0;
    for (int c = 0; c < 3; c++) fill |= (uint32_t)(uint8_t)as_integer(numbers[6 + c]) << 8 * c;
    Job job = {before, pixels + 3 * height * width, height, width, fill};
    for (int64_t y = 0; y < height; y++) {
        for (int64_t start = 0; start < width; start += LENGTH) {
            Places places;
            int64_t num_pixels = min(LENGTH, width - start);
            uint8_t *out = pixels + 3 * (y * width + start);
            find_places(numbers, is_perspective, y, start, &places);
            if (numbers[9] == NEAREST) {
                find_neighbors(height, width, 0, 0, 0, &places);
                copy_nearest(&job, &places, num_pixels, out);
            } else if (numbers[9] == BILINEAR) {
                find_neighbors(height, width, 0.5, 0, 1, &places);
                weigh_linearly(places.x, places.x_weights);
                weigh_linearly(places.y, places.y_weights);
                mix(&job, &places, num_pixels, 2, out);
            } else {
                find_neighbors(height, width, 0.5, 1, 2, &places);
                weigh_cubically(places.x, places.x_weights);
                weigh_cubically(places.y, places.y_weights);
                mix(&job, &places, num_pixels, 4, out);
            }
        }
    }
}
