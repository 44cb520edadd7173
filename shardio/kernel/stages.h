// The stages in which a device decodes a batch of tiled images: each function here is the work of one thread.
//
//   make_lookup      one number in a lookup table of Huffman codes
//   find_weights     the weights of a row or a column of a crop
//   decode_tile      bits become coefficients (F.2.2)
//   transform_block  coefficients become samples (A.3.3)
//   make_color       samples become the color of a pixel
//   render_pixel     colors become a pixel of a crop
//
// A stage begins when the one before it is complete. Within a stage, no thread reads what another one writes. Every
// image gets as many threads as the image that needs the most; surplus threads return at once.
//
// The integer arithmetic is the same as in the code for CPUs, so the pixels are equal: entropy.c, idct.c, color.c,
// resize.c and antialias.c explain it. stages.cu runs the stages on a GPU, and stages.c runs them on a CPU, one
// thread after the other.
//
// Why no read or write is out of bounds: tiles.c has made the records, and the arrays have the sizes that the records
// give. decode_tile() compares a tile's place with the chunk and the image. It ends when a code goes beyond the tile's
// data, and reads at most CHUNK_PADDING bytes after it. Indices of coefficients are checked before they are used.

#ifndef SHARDIO_STAGES_H
#define SHARDIO_STAGES_H

#include "codes.h"
#include "tiles.h"
#include "weights.h"

#ifndef __CUDACC__  // CUDA has these functions.
#include <string.h>
#endif

enum { NUM_LOOKUPS = MAX_TILED_TABLES << LOOKUP_BITS };

// The index in zigzag order of each coefficient, row by row (figure A.6).
static const uint8_t ZIGZAG_INDICES[64] = {0,  1,  5,  6,  14, 15, 27, 28, 2,  4,  7,  13, 16, 26, 29, 42,
                                           3,  8,  12, 17, 25, 30, 41, 43, 9,  11, 18, 24, 31, 40, 44, 53,
                                           10, 19, 23, 32, 39, 45, 52, 54, 20, 22, 33, 38, 46, 51, 55, 60,
                                           21, 34, 37, 47, 50, 56, 59, 61, 35, 36, 48, 49, 57, 58, 62, 63};

static inline int clamp(int number, int low, int high) { return number < low ? low : number > high ? high : number; }

static inline const TiledImage *find_image(const Location *location) {
    return (const TiledImage *)location->chunk + location->index;
}

static inline const TiledCrop *find_crops(const Location *location) {
    return (const TiledCrop *)(location->chunk + find_image(location)->crops);
}

// Find the code at the beginning of 16 bits, as find_symbol does. Return its length << 8 | its symbol, or 0 if there is
// no such code, or if no baseline image has its symbol.
static inline int find_code(const StoredTable *table, bool is_dc, int ahead) {
    int code = 0, index = 0;
    for (int length = 1; length <= MAX_CODE_LENGTH; length++) {
        int count = table->lengths[length - 1], found = (ahead >> (MAX_CODE_LENGTH - length)) - code;
        if (found < count) {
            int symbol = table->symbols[index + found];
            return read_symbol(symbol, is_dc).is_known ? length << 8 | symbol : 0;
        }
        index += count;
        code = (code + count) << 1;
    }
    return 0;
}

static inline void make_lookup(const Batch *batch, int64_t i, int64_t thread) {
    const TiledImage *image = find_image(&batch->locations[i]);
    if (!image->is_tiled || thread >= NUM_LOOKUPS) return;
    int table = (int)(thread >> LOOKUP_BITS), ahead = (int)(thread & ((1 << LOOKUP_BITS) - 1));
    int code = find_code(&image->tables[table], image->is_dc[table], ahead << (MAX_CODE_LENGTH - LOOKUP_BITS));
    batch->lookups[i * NUM_LOOKUPS + thread] = (uint16_t)(code >> 8 <= LOOKUP_BITS ? code : 0);
}

