// Convert an image to (value / 255 - mean) / deviation, one plane for each color, rounded to 32 bits after each step,
// as torchvision does.
//
// Processors divide slowly. If they multiply and add with one rounding, a product with the reciprocal, given as the sum
// of two numbers, is rounded like the quotient, unless the quotient is very close to halfway between two 32-bit
// numbers. So products are used if they are right for all 256 values.

#include "kernel.h"
#include "vectors.h"

#if defined(__FMA__) || defined(__aarch64__)
enum { MULTIPLIES_AND_ADDS = 1 };
#else
enum { MULTIPLIES_AND_ADDS = 0 };
#endif

enum { LENGTH = 32 };  // The number of pixels that are converted together.

typedef struct {
    float mean, deviation;
    float reciprocal, rest;  // The sum of these two numbers is 1 / deviation.
    bool is_divided;
} Scale;

static inline float center(uint8_t value, const Scale *scale) {
    return (float)value * (float)(1 / 255.0) - scale->mean;
}

static inline __attribute__((always_inline)) float multiply(float number, const Scale *scale) {
    return __builtin_fmaf(number, scale->reciprocal, number * scale->rest);
}

// The scale of a color. Whether to divide is decided by comparing bits, so that -0 differs from 0.
static Scale make_scale(float mean, float deviation) {
    double reciprocal = 1 / (double)deviation;
    float rounded = (float)reciprocal, rest = (float)(reciprocal - (double)rounded);
    Scale scale = {mean, deviation, rounded, rest, !MULTIPLIES_AND_ADDS};
    float quotients[256], products[256];
    for (int value = 0; value < 256; value++) {
        float number = center((uint8_t)value, &scale);
        quotients[value] = number / deviation;
        products[value] = MULTIPLIES_AND_ADDS ? multiply(number, &scale) : quotients[value];
    }
    scale.is_divided |= memcmp(quotients, products, sizeof quotients) != 0;
    return scale;
}

static inline __attribute__((always_inline)) void convert(u8x32 bytes, const Scale *scale, float *out) {
    uint8_t values[LENGTH];
    STORE(values, bytes);
    if (MULTIPLIES_AND_ADDS && !scale->is_divided) {
        for (int i = 0; i < LENGTH; i++) out[i] = multiply(center(values[i], scale), scale);
    } else {
        for (int i = 0; i < LENGTH; i++) out[i] = center(values[i], scale) / scale->deviation;
    }
}

void shardio_normalize_image(const Normalization *call) {
    int64_t num_pixels = call->num_pixels, whole = num_pixels / LENGTH * LENGTH;
    Scale scales[3];
    for (int c = 0; c < 3; c++) scales[c] = make_scale(call->means[c], call->deviations[c]);
    u8x32 colors[3];
    for (int64_t i = 0; i < whole; i += LENGTH) {
        split_colors(call->pixels + 3 * i, colors);
        for (int c = 0; c < 3; c++) convert(colors[c], &scales[c], call->result + c * num_pixels + i);
    }
    if (whole == num_pixels) return;
    uint8_t rest[3 * LENGTH] = {0};
    float converted[LENGTH];
    memcpy(rest, call->pixels + 3 * whole, (size_t)(3 * (num_pixels - whole)));
    split_colors(rest, colors);
    for (int c = 0; c < 3; c++) {
        convert(colors[c], &scales[c], converted);
        memcpy(call->result + c * num_pixels + whole, converted, (size_t)(num_pixels - whole) * sizeof(float));
    }
}
