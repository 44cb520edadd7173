// Make rows of pixels from samples: libjpeg's "fancy" chroma upsampling (jdsample.c) and color conversion (jdcolor.c).
//
// A component with fewer samples than the picture has pixels gets the missing samples by interpolation: three quarters
// of the nearer sample and a quarter of the farther one, first down and then across. Samples beyond the border equal
// those at the border. This gives the same results as libjpeg's rules for the first and last rows and columns.

#include "decoder.h"
#include "vectors.h"

// The numbers of samples that a component has across and down the picture.
int64_t count_across(const Head *head, int component) {
    return component ? (head->width + head->across - 1) / head->across : head->width;
}
int64_t count_down(const Head *head, int component) {
    return component ? (head->height + head->down - 1) / head->down : head->height;
}

bool allocate_planes(Member *member) {
    const Head *head = &member->head;
    const Region *region = &member->region;
    int64_t num_rows = region->stop_row - region->first_row, num_columns = region->stop_column - region->first_column;
    int64_t starts[MAX_COMPONENTS], size = 0;
    for (int c = 0; c < head->num_components; c++) {
        Plane *plane = &member->planes[c];
        plane->stride = 8 * num_columns * (c ? 1 : head->across) + MARGIN;
        starts[c] = size + MARGIN;
        size += 8 * num_rows * (c ? 1 : head->down) * plane->stride + 2 * MARGIN;
    }
    if (!reserve(&member->memory, (size_t)size)) return false;
    for (int c = 0; c < head->num_components; c++) member->planes[c].samples = member->memory.bytes + starts[c];
    return true;
}

void extend_planes(Member *member) {
    const Head *head = &member->head;
    const Region *region = &member->region;
    if (head->across == 1) return;
    int64_t num_rows = 8 * (region->stop_row - region->first_row),
            num_columns = 8 * (region->stop_column - region->first_column);
    for (int c = 1; c < head->num_components; c++) {
        int64_t stop = count_across(head, c) - 8 * region->first_column;
        for (int64_t row = 0; row < num_rows; row++) {
            uint8_t *samples = member->planes[c].samples + row * member->planes[c].stride;
            samples[-1] = samples[0];
            if (stop <= num_columns) samples[stop] = samples[stop - 1];
        }
    }
}

// The row lengths of the buffers, for all pixels of the region.
static int64_t row_length(const Member *member) {
    return 8 * member->head.across * (int64_t)(member->region.stop_column - member->region.first_column) + 2 * MARGIN;
}

bool reserve_row(const Member *member, Workspace *work) {
    size_t length = (size_t)row_length(member);
    return reserve(&work->colors, 5 * 2 * length);
}

// The samples of a component's row within the region. Rows are counted from the picture's first row.
const uint8_t *find_samples(const Member *member, int component, int64_t row) {
    const Plane *plane = &member->planes[component];
    int64_t first = 8 * member->region.first_row * (int64_t)(component ? 1 : member->head.down);
    return plane->samples + (row - first) * plane->stride;
}

// The farther value plus three times the nearer one.
static i16x16 weigh(i16x16 near, i16x16 far) { return near + near + near + far; }

static void store_bytes(uint8_t *out, i16x16 numbers) { STORE(out, __builtin_convertvector(numbers, u8x16)); }

// Mix two rows of chroma, if there are fewer rows of chroma than of luma.
static inline i16x16 mix_chroma(const uint8_t *near, const uint8_t *far, int64_t i, int down) {
    i16x16 samples = __builtin_convertvector(LOAD(u8x16, near + i), i16x16);
    return down == 2 ? weigh(samples, __builtin_convertvector(LOAD(u8x16, far + i), i16x16)) : samples;
}