// Write the first pixel that is summed for a new pixel, and the weights, to `out`.
static inline void write_weights(int64_t num_before, int64_t num_after, int64_t i, int64_t num_taps, int resampling,
                                 bool is_column, int64_t *out) {
    if (resampling == OPENCV_BILINEAR) {
        Mix mix = find_mix(num_before, num_after, i, is_column);
        out[0] = mix.first;
        out[1] = mix.weights[0];
        out[2] = mix.weights[1];
    } else {
        out[0] = find_taps(num_before, num_after, i, resampling, num_taps, (Tap *)(out + 1));
    }
}

static inline void find_weights(const Batch *batch, int64_t i, int64_t thread) {
    const Location *location = &batch->locations[i];
    if (!find_image(location)->is_tiled) return;
    for (int64_t j = 0; j < batch->num_crops; j++) {
        const TiledCrop *crop = find_crops(location) + j;
        const Plan *plan = &crop->plan;
        if (thread < crop->height + crop->width) {
            if (!crop->taps_down) return;
            int64_t *weights = batch->weights + location->weight + crop->weights;
            if (thread < crop->height) {
                int64_t row = plan->window_top + thread;
                if (row >= 0 && row < plan->new_height)
                    write_weights(plan->height, plan->new_height, row, crop->taps_down, plan->resampling, false,
                                  weights + thread * (1 + crop->taps_down));
                return;
            }
            int64_t in_window = thread - crop->height, column = plan->window_left + in_window;
            if (column >= 0 && column < plan->new_width)
                write_weights(plan->width, plan->new_width, column, crop->taps_across, plan->resampling, true,
                              weights + crop->height * (1 + crop->taps_down) + in_window * (1 + crop->taps_across));
            return;
        }
        thread -= crop->height + crop->width;
    }
}

// -------------------------------------------------------------------------------------------------------- Decoding

static inline uint32_t swap_bytes(uint32_t word) {
#ifdef __CUDACC__
    return __byte_perm(word, 0, 0x0123);
#else
    return __builtin_bswap32(word);
#endif
}

// The next 32 bits.
static inline uint32_t look_at(const uint8_t *chunk, int64_t bit) {
    const uint32_t *words = (const uint32_t *)chunk + (bit >> 5);
    uint64_t both = (uint64_t)swap_bytes(words[0]) << 32 | swap_bytes(words[1]);
    return (uint32_t)(both >> (32 - (bit & 31)));
}

// Decode a tile. Return whether it is intact.
static inline bool decode_codes(const Batch *batch, int64_t i, const TiledImage *image, const Tile *tile) {
    // The compiler cannot know that storing coefficients leaves these values unchanged.
    const Location *location = &batch->locations[i];
    const uint8_t *chunk = location->chunk;
    const uint16_t *lookups = batch->lookups + i * NUM_LOOKUPS;
    int16_t *coefficients = batch->coefficients;
    int num_blocks = image->num_blocks, num_columns = image->num_columns;
    int64_t bit = 8 * tile->offset, stop = bit + 8 * tile->length;
    int column = tile->column - image->first_column;
    int64_t first_mcu = (int64_t)(tile->row - image->first_row) * num_columns + column;
    int64_t out = 64 * (location->block + first_mcu * num_blocks);
    int num_luma = num_blocks - image->num_components + 1;  // The number of blocks of the first component in an MCU.
    int block = 0, k = 0, left = image->interval;
    int dc[MAX_COMPONENTS] = {0, 0, 0};
    for (;;) {
        int component = block < num_luma ? 0 : block - num_luma + 1;
        int table = k ? image->ac_table[component] : image->dc_table[component];
        uint32_t word = look_at(chunk, bit);
        int code = lookups[table << LOOKUP_BITS | word >> (32 - LOOKUP_BITS)];
        if (!code) code = find_code(&image->tables[table], !k, (int)(word >> 16));
        int length = code >> 8, symbol = code & 255, size = symbol & 15, value = 0;
        if (!code) return false;
        if (size) {
            value = (int)(word << length >> (32 - size));
            if (value < 1 << (size - 1)) value -= (1 << size) - 1;  // Figure F.12.
        }
        bit += length + size;
        if (bit > stop) return false;
        bool is_needed = column >= 0 && column < num_columns;
        if (k == 0) {
            dc[component] += value;  // F.1.1.5.1
            if (dc[component] < -MAX_DC || dc[component] > MAX_DC) return false;
            if (is_needed) coefficients[out] = (int16_t)dc[component];
            k = 1;
        } else if (symbol == 0) {
            k = 64;
        } else {
            k += symbol >> 4;
            if (k > 63) return false;
            if (is_needed) coefficients[out + k] = (int16_t)value;
            k++;
        }
        if (k < 64) continue;
        k = 0;
        out += 64;
        if (++block < num_blocks) continue;
        block = 0;
        column++;
        if (--left == 0) return (bit + 7) >> 3 == stop >> 3;
    }
}

