// Antialiased resizing that matches Pillow (Resample.c): each new pixel is a weighted sum of all nearby pixels.
//
// Pillow computes weights with floating-point numbers, rounds them to 22 bits, and sums with integers. Rows are resized
// first, and rounded to bytes. Weights are split into 15 low bits and the rest, so that both parts are 16-bit numbers,
// and pixels are summed in pairs.

#include "resize.h"

enum { LOW_BITS = 15 };

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
enum { TAPS = 4 };  // The number of pixels that are summed together.
#else
enum { TAPS = 2 };
#endif

// The number of parts of TAPS pixels that are summed for a new pixel from `start` to `stop` - 1.
static int64_t count_parts(int64_t num_before, int64_t num_after, int64_t start, int64_t stop, int resampling) {
    return (count_taps(num_before, num_after, start, stop, resampling) + TAPS - 1) / TAPS;
}

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

// Four bytes of each of 32 columns are multiplied by three signed bytes of each weight, most significant first.
typedef struct {
    int8_t digits[3][TAPS * COLUMNS];
} Weights;

// The weights of four rows.
typedef struct {
    int32_t digits[3];
} RowWeights;

static void split_weight(int32_t weight, int8_t digits[3]) {
    for (int i = 2; i >= 0; i--) {
        digits[i] = (int8_t)weight;
        weight = (weight - digits[i]) >> 8;
    }
}

static void set_weight(Weights *weights, int column, int tap, int32_t weight) {
    int8_t digits[3];
    split_weight(weight, digits);
    for (int i = 0; i < 3; i++) weights->digits[i][TAPS * column + tap] = digits[i];
}

static void set_row_weight(RowWeights *weights, int tap, int32_t weight) {
    int8_t digits[3];
    split_weight(weight, digits);
    for (int i = 0; i < 3; i++) memcpy((int8_t *)&weights->digits[i] + tap, &digits[i], 1);
}

// Resize 32 columns of a row.
static inline void resize_columns(const uint8_t *row, const Gather *gather, const Weights *weights, int64_t num_parts,
                                  uint8_t *out) {
    const __m512i half = _mm512_set1_epi32(1 << (WEIGHT_BITS - 1));
    __m512i sums[2][3] = {{{}, {}, half}, {{}, {}, half}};
    for (int64_t part = 0; part < num_parts; part++) {
        Fours fours = gather_fours(row, gather, TAPS * part);
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 3; j++)
                sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], fours.parts[i],
                                                 _mm512_loadu_si512(weights[part].digits[j] + 64 * i));
        }
    }
    for (int i = 0; i < 2; i++) {
        __m512i total = _mm512_add_epi32(_mm512_slli_epi32(sums[i][0], 16), _mm512_slli_epi32(sums[i][1], 8));
        total = _mm512_srai_epi32(_mm512_add_epi32(total, sums[i][2]), WEIGHT_BITS);
        total = _mm512_max_epi32(total, _mm512_setzero_si512());
        _mm_storeu_si128((__m128i *)(void *)(out + 16 * i), _mm512_cvtusepi32_epi8(total));
    }
}

// Sum 32 columns of resized rows. `rows` are the rows of each part.
static inline u8x32 sum_rows(const uint8_t *const *rows, const RowWeights *weights, int64_t num_parts, int64_t at) {
    __m256i sums[4][3], totals[4];
    for (int i = 0; i < 4; i++) {
        sums[i][0] = sums[i][1] = _mm256_setzero_si256();
        sums[i][2] = _mm256_set1_epi32(1 << (WEIGHT_BITS - 1));
    }
    for (int64_t part = 0; part < num_parts; part++) {
        u8x32 r[TAPS];
        for (int i = 0; i < TAPS; i++) r[i] = LOAD(u8x32, rows[TAPS * part + i] + at);
        i16x16 low01 = zip_bytes_low(r[0], r[1]), high01 = zip_bytes_high(r[0], r[1]);
        i16x16 low23 = zip_bytes_low(r[2], r[3]), high23 = zip_bytes_high(r[2], r[3]);
        i16x16 fours[4] = {zip_low(low01, low23), zip_high(low01, low23), zip_low(high01, high23),
                           zip_high(high01, high23)};
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 3; j++)
                sums[i][j] =
                    _mm256_dpbusd_epi32(sums[i][j], (__m256i)fours[i], _mm256_set1_epi32(weights[part].digits[j]));
        }
    }
    for (int i = 0; i < 4; i++) {
        __m256i total = _mm256_add_epi32(_mm256_slli_epi32(sums[i][0], 16), _mm256_slli_epi32(sums[i][1], 8));
        totals[i] = _mm256_srai_epi32(_mm256_add_epi32(total, sums[i][2]), WEIGHT_BITS);
    }
    return pack_bytes(pack((i32x8)totals[0], (i32x8)totals[1]), pack((i32x8)totals[2], (i32x8)totals[3]));
}

