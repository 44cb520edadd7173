// Operations in which a pixel depends on other pixels. The results are the same as Pillow's.
//
// `before` is a copy of the image with four readable bytes after it: some pixels are copied as four bytes. fits()
// checks places in the copy: each place, or only the two ends of a line of places.

#include "edit.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

enum {
    CHUNK = BLOCK_LENGTH
};  // The number of bytes that are sharpened together, or of pixels that are copied together.

// Blend pixels with a smoothed image, as ImageEnhance.Sharpness does. Pixels at the border are kept unchanged. `factor`
// is the weight of the image. `pixels` also contains the image.
void sharpen(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, double factor) {
    if (height <= 2 || width <= 2) return;
    // Border pixels in this range are restored below.
    int64_t row = 3 * width, start = row + 3, stop = (height - 1) * row - 3;
    Blend blend;
    prepare_blend(factor, &blend);
    for (int64_t first = start; first < stop; first += CHUNK) {
        int64_t count = min(CHUNK, stop - first);
        const uint8_t *here = before + first, *above = here - row, *below = here + row;
        uint16_t sums[CHUNK + 6];
        _Alignas(64) uint8_t smooth[CHUNK], values[CHUNK];
        for (int64_t i = 0; i < count + 6; i++) sums[i] = (uint16_t)(above[i - 3] + here[i - 3] + below[i - 3]);
        // Pillow's sum with weights 1/13 and 5/13, rounded. 5042 / 2^16 is close enough to 1/13 for all such sums.
        for (int64_t i = 0; i < count; i++) {
            uint16_t total = (uint16_t)(sums[i] + sums[i + 3] + sums[i + 6] + 4 * here[i] + 6);
            smooth[i] = (uint8_t)((uint32_t)total * 5042 >> 16);
        }
        int64_t length = (count + 63) / 64 * 64;
        memset(smooth + count, 0, (size_t)(length - count));
        memset(values + count, 0, (size_t)(length - count));
        memcpy(values, here, (size_t)count);
        blend_bytes(values, smooth, length, &blend);
        memcpy(pixels + first, values, (size_t)count);
    }
    for (int64_t y = 1; y < height; y++) memcpy(pixels + y * row - 3, before + y * row - 3, 6);
}

// Fill pixels with a color: red, green and blue.
void fill_pixels(uint8_t *pixels, int64_t num_pixels, const double *color) {
    uint8_t red = (uint8_t)as_integer(color[0]), green = (uint8_t)as_integer(color[1]),
            blue = (uint8_t)as_integer(color[2]);
    if (red == green && green == blue) {
        memset(pixels, red, (size_t)(3 * num_pixels));
        return;
    }
    for (int64_t i = 0; i < num_pixels; i++) {
        pixels[3 * i] = red;
        pixels[3 * i + 1] = green;
        pixels[3 * i + 2] = blue;
    }
}

// Fill a part of an image with a color. The numbers are the part's top, left, height and width, and the color.
void erase(uint8_t *pixels, int64_t height, int64_t width, const double *numbers) {
    int64_t top = max(as_integer(numbers[0]), 0), left = max(as_integer(numbers[1]), 0);
    int64_t bottom = min(as_integer(numbers[0] + numbers[2]), height);
    int64_t right = min(as_integer(numbers[1] + numbers[3]), width);
    for (int64_t y = top; y < bottom && left < right; y++)
        fill_pixels(pixels + 3 * (y * width + left), right - left, numbers + 4);
}

// Flip an image upside down.
void flip_vertically(uint8_t *pixels, int64_t height, int64_t width) {
    for (int64_t y = 0; y < height / 2; y++) {
        uint8_t *upper = pixels + 3 * y * width, *lower = pixels + 3 * (height - 1 - y) * width, kept[CHUNK];
        for (int64_t i = 0; i < 3 * width; i += CHUNK) {
            size_t length = (size_t)min(CHUNK, 3 * width - i);
            memcpy(kept, upper + i, length);
            memcpy(upper + i, lower + i, length);
            memcpy(lower + i, kept, length);
        }
    }
}