static inline void decode_tile(const Batch *batch, int64_t i, int64_t thread) {
    const Location *location = &batch->locations[i];
    const TiledImage *image = find_image(location);
    if (!image->is_tiled || thread >= image->num_tiles) return;
    const Tile *tile = (const Tile *)(location->chunk + image->tiles) + thread;
    int row = tile->row - image->first_row;
    bool is_inside = tile->offset >= 0 && tile->length >= 0 && row >= 0 && row < image->num_rows &&
                     tile->length <= location->num_bytes - CHUNK_PADDING - tile->offset;
    if (!is_inside || !decode_codes(batch, i, image, tile)) batch->is_damaged[i] = 1;
}

// -------------------------------------------------------------------------------------------------------- Samples

// A component of an image on the device.
typedef struct {
    uint8_t *samples;             // The first sample of the first needed MCU.
    int stride;                   // The number of samples from one row to the next.
    int first_row, first_column;  // The position of the first sample in the picture.
    int num_rows, num_columns;    // The size of the whole picture, in samples.
} Channel;

// Divide a number by a sampling factor: 1, 2 or 4. Division is slow on a GPU.
static inline int divide(int number, int factor) { return number >> (factor >> 1); }

static inline Channel find_channel(const Batch *batch, const Location *location, const TiledImage *image,
                                   int component) {
    int across = component ? 1 : image->across, down = component ? 1 : image->down;
    int64_t size = 64 * (int64_t)image->num_rows * image->num_columns, luma = size * image->across * image->down;
    Channel channel;
    channel.samples = batch->samples + location->sample + (component ? luma + (component - 1) * size : 0);
    channel.stride = 8 * across * image->num_columns;
    channel.first_row = 8 * down * image->first_row;
    channel.first_column = 8 * across * image->first_column;
    channel.num_rows = component ? divide(image->height + image->down - 1, image->down) : image->height;
    channel.num_columns = component ? divide(image->width + image->across - 1, image->across) : image->width;
    return channel;
}

// Eight coefficients, which are loaded together.
typedef struct {
    uint32_t words[4];
} __attribute__((aligned(16))) Eight;

// Transform eight values that are `step` apart: see transform() in idct.c.
static inline void transform_eight(int *numbers, int step, int shift, int added) {
    int r0 = numbers[0], r1 = numbers[step], r2 = numbers[2 * step], r3 = numbers[3 * step];
    int r4 = numbers[4 * step], r5 = numbers[5 * step], r6 = numbers[6 * step], r7 = numbers[7 * step];
    int even0 = (r0 + r4) * (1 << 13) + added, even1 = (r0 - r4) * (1 << 13) + added;
    int even2 = r2 * 4433 + r6 * (4433 - 15137), even3 = r2 * (4433 + 6270) + r6 * 4433;
    int z3 = r7 + r3, z4 = r5 + r1;
    int w3 = z3 * (9633 - 16069) + z4 * 9633, w4 = z3 * 9633 + z4 * (9633 - 3196);
    int odd0 = r7 * (2446 - 7373) + r1 * -7373 + w3, odd1 = r5 * (16819 - 20995) + r3 * -20995 + w4;
    int odd2 = r5 * -20995 + r3 * (25172 - 20995) + w3, odd3 = r7 * -7373 + r1 * (12299 - 7373) + w4;
    int t10 = even0 + even3, t13 = even0 - even3, t11 = even1 + even2, t12 = even1 - even2;
    numbers[0] = (t10 + odd3) >> shift;
    numbers[step] = (t11 + odd2) >> shift;
    numbers[2 * step] = (t12 + odd1) >> shift;
    numbers[3 * step] = (t13 + odd0) >> shift;
    numbers[4 * step] = (t13 - odd0) >> shift;
    numbers[5 * step] = (t12 - odd1) >> shift;
    numbers[6 * step] = (t11 - odd2) >> shift;
    numbers[7 * step] = (t10 - odd3) >> shift;
}