#else

// The upper and the lower parts of weights.
typedef struct {
    int16_t upper[2][32], lower[2][32];  // The weights of 32 columns: see find_weight.
} Weights;

// The weights of two rows.
typedef struct {
    int32_t upper, lower;
} RowWeights;

static void set_weight(Weights *weights, int column, int tap, int32_t weight) {
    int at = find_weight(column % 16) + tap;
    weights->upper[column / 16][at] = (int16_t)(weight >> LOW_BITS);
    weights->lower[column / 16][at] = (int16_t)(weight & ((1 << LOW_BITS) - 1));
}

static void set_row_weight(RowWeights *weights, int tap, int32_t weight) {
    int32_t upper = (weight >> LOW_BITS & 0xFFFF) << 16 * tap, lower = (weight & ((1 << LOW_BITS) - 1)) << 16 * tap;
    weights->upper = tap ? weights->upper | upper : upper;
    weights->lower = tap ? weights->lower | lower : lower;
}

// Sums of pairs of bytes for sixteen columns, one sum for each part of the weights.
typedef struct {
    i32x8 upper[2], lower[2];
} Sums;

static inline Sums start_sums(void) {
    i32x8 half = (i32x8){} + (1 << (WEIGHT_BITS - 1));
    return (Sums){{}, {half, half}};
}

// Add the products of pairs of bytes and their weights: [0] for the first half of each lane, and [1] for the second.
static inline __attribute__((always_inline)) void add_products(u8x32 twos, const i16x16 upper[2], const i16x16 lower[2],
                                                               Sums *sums) {
    i16x16 halves[2] = {widen_low(twos), widen_high(twos)};
    for (int i = 0; i < 2; i++) {
        sums->upper[i] += sum_products(halves[i], upper[i]);
        sums->lower[i] += sum_products(halves[i], lower[i]);
    }
}

static inline i16x16 finish_sums(const Sums *sums) {
    i32x8 totals[2];
    for (int i = 0; i < 2; i++) totals[i] = ((sums->upper[i] << LOW_BITS) + sums->lower[i]) >> WEIGHT_BITS;
    return pack(totals[0], totals[1]);
}

// Resize 32 columns of a row.
static inline void resize_columns(const uint8_t *row, const Gather *gather, const Weights *weights, int64_t num_parts,
                                  uint8_t *out) {
    Sums sums[2] = {start_sums(), start_sums()};
    for (int64_t part = 0; part < num_parts; part++) {
        const Weights *w = &weights[part];
        Twos twos = gather_twos(row, gather, TAPS * part);
        for (int i = 0; i < 2; i++) {
            i16x16 upper[2] = {LOAD(i16x16, w->upper[i]), LOAD(i16x16, w->upper[i] + 16)};
            i16x16 lower[2] = {LOAD(i16x16, w->lower[i]), LOAD(i16x16, w->lower[i] + 16)};
            add_products(twos.halves[i], upper, lower, &sums[i]);
        }
    }
    u8x32 bytes = pack_bytes(finish_sums(&sums[0]), finish_sums(&sums[1]));
    STORE(out, (u8x32)__builtin_shufflevector((i64x4)bytes, (i64x4){}, 0, 2, 1, 3));
}

// Sum 32 columns of resized rows. `rows` are the rows of each part.
static inline u8x32 sum_rows(const uint8_t *const *rows, const RowWeights *weights, int64_t num_parts, int64_t at) {
    Sums low = start_sums(), high = start_sums();
    for (int64_t part = 0; part < num_parts; part++) {
        u8x32 one = LOAD(u8x32, rows[2 * part] + at), other = LOAD(u8x32, rows[2 * part + 1] + at);
        i16x16 up = (i16x16)((i32x8){} + weights[part].upper), down = (i16x16)((i32x8){} + weights[part].lower);
        i16x16 upper[2] = {up, up}, lower[2] = {down, down};
        add_products((u8x32)zip_bytes_low(one, other), upper, lower, &low);
        add_products((u8x32)zip_bytes_high(one, other), upper, lower, &high);
    }
    return pack_bytes(finish_sums(&low), finish_sums(&high));
}