// Upsample one row of chroma: columns `start` to `stop` of the region.
static void upsample(const Member *member, int component, int64_t row, int64_t start, int64_t stop, uint8_t *out) {
    const Head *head = &member->head;
    int across = head->across, down = head->down;
    int64_t near_row = row / down, last_row = count_down(head, component) - 1;
    const uint8_t *near = find_samples(member, component, near_row);
    int64_t far_row = max(0, min(near_row + (row % 2 ? 1 : -1), last_row));
    const uint8_t *far = find_samples(member, component, far_row);
    int64_t first = start / across, end = (stop + across - 1) / across;
    // Rows of one or two samples are not interpolated (jdsample.c, jinit_upsampler: downsampled_width > 2).
    bool is_fancy = count_across(head, component) > 2;
    if (across == 1 && down == 2) {  // h1v2_fancy_upsample
        int16_t added = row % 2 ? 2 : 1;
        for (int64_t i = first; i < end; i += 16) {
            i16x16 sum = weigh(__builtin_convertvector(LOAD(u8x16, near + i), i16x16),
                               __builtin_convertvector(LOAD(u8x16, far + i), i16x16));
            store_bytes(out + i, (sum + added) >> 2);
        }
    } else if (across == 2 && down <= 2 && is_fancy) {  // h2v1_fancy_upsample and h2v2_fancy_upsample
        int16_t shift = down == 2 ? 4 : 2, left = down == 2 ? 8 : 1, right = down == 2 ? 7 : 2;
        i16x16 previous = mix_chroma(near, far, first - 16, down), here = mix_chroma(near, far, first, down);
        for (int64_t i = first; i < end; i += 16) {
            i16x16 next = mix_chroma(near, far, i + 16, down);
            i16x16 before =
                __builtin_shufflevector(previous, here, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30);
            i16x16 after = __builtin_shufflevector(here, next, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16);
            i16x16 even = (weigh(here, before) + left) >> shift, odd = (weigh(here, after) + right) >> shift;
            STORE(out + 2 * i, even | odd << 8);  // The even sample is the first of two bytes.
            previous = here;
            here = next;
        }
    } else {  // h2v1_upsample, h2v2_upsample and int_upsample
        for (int64_t i = start; i < stop; i++) out[i] = near[i / across];
    }
}

typedef struct {
    i16x16 low, high;
} Halves;

static inline Halves widen(u8x32 bytes) { return (Halves){widen_low(bytes), widen_high(bytes)}; }

// (chroma * weight + 2^15) >> 16, computed from the upper halves of 16-bit products.
static inline i16x16 weigh_color(i16x16 chroma, int16_t weight) {
    return (upper_products(chroma + chroma, (i16x16){} + weight) + 1) >> 1;
}

// jdcolor.c: FIX(1.40200) and so on, the number times 2^16, rounded. Adding or subtracting multiples of 2^16 makes the
// results fit into 16 bits.
enum { CR_RED = 91881 - (1 << 16), CB_BLUE = 116130 - (2 << 16), CR_GREEN = (1 << 16) - 46802, CB_GREEN = -22554 };

typedef struct {
    i16x16 red, green, blue;
} Colors;

static inline __attribute__((always_inline)) Colors convert(i16x16 luma, i16x16 cb, i16x16 cr) {
    cb -= 128;
    cr -= 128;
    i32x8 low = (sum_products(zip_low(cb, cr), PAIR(CB_GREEN, CR_GREEN)) + (1 << 15)) >> 16;
    i32x8 high = (sum_products(zip_high(cb, cr), PAIR(CB_GREEN, CR_GREEN)) + (1 << 15)) >> 16;
    return (Colors){luma + cr + weigh_color(cr, CR_RED), luma - cr + pack(low, high),
                    luma + cb + cb + weigh_color(cb, CB_BLUE)};
}

Pixels make_row(const Member *member, int64_t row, int64_t start, int64_t stop, int place, Workspace *work) {
    const Head *head = &member->head;
    int64_t length = row_length(member);
    uint8_t *buffers = work->colors.bytes + 5 * place * length + MARGIN;  // Red, green, blue, and two rows of chroma.
    uint8_t *red = buffers, *green = buffers + length, *blue = buffers + 2 * length;
    const uint8_t *samples[MAX_COMPONENTS] = {find_samples(member, 0, row)};
    if (head->num_components == 1) return (Pixels){{samples[0], samples[0], samples[0]}};
    if (head->is_interleaved) {
        for (int64_t i = start; i < stop; i += 32) {
            u8x32 colors[3];
            split_colors(samples[0] + 3 * i, colors);
            STORE(red + i, colors[0]);
            STORE(green + i, colors[1]);
            STORE(blue + i, colors[2]);
        }
        return (Pixels){{red, green, blue}};
    }
    for (int c = 1; c < MAX_COMPONENTS; c++) {
        if (head->across == 1 && head->down == 1) {
            samples[c] = find_samples(member, c, row);
            continue;
        }
        uint8_t *upsampled = buffers + (2 + c) * length;
        upsample(member, c, row, start, stop, upsampled);
        samples[c] = upsampled;
    }
    if (head->color == RGB) return (Pixels){{samples[0], samples[1], samples[2]}};
    for (int64_t i = start; i < stop; i += 32) {
        Halves luma = widen(LOAD(u8x32, samples[0] + i));
        Halves cb = widen(LOAD(u8x32, samples[1] + i)), cr = widen(LOAD(u8x32, samples[2] + i));
        Colors low = convert(luma.low, cb.low, cr.low), high = convert(luma.high, cb.high, cr.high);
        STORE(red + i, pack_bytes(low.red, high.red));
        STORE(green + i, pack_bytes(low.green, high.green));
        STORE(blue + i, pack_bytes(low.blue, high.blue));
    }
    return (Pixels){{red, green, blue}};
}