static inline void transform_block(const Batch *batch, int64_t i, int64_t thread) {
    const Location *location = &batch->locations[i];
    const TiledImage *image = find_image(location);
    if (!image->is_tiled || thread >= (int64_t)image->num_blocks * image->num_rows * image->num_columns) return;
    int block = (int)(thread % image->num_blocks), mcu = (int)(thread / image->num_blocks);
    int num_luma = image->num_blocks - image->num_components + 1;
    int component = block < num_luma ? 0 : block - num_luma + 1;
    const Eight *eights = (const Eight *)(batch->coefficients + 64 * (location->block + thread));
    const uint16_t *quantizers = image->quantizers[component];
    int coefficients[64], numbers[64];
    for (int j = 0; j < 8; j++) {
        Eight eight = eights[j];
        for (int k = 0; k < 8; k++) coefficients[8 * j + k] = (int16_t)(eight.words[k / 2] >> 16 * (k % 2));
    }
    bool is_good = true;
    for (int k = 0; k < 64; k++) {
        int at = ZIGZAG_INDICES[k], number = coefficients[at] * quantizers[at];
        is_good &= number > -HALF_RANGE && number < HALF_RANGE;
        numbers[k] = number;
    }
    if (is_good) {
        for (int column = 0; column < 8; column++) transform_eight(numbers + column, 8, 11, 1 << 10);
        for (int k = 0; k < 64; k++) is_good &= numbers[k] >= -HALF_RANGE && numbers[k] < HALF_RANGE;
    }
    if (!is_good) {
        batch->is_damaged[i] = 1;
        return;
    }
    Channel channel = find_channel(batch, location, image, component);
    int across = component ? 1 : image->across, down = component ? 1 : image->down, part = component ? 0 : block;
    int y = 8 * (mcu / image->num_columns * down + part / across);
    int x = 8 * (mcu % image->num_columns * across + part % across);
    for (int row = 0; row < 8; row++) {
        transform_eight(numbers + 8 * row, 1, 18, (128 << 18) + (1 << 17));
        uint64_t eight = 0;
        for (int j = 0; j < 8; j++) eight |= (uint64_t)clamp(numbers[8 * row + j], 0, 255) << 8 * j;
        *(uint64_t *)(channel.samples + (int64_t)(y + row) * channel.stride + x) = eight;
    }
}

// --------------------------------------------------------------------------------------------------------- Colors

// A sample of a component. Beyond the border, samples equal those at the border.
static inline int get_sample(const Channel *channel, int row, int column) {
    row = clamp(row, 0, channel->num_rows - 1) - channel->first_row;
    column = clamp(column, 0, channel->num_columns - 1) - channel->first_column;
    return channel->samples[(int64_t)row * channel->stride + column];
}

// Interpolate a component with fewer samples than the picture has pixels: see upsample() in color.c.
static inline int get_upsampled(const Channel *channel, int across, int down, int row, int column) {
    int near = divide(row, down), here = divide(column, across);
    int far = clamp(near + (row % 2 ? 1 : -1), 0, channel->num_rows - 1);
    if (across == 1 && down == 2)
        return (3 * get_sample(channel, near, here) + get_sample(channel, far, here) + (row % 2 ? 2 : 1)) >> 2;
    if (across != 2 || down > 2 || channel->num_columns <= 2) return get_sample(channel, near, here);
    int beside = here + (column % 2 ? 1 : -1);
    int mixed = get_sample(channel, near, here), mixed_beside = get_sample(channel, near, beside);
    if (down == 2) {
        mixed = 3 * mixed + get_sample(channel, far, here);
        mixed_beside = 3 * mixed_beside + get_sample(channel, far, beside);
        return (3 * mixed + mixed_beside + (column % 2 ? 7 : 8)) >> 4;
    }
    return (3 * mixed + mixed_beside + (column % 2 ? 2 : 1)) >> 2;
}