#endif

bool resize_antialiased(const Window *window, ReadRow read_row, const void *source, Workspace *work) {
    const Plan *plan = window->plan;
    int64_t num_groups = (window->num_columns + COLUMNS - 1) / COLUMNS, length = COLUMNS * num_groups;
    int64_t first_column = window->first_column - (window->column_step < 0 ? window->num_columns - 1 : 0);
    int64_t num_parts =
        count_parts(plan->width, plan->new_width, first_column, first_column + window->num_columns, plan->resampling);
    int64_t num_row_parts = count_parts(plan->height, plan->new_height, window->first_row,
                                        window->first_row + window->num_rows, plan->resampling);
    int64_t num_kept = TAPS * num_row_parts;
    size_t column_size = sizeof(Gather) + (size_t)num_parts * sizeof(Weights);
    if (!reserve(&work->columns, (size_t)num_groups * column_size)) return false;
    if (!reserve(&work->rows, (size_t)num_kept * sizeof(uint8_t *) + (size_t)num_row_parts * sizeof(RowWeights)))
        return false;
    if (!reserve(&work->resized, (size_t)(num_kept * 3 * length))) return false;
    if (!reserve(&work->taps, (size_t)max(TAPS * num_parts, num_kept) * sizeof(Tap))) return false;
    Tap *taps = (Tap *)work->taps.bytes;
    Gather *gathers = (Gather *)work->columns.bytes;
    Weights *weights = (Weights *)(gathers + num_groups);
    for (int64_t group = 0; group < num_groups; group++) {
        int32_t sources[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) {
            int64_t column =
                window->first_column + min(COLUMNS * group + i, window->num_columns - 1) * window->column_step;
            int64_t num_taps = TAPS * num_parts;
            int64_t first = find_taps(plan->width, plan->new_width, column, plan->resampling, num_taps, taps);
            // For the last columns, fewer pixels may be summed than for the others. The taps of these columns begin
            // earlier, with weights of 0, so that fewer than TAPS of the taps are after the part's last pixel.
            int64_t source = max(min(first, plan->width - num_taps), 0), num_before = first - source;
            sources[i] = (int32_t)source;
            for (int64_t tap = 0; tap < num_taps; tap++) {
                int64_t weight = tap < num_before ? 0 : taps[tap - num_before].weight;
                set_weight(&weights[group * num_parts + tap / TAPS], i, (int)(tap % TAPS), (int32_t)weight);
            }
        }
        make_gather(sources, &gathers[group]);
    }
    const uint8_t **rows = (const uint8_t **)work->rows.bytes;
    RowWeights *row_weights = (RowWeights *)(rows + num_kept);
    int64_t last_row = window->first_row + window->num_rows - 1;
    int64_t stop = find_reach(plan->height, plan->new_height, last_row, plan->resampling).stop;
    int64_t next_row = 0;
    for (int64_t i = 0; i < window->num_rows; i++) {
        int64_t first_row =
            find_taps(plan->height, plan->new_height, window->first_row + i, plan->resampling, num_kept, taps);
        next_row = max(next_row, first_row);
        for (; next_row < min(first_row + num_kept, stop); next_row++) {
            Pixels pixels = read_row(source, next_row, 0);
            uint8_t *resized = work->resized.bytes + next_row % num_kept * 3 * length;
            for (int64_t group = 0; group < num_groups; group++) {
                for (int c = 0; c < 3; c++)
                    resize_columns(pixels.colors[c], &gathers[group], weights + group * num_parts, num_parts,
                                   resized + c * length + COLUMNS * group);
            }
        }
        for (int64_t tap = 0; tap < num_kept; tap++) {  // Rows with a weight of 0 may have any content.
            rows[tap] = work->resized.bytes + (first_row + tap) % num_kept * 3 * length;
            set_row_weight(&row_weights[tap / TAPS], (int)(tap % TAPS), (int32_t)taps[tap].weight);
        }
        uint8_t *out = window->out + i * window->out_stride;
        for (int64_t at = 0; at < window->num_columns; at += COLUMNS) {
            u8x32 red = sum_rows(rows, row_weights, num_row_parts, at);
            u8x32 green = sum_rows(rows, row_weights, num_row_parts, length + at);
            u8x32 blue = sum_rows(rows, row_weights, num_row_parts, 2 * length + at);
            join_some_colors(red, green, blue, window->num_columns - at, out + 3 * at);
        }
    }
    return true;
}