// An image to transform: see transform_affinely.
typedef struct {
    const uint8_t *before;
    uint8_t *pixels;
    int64_t height, width;
    const double *numbers;
} Transform;

static inline bool fits(int64_t index, int64_t length) { return index >= 0 && index < length; }

// The index of the pixel at a coordinate, or -1 before the first pixel.
static inline int64_t find_pixel(double number) { return number < 0 ? -1 : as_integer(number); }

static inline void copy_pixel(const Transform *transform, int64_t source, int64_t to) {
    memcpy(transform->pixels + 3 * to, transform->before + 3 * source, 3);
}

static inline void copy_pixels(const Transform *transform, int64_t source, int64_t to, int64_t count) {
    memcpy(transform->pixels + 3 * to, transform->before + 3 * source, (size_t)(3 * count));
}

// The columns `start` to `stop` - 1 show the image. If `is_moved`, they show consecutive image columns from `first` on.
typedef struct {
    int64_t start, stop, first;
    bool is_moved;
} Columns;

static Columns find_columns(int64_t width, const double *numbers) {
    Columns columns = {width, 0, 0, true};
    double x_in = numbers[2] + numbers[0] * 0.5;
    for (int64_t x = 0; x < width; x++, x_in += numbers[0]) {
        int64_t column = find_pixel(x_in);
        if (!fits(column, width)) continue;
        if (columns.start == width) {
            columns.start = x;
            columns.first = column;
        }
        columns.is_moved &= column == columns.first + x - columns.start;
        columns.stop = x + 1;
    }
    return columns;
}

// Without rotation or shear, each output row shows pixels of a single input row (ImagingScaleAffine).
static void scale(const Transform *transform) {
    const double *numbers = transform->numbers;
    int64_t height = transform->height, width = transform->width;
    Columns columns = find_columns(width, numbers);
    double y_in = numbers[5] + numbers[4] * 0.5;
    for (int64_t y = 0; y < height; y++, y_in += numbers[4]) {
        int64_t row = find_pixel(y_in);
        if (!fits(row, height)) continue;
        if (columns.is_moved) {
            if (columns.start < columns.stop)
                copy_pixels(transform, row * width + columns.first, y * width + columns.start,
                            columns.stop - columns.start);
            continue;
        }
        double x_in = numbers[2] + numbers[0] * 0.5;
        for (int64_t x = 0; x < columns.stop; x++, x_in += numbers[0]) {
            int64_t column = find_pixel(x_in);
            if (fits(column, width)) copy_pixel(transform, row * width + column, y * width + x);
        }
    }
}

// A number as a fixed-point integer with 16 fractional bits.
static int64_t to_fixed(double number) { return as_integer(floor(number * 65536.0 + 0.5)); }

// Whether a place, in units of 1/2^16 pixel, is in the image.
static bool is_in_image(const Transform *transform, int64_t x_in, int64_t y_in) {
    return fits(x_in >> 16, transform->width) && fits(y_in >> 16, transform->height);
}

// Copy the pixels at places along a line, in units of 1/2^16 pixel. The line's ends, and therefore all places, are in
// the image.
static void copy_line(const Transform *transform, int64_t x_in, int64_t y_in, int64_t step_x, int64_t step_y,
                      int64_t to, int64_t count) {
    uint32_t sources[CHUNK], width = (uint32_t)transform->width;
    for (int64_t first = 0; first < count; first += CHUNK) {
        uint32_t x = (uint32_t)(x_in + first * step_x), y = (uint32_t)(y_in + first * step_y);
        int64_t length = min(CHUNK, count - first);
        for (uint32_t i = 0; i < (uint32_t)length; i++)
            sources[i] = 3 * (((y + i * (uint32_t)step_y) >> 16) * width + ((x + i * (uint32_t)step_x) >> 16));
        // Four bytes are copied together; the next pixel overwrites the fourth.
        uint8_t *out = transform->pixels + 3 * (to + first);
        for (int64_t i = 0; i < length - 1; i++) memcpy(out + 3 * i, transform->before + sources[i], 4);
        memcpy(out + 3 * (length - 1), transform->before + sources[length - 1], 3);
    }
}