// A color as one number: red in the lowest byte, then green and blue.
static inline uint32_t join_bytes(int red, int green, int blue) {
    return (uint32_t)(clamp(red, 0, 255) | clamp(green, 0, 255) << 8 | clamp(blue, 0, 255) << 16);
}

static inline uint32_t convert_color(int luma, int cb, int cr) {  // See convert() in color.c.
    const int half = 1 << 15;
    cb -= 128;
    cr -= 128;
    return join_bytes(luma + cr + ((cr * (91881 - (1 << 16)) + half) >> 16),
                      luma - cr + ((cb * -22554 + cr * ((1 << 16) - 46802) + half) >> 16),
                      luma + 2 * cb + ((cb * (116130 - (2 << 16)) + half) >> 16));
}

static inline void make_color(const Batch *batch, int64_t i, int64_t thread) {
    const Location *location = &batch->locations[i];
    const TiledImage *image = find_image(location);
    if (!image->is_tiled || thread >= image->upright.height * image->upright.width) return;
    uint32_t pixel = (uint32_t)thread, width = (uint32_t)image->upright.width;
    int row = (int)(image->upright.top + pixel / width), column = (int)(image->upright.left + pixel % width);
    if (image->turn & TRANSPOSED) {
        int other = row;
        row = column;
        column = other;
    }
    if (image->turn & UPSIDE_DOWN) row = image->height - 1 - row;
    if (image->turn & MIRRORED) column = image->width - 1 - column;
    int values[MAX_COMPONENTS];
    for (int c = 0; c < MAX_COMPONENTS; c++) {
        Channel channel = find_channel(batch, location, image, c < image->num_components ? c : 0);
        values[c] = c && c < image->num_components ? get_upsampled(&channel, image->across, image->down, row, column)
                                                   : get_sample(&channel, row, column);
    }
    batch->colors[location->color + thread] = image->color == YCC ? convert_color(values[0], values[1], values[2])
                                                                  : join_bytes(values[0], values[1], values[2]);
}

// --------------------------------------------------------------------------------------------------------- Pixels

// The colors of the part of the picture that a plan resizes.
typedef struct {
    const uint32_t *colors;
    int64_t first, stride;  // The index of the part's first pixel, which may not be needed, and the step between rows.
} Part;

static inline Part find_part(const Batch *batch, const Location *location, const Plan *plan) {
    const Box *box = &find_image(location)->upright;
    int64_t first = location->color + (plan->top - box->top) * box->width + plan->left - box->left;
    Part part = {batch->colors, first, box->width};
    return part;
}

static inline uint32_t get_color(const Part *part, int64_t row, int64_t column) {
    return part->colors[part->first + row * part->stride + column];
}

static inline int get_byte(uint32_t color, int c) { return (int)(color >> 8 * c & 255); }

// See resize_row() and mix_rows() in resize.c.
static inline uint32_t mix_colors(const Part *part, int64_t height, const int64_t *down, const int64_t *across) {
    int64_t other_column = across[2] ? across[0] + 1 : across[0];  // A pixel with zero weight may be outside the array.
    int mixed[3] = {0, 0, 0};
    for (int j = 0; j < 2; j++) {
        int64_t row = down[0] + j;
        row = row < 0 ? 0 : row < height ? row : height - 1;
        uint32_t left = get_color(part, row, across[0]);
        uint32_t right = get_color(part, row, other_column);
        for (int c = 0; c < 3; c++) {
            int resized = (get_byte(left, c) * (int)across[1] + get_byte(right, c) * (int)across[2]) >> 4;
            mixed[c] += (resized * (int)down[1 + j]) >> 16;
        }
    }
    return join_bytes((mixed[0] + 2) >> 2, (mixed[1] + 2) >> 2, (mixed[2] + 2) >> 2);
}

