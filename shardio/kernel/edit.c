// Apply operations to images in place, one after the other.
//
// Adjacent operations that change each pixel independently are applied together, block by block. Operations in which
// a pixel depends on other pixels read a copy of the image. Unknown operations are ignored.

#include "edit.h"

#include <string.h>

// The parts of the scratch memory. Python's count_mixture_bytes and count_blur_bytes compute its size.
typedef struct {
    uint8_t *copy;   // A copy of the image, and at least four more bytes.
    float *mixture;  // A number for each byte of the image, if there is a mixture.
    float *blurring;
    uint8_t *original;  // The image before the mixture, at the end of the memory.
} Memory;

static Memory divide_scratch(const Edit *call, int64_t size, bool has_mixture) {
    int64_t start = (size + 4 + 63) / 64 * 64;
    float *floats = (float *)(void *)(call->scratch + start);  // The memory is aligned as malloc aligns it.
    uint8_t *original = call->scratch + call->scratch_length - size;
    return (Memory){call->scratch, floats, has_mixture ? floats + size : floats, original};
}

// Mixtures of an image and the outputs of chains of operations, as in AugMix: sums of 32-bit numbers.

static void begin_mixture(const uint8_t *pixels, int64_t size, float weight, const Memory *memory) {
    float *restrict mixture = memory->mixture;
    memcpy(memory->original, pixels, (size_t)size);
    for (int64_t i = 0; i < size; i++) mixture[i] = weight * (float)pixels[i];
}

// Add an image to the mixture, and restore the original image.
static void add_to_mixture(uint8_t *pixels, int64_t size, float weight, const Memory *memory) {
    float *restrict mixture = memory->mixture;
    for (int64_t i = 0; i < size; i++) mixture[i] += weight * (float)pixels[i];
    memcpy(pixels, memory->original, (size_t)size);
}

static void end_mixture(uint8_t *restrict pixels, int64_t size, const Memory *memory) {
    const float *mixture = memory->mixture;
    for (int64_t i = 0; i < size; i++) pixels[i] = as_byte(mixture[i]);
}

static void edit_with_neighbors(const Operation *operation, const Row *row, const Memory *memory) {
    const double *numbers = operation->numbers;
    int64_t height = row->height, width = row->width;
    uint8_t *before = memory->copy, *pixels = row->pixels;
    memcpy(before, pixels, (size_t)(3 * height * width));
    if (operation->code == SHARPNESS)
        sharpen(before, pixels, height, width, numbers[0]);
    else if (operation->code == GAUSSIAN_BLUR)
        blur(before, pixels, height, width, numbers, memory->blurring);
    else if (operation->code == AFFINE && (numbers[9] == NEAREST || moves_by_whole_pixels(numbers)))
        transform_affinely(before, pixels, height, width, numbers);
    else
        warp(before, pixels, height, width, numbers, operation->code == PERSPECTIVE);
}

static void edit_image(const Edit *call, const Row *row, const Operation *operations) {
    int64_t size = 3 * row->height * row->width, k = 0;
    bool has_mixture = false, is_mixing = false;
    for (int64_t i = 0; i < call->num_operations; i++) has_mixture |= operations[i].code == BEGIN_MIXTURE;
    Memory memory = divide_scratch(call, size, has_mixture);
    while (k < call->num_operations && size > 0) {
        if (is_pointwise(operations[k].code)) {
            k += edit_pixels(row->pixels, size / 3, operations + k, call->num_operations - k);
            continue;
        }
        const Operation *operation = &operations[k++];
        switch (operation->code) {
        case SHARPNESS:
        case AFFINE:
        case PERSPECTIVE:
        case GAUSSIAN_BLUR: edit_with_neighbors(operation, row, &memory); break;
        case ERASE: erase(row->pixels, row->height, row->width, operation->numbers); break;
        case VERTICAL_FLIP: flip_vertically(row->pixels, row->height, row->width); break;
        case BEGIN_MIXTURE:
            begin_mixture(row->pixels, size, (float)operation->numbers[0], &memory);
            is_mixing = true;
            break;
        case ADD_TO_MIXTURE:
            if (is_mixing) add_to_mixture(row->pixels, size, (float)operation->numbers[0], &memory);
            break;
        case END_MIXTURE:
            if (is_mixing) end_mixture(row->pixels, size, &memory);
            break;
        default: break;
        }
    }
}

void shardio_edit_images(const Edit *call) {
    for (int64_t i = 0; i < call->num_images; i++)
        edit_image(call, &call->rows[i], call->operations + i * call->num_operations);
}