// Pillow's method if the image's sides and all places are below 2^15 pixels (affine_fixed).
static void transform_by_integers(const Transform *transform) {
    const double *numbers = transform->numbers;
    int64_t height = transform->height, width = transform->width;
    int64_t step_x = to_fixed(numbers[0]), step_y = to_fixed(numbers[3]);
    int64_t x_in = to_fixed(numbers[2] + numbers[0] * 0.5 + numbers[1] * 0.5);
    int64_t y_in = to_fixed(numbers[5] + numbers[3] * 0.5 + numbers[4] * 0.5);
    for (int64_t y = 0; y < height; y++) {
        int64_t start = 0, stop = width;  // The columns that show the image are adjacent.
        while (start < stop && !is_in_image(transform, x_in + start * step_x, y_in + start * step_y)) start++;
        while (start < stop && !is_in_image(transform, x_in + (stop - 1) * step_x, y_in + (stop - 1) * step_y)) stop--;
        int64_t first_x = x_in + start * step_x, first_y = y_in + start * step_y, to = y * width + start;
        if (start < stop && step_x == 1 << 16 && step_y == 0)
            copy_pixels(transform, (first_y >> 16) * width + (first_x >> 16), to, stop - start);
        else
            copy_line(transform, first_x, first_y, step_x, step_y, to, stop - start);
        x_in += to_fixed(numbers[1]);
        y_in += to_fixed(numbers[4]);
    }
}

// Pillow's method for all other images and places (ImagingTransformAffine).
static void transform_by_floats(const Transform *transform) {
    const double *numbers = transform->numbers;
    int64_t height = transform->height, width = transform->width;
    double x_of_row = numbers[2] + numbers[1] * 0.5 + numbers[0] * 0.5;
    double y_of_row = numbers[5] + numbers[4] * 0.5 + numbers[3] * 0.5;
    for (int64_t y = 0; y < height; y++, x_of_row += numbers[1], y_of_row += numbers[4]) {
        double x_in = x_of_row, y_in = y_of_row;
        for (int64_t x = 0; x < width; x++, x_in += numbers[0], y_in += numbers[3]) {
            int64_t column = find_pixel(x_in), row = find_pixel(y_in);
            if (fits(column, width) && fits(row, height)) copy_pixel(transform, row * width + column, y * width + x);
        }
    }
}

static bool is_near(const double *numbers, int64_t x, int64_t y) {
    return fabs((double)x * numbers[0] + (double)y * numbers[1] + numbers[2]) < 32768 &&
           fabs((double)x * numbers[3] + (double)y * numbers[4] + numbers[5]) < 32768;
}

// Replace each pixel with the pixel at a transformed place, as Image.transform does without interpolation (Geometry.c).
// The numbers are the matrix, and the color of pixels outside the image. Pillow's result is certain only for sides
// below 2^15.
void transform_affinely(const uint8_t *before, uint8_t *pixels, int64_t height, int64_t width, const double *numbers) {
    Transform transform = {before, pixels, height, width, numbers};
    fill_pixels(pixels, height * width, numbers + 6);
    if (numbers[1] == 0 && numbers[3] == 0)
        scale(&transform);
    else if (is_near(numbers, 0, 0) && is_near(numbers, width, height) && is_near(numbers, 0, height) &&
             is_near(numbers, width, 0) && max(height, width) < 32768)
        transform_by_integers(&transform);
    else
        transform_by_floats(&transform);
}