// See resize_columns() and sum_rows() in antialias.c.
static inline uint32_t sum_colors(const Part *part, const TiledCrop *crop, const int64_t *down, const int64_t *across) {
    int64_t taps_across = crop->taps_across;
    const int half = 1 << (WEIGHT_BITS - 1);
    int sums[3] = {half, half, half};
    for (int64_t j = 0; j < crop->taps_down; j++) {
        if (!down[1 + j]) continue;  // A pixel with zero weight may be outside the array.
        int in_row[3] = {half, half, half};
        for (int64_t k = 0; k < taps_across; k++) {
            if (!across[1 + k]) continue;
            uint32_t color = get_color(part, down[0] + j, across[0] + k);
            for (int c = 0; c < 3; c++) in_row[c] += get_byte(color, c) * (int)across[1 + k];
        }
        for (int c = 0; c < 3; c++) sums[c] += clamp(in_row[c] >> WEIGHT_BITS, 0, 255) * (int)down[1 + j];
    }
    return join_bytes(sums[0] >> WEIGHT_BITS, sums[1] >> WEIGHT_BITS, sums[2] >> WEIGHT_BITS);
}

// The color of a pixel of a crop. Pixels beyond the resized part are black.
static inline uint32_t resample(const Batch *batch, const Location *location, const TiledCrop *crop, int64_t row,
                                int64_t column) {
    const Plan *plan = &crop->plan;
    if (plan->is_flipped) column = crop->width - 1 - column;
    int64_t new_row = plan->window_top + row, new_column = plan->window_left + column;
    if (new_row < 0 || new_row >= plan->new_height || new_column < 0 || new_column >= plan->new_width) return 0;
    Part part = find_part(batch, location, plan);
    if (!crop->taps_down) return get_color(&part, new_row, new_column);
    const int64_t *down = batch->weights + location->weight + crop->weights + row * (1 + crop->taps_down);
    const int64_t *across = batch->weights + location->weight + crop->weights + crop->height * (1 + crop->taps_down) +
                            column * (1 + crop->taps_across);
    if (plan->resampling == OPENCV_BILINEAR) return mix_colors(&part, plan->height, down, across);
    return sum_colors(&part, crop, down, across);
}

static inline uint16_t round_to_half(float number) {
    uint16_t bits;
#ifdef __CUDACC__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#else
    _Float16 half = (_Float16)number;
    memcpy(&bits, &half, sizeof bits);
#endif
    return bits;
}

static inline uint16_t round_to_bfloat(float number) {  // No color is infinite.
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline void store(const Target *target, int64_t at, int c, int byte) {
    if (target->dtype == UINT8) {
        ((uint8_t *)target->pixels)[at] = (uint8_t)byte;
        return;
    }
    float number = fmaf((float)byte, target->scale[c], target->shift[c]);
    if (target->dtype == FLOAT32)
        ((float *)target->pixels)[at] = number;
    else
        ((uint16_t *)target->pixels)[at] = target->dtype == FLOAT16 ? round_to_half(number) : round_to_bfloat(number);
}

static inline void render_pixel(const Batch *batch, int64_t i, int64_t j, int64_t thread) {
    const Location *location = &batch->locations[i];
    const TiledImage *image = find_image(location);
    const Target *target = &batch->targets[j];
    if (thread >= target->height * target->width) return;
    uint32_t pixel = (uint32_t)thread, width = (uint32_t)target->width;
    int64_t row = pixel / width, column = pixel % width;
    uint32_t color;
    if (image->is_tiled) {
        color = resample(batch, location, find_crops(location) + j, row, column);
    } else {
        const uint8_t *pixels = location->chunk + image->pixels;
        for (int64_t before = 0; before < j; before++)
            pixels += 3 * batch->targets[before].height * batch->targets[before].width;
        pixels += 3 * thread;
        color = join_bytes(pixels[0], pixels[1], pixels[2]);
    }
    int64_t at = i * target->image_stride + row * target->row_stride + column * target->column_stride;
    for (int c = 0; c < 3; c++) store(target, at + c * target->color_stride, c, get_byte(color, c));
}

#endif
