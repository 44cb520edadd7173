// Bilinear resizing with the same results as OpenCV's INTER_LINEAR (resize.cpp).
//
// OpenCV computes with integers, and weights have 11 bits. Rows are resized first and keep 7 more bits than a pixel
// has. Then two rows are mixed.

#include "resize.h"

void make_gather(const int32_t *sources, Gather *gather) {
    int32_t low = (int32_t)min(sources[0], sources[COLUMNS - 1]), high = (int32_t)max(sources[0], sources[COLUMNS - 1]);
    gather->is_near = high + 3 - low < 128;
    gather->is_grouped = true;
    for (int i = 0; i < COLUMNS; i++) {
        int32_t first = sources[i / GROUP * GROUP], last = sources[i / GROUP * GROUP + GROUP - 1];
        int32_t base = gather->is_near ? low : (int32_t)min(first, last);
        gather->is_grouped &= max(first, last) + 3 - base < 64;
        gather->bases[i / GROUP] = base;
        gather->sources[i] = sources[i];
        for (int j = 0; j < 2; j++) gather->indices[2 * i + j] = (uint8_t)(sources[i] - base + j);
        for (int j = 0; j < 4; j++) gather->fours[4 * i + j] = (uint8_t)(sources[i] - base + j);
    }
}

// The bytes that are mixed into 32 columns of the result, and their weights.
typedef struct {
    Gather gather;
    int16_t weights[2][32];  // See find_weight.
} Columns;

static void make_columns(const Window *window, int64_t first, Columns *columns) {
    int32_t sources[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) {
        int64_t column = window->first_column + min(first + i, window->num_columns - 1) * window->column_step;
        Mix mix = find_mix(window->plan->width, window->plan->new_width, column, true);
        sources[i] = (int32_t)mix.first;
        for (int j = 0; j < 2; j++) columns->weights[i / 16][find_weight(i % 16) + j] = (int16_t)mix.weights[j];
    }
    make_gather(sources, &columns->gather);
}

// Resize a row horizontally, to 15-bit values, for whole groups of columns.
static void resize_row(const uint8_t *row, const Columns *columns, int64_t num_groups, int16_t *out) {
    for (int64_t group = 0; group < num_groups; group++) {
        Twos twos = gather_twos(row, &columns[group].gather, 0);
        for (int i = 0; i < 2; i++) {
            const int16_t *weights = columns[group].weights[i];
            i32x8 low = sum_products(widen_low(twos.halves[i]), LOAD(i16x16, weights)) >> 4;
            i32x8 high = sum_products(widen_high(twos.halves[i]), LOAD(i16x16, weights + 16)) >> 4;
            STORE(out + COLUMNS * group + 16 * i, pack(low, high));
        }
    }
}

static inline u8x32 mix_rows(const int16_t *upper, const int16_t *lower, i16x16 upper_weight, i16x16 lower_weight) {
    i16x16 mixed[2];
    for (int i = 0; i < 2; i++) {
        i16x16 above = upper_products(LOAD(i16x16, upper + 16 * i), upper_weight);
        i16x16 below = upper_products(LOAD(i16x16, lower + 16 * i), lower_weight);
        mixed[i] = (above + below + 2) >> 2;
    }
    return (u8x32)__builtin_shufflevector((i64x4)pack_bytes(mixed[0], mixed[1]), (i64x4){}, 0, 2, 1, 3);
}

bool resize_bilinear(const Window *window, ReadRow read_row, const void *source, Workspace *work) {
    const Plan *plan = window->plan;
    int64_t num_groups = (window->num_columns + COLUMNS - 1) / COLUMNS, length = COLUMNS * num_groups;
    if (!reserve(&work->columns, (size_t)num_groups * sizeof(Columns))) return false;
    if (!reserve(&work->resized, (size_t)(2 * 3 * length) * sizeof(int16_t))) return false;
    Columns *columns = (Columns *)work->columns.bytes;
    for (int64_t group = 0; group < num_groups; group++) make_columns(window, COLUMNS * group, &columns[group]);
    int16_t *resized[2] = {(int16_t *)work->resized.bytes, (int16_t *)work->resized.bytes + 3 * length};
    int64_t kept[2] = {-1, -1};  // The rows that are already resized: one even row and one odd row.
    for (int64_t i = 0; i < window->num_rows; i++) {
        Mix mix = find_mix(plan->height, plan->new_height, window->first_row + i, false);
        int64_t rows[2] = {max(mix.first, 0), min(mix.first + 1, plan->height - 1)};
        for (int j = 0; j < 2; j++) {
            int place = rows[j] % 2;
            if (kept[place] == rows[j]) continue;
            Pixels pixels = read_row(source, rows[j], place);
            for (int c = 0; c < 3; c++) resize_row(pixels.colors[c], columns, num_groups, resized[place] + c * length);
            kept[place] = rows[j];
        }
        const int16_t *upper = resized[rows[0] % 2], *lower = resized[rows[1] % 2];
        i16x16 weights[2] = {(i16x16){} + (int16_t)mix.weights[0], (i16x16){} + (int16_t)mix.weights[1]};
        uint8_t *out = window->out + i * window->out_stride;
        for (int64_t at = 0; at < window->num_columns; at += COLUMNS) {
            u8x32 red = mix_rows(upper + at, lower + at, weights[0], weights[1]);
            u8x32 green = mix_rows(upper + length + at, lower + length + at, weights[0], weights[1]);
            u8x32 blue = mix_rows(upper + 2 * length + at, lower + 2 * length + at, weights[0], weights[1]);
            join_some_colors(red, green, blue, window->num_columns - at, out + 3 * at);
        }
    }
    return true;
}
