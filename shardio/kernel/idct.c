// Dequantize coefficients and transform them to samples: libjpeg's inverse DCT `islow` (jidctint.c).
//
// The integer arithmetic is that of libjpeg, bit for bit. Like libjpeg-turbo's vector code (jidctint-avx2.asm), this
// code computes in 16 bits in some places, and limits samples to the range 0 to 255. Blocks with values that do not
// fit are reported; no encoder writes such blocks. Two blocks are transformed together, one in each lane of a vector.

#include "decoder.h"
#include "vectors.h"

// The zigzag index of each coefficient, row by row (figure A.6).
#define ZIGZAG                                                                                                        \
    0, 1, 5, 6, 14, 15, 27, 28, 2, 4, 7, 13, 16, 26, 29, 42, 3, 8, 12, 17, 25, 30, 41, 43, 9, 11, 18, 24, 31, 40, 44, \
        53, 10, 19, 23, 32, 39, 45, 52, 54, 20, 22, 33, 38, 46, 51, 55, 60, 21, 34, 37, 47, 50, 56, 59, 61, 35, 36,   \
        48, 49, 57, 58, 62, 63

void prepare_quantizers(Member *member) {
    for (int c = 0; c < member->head.num_components; c++) {
        const uint16_t *quantizers = member->head.quantizers[member->head.quantizer[c]];
        for (int k = 0; k < 64; k++) {
            int64_t limit = quantizers[k] ? (HALF_RANGE - 1) / quantizers[k] : HALF_RANGE;
            member->quantizers[c][k] = quantizers[k];
            member->limits[c][k] = (uint16_t)limit;
        }
    }
}

// Transform eight vectors of values below HALF_RANGE: the sum of even and odd terms of figure A.3.3, times 2^13.
// libjpeg's constants FIX_0_298631336 and so on are 2^13 times the numbers in their names. The terms are collected into
// one factor for each number.
static inline __attribute__((always_inline)) void transform(i16x16 rows[8], int shift, int added) {
    const i16x16 zero = {};
    i16x16 sum = rows[0] + rows[4], difference = rows[0] - rows[4], z3 = rows[7] + rows[3], z4 = rows[5] + rows[1];
    i32x8 results[2][8];
#pragma clang loop unroll(full)
    for (int half = 0; half < 2; half++) {
#define ZIP(a, b) (half ? zip_high(a, b) : zip_low(a, b))
        i32x8 even0 = ((i32x8)ZIP(zero, sum) >> 3) + added, even1 = ((i32x8)ZIP(zero, difference) >> 3) + added;
        i16x16 c26 = ZIP(rows[2], rows[6]), c71 = ZIP(rows[7], rows[1]), c53 = ZIP(rows[5], rows[3]), z = ZIP(z3, z4);
        i32x8 even2 = sum_products(c26, PAIR(4433, 4433 - 15137)), even3 = sum_products(c26, PAIR(4433 + 6270, 4433));
        i32x8 w3 = sum_products(z, PAIR(9633 - 16069, 9633)), w4 = sum_products(z, PAIR(9633, 9633 - 3196));
        i32x8 odd0 = sum_products(c71, PAIR(2446 - 7373, -7373)) + w3;
        i32x8 odd1 = sum_products(c53, PAIR(16819 - 20995, -20995)) + w4;
        i32x8 odd2 = sum_products(c53, PAIR(-20995, 25172 - 20995)) + w3;
        i32x8 odd3 = sum_products(c71, PAIR(-7373, 12299 - 7373)) + w4;
        i32x8 t10 = even0 + even3, t13 = even0 - even3, t11 = even1 + even2, t12 = even1 - even2;
        i32x8 sums[8] = {t10 + odd3, t11 + odd2, t12 + odd1, t13 + odd0,
                         t13 - odd0, t12 - odd1, t11 - odd2, t10 - odd3};
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; i++) results[half][i] = sums[i] >> shift;
#undef ZIP
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; i++) rows[i] = pack(results[0][i], results[1][i]);
}

// Interleave the 32-bit values of the first or the second halves of two vectors, in each lane.
#define ZIP_32_LOW(a, b) ((i16x16)__builtin_shufflevector((i32x8)(a), (i32x8)(b), 0, 8, 1, 9, 4, 12, 5, 13))
#define ZIP_32_HIGH(a, b) ((i16x16)__builtin_shufflevector((i32x8)(a), (i32x8)(b), 2, 10, 3, 11, 6, 14, 7, 15))
#define ZIP_64_LOW(a, b) ((i16x16)__builtin_shufflevector((i64x4)(a), (i64x4)(b), 0, 4, 2, 6))
#define ZIP_64_HIGH(a, b) ((i16x16)__builtin_shufflevector((i64x4)(a), (i64x4)(b), 1, 5, 3, 7))
// Transpose the 8 × 8 values in each lane.
static inline __attribute__((always_inline)) void transpose(i16x16 r[8]) {
    i16x16 a[8], b[8];
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; i += 2) {
        a[i] = zip_low(r[i], r[i + 1]);
        a[i + 1] = zip_high(r[i], r[i + 1]);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; i += 4) {
        b[i] = ZIP_32_LOW(a[i], a[i + 2]);
        b[i + 1] = ZIP_32_HIGH(a[i], a[i + 2]);
        b[i + 2] = ZIP_32_LOW(a[i + 1], a[i + 3]);
        b[i + 3] = ZIP_32_HIGH(a[i + 1], a[i + 3]);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {
        r[2 * i] = ZIP_64_LOW(b[i], b[i + 4]);
        r[2 * i + 1] = ZIP_64_HIGH(b[i], b[i + 4]);
    }
}

// The destination of a block's samples.
typedef struct {
    uint8_t *samples;
    int64_t stride;
} Place;

// Dequantize a block, and order its coefficients by row. Set the bits of `excess` for values that do not fit.
static inline __attribute__((always_inline)) i16x64 dequantize(const Member *member, int component,
                                                               const int16_t *coefficients, int dc, i16x64 *excess) {
    i16x64 block = LOAD(i16x64, coefficients), limits = LOAD(i16x64, member->limits[component]);
    block[0] = (int16_t)dc;
    *excess |= __builtin_elementwise_abs(block) > limits;
    block *= LOAD(i16x64, member->quantizers[component]);
    return __builtin_shufflevector(block, block, ZIGZAG);
}

// Transform two blocks. Return whether all values are in range.
static inline __attribute__((always_inline)) bool transform_blocks(i16x64 one, i16x64 other, Place place,
                                                                   Place other_place) {
#define ROW(i)                                                                                                   \
    __builtin_shufflevector(one, other, 8 * i, 8 * i + 1, 8 * i + 2, 8 * i + 3, 8 * i + 4, 8 * i + 5, 8 * i + 6, \
                            8 * i + 7, 64 + 8 * i, 65 + 8 * i, 66 + 8 * i, 67 + 8 * i, 68 + 8 * i, 69 + 8 * i,   \
                            70 + 8 * i, 71 + 8 * i)
    i16x16 r[8] = {ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7)};
#undef ROW
    transform(r, 11, 1 << 10);  // jidctint.c: CONST_BITS - PASS1_BITS.
    i16x16 excess = {};
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; i++) excess |= r[i] ^ (r[i] + r[i]);  // Beyond half the range, doubling changes the sign.
    transpose(r);
    transform(r, 18, (128 << 18) + (1 << 17));  // CONST_BITS + PASS1_BITS + 3; 128 is added to each sample (A.3.1).
    u8x32 p0 = pack_bytes(r[0], r[4]), p1 = pack_bytes(r[1], r[5]), p2 = pack_bytes(r[2], r[6]),
          p3 = pack_bytes(r[3], r[7]);
    i16x16 low01 = zip_bytes_low(p0, p1), high01 = zip_bytes_high(p0, p1), low23 = zip_bytes_low(p2, p3),
           high23 = zip_bytes_high(p2, p3);
    i16x16 a = zip_low(low01, low23), b = zip_high(low01, low23), c = zip_low(high01, high23),
           d = zip_high(high01, high23);
    i16x16 rows[4] = {ZIP_32_LOW(a, c), ZIP_32_HIGH(a, c), ZIP_32_LOW(b, d),
                      ZIP_32_HIGH(b, d)};  // Two rows of each block.
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {
        i64x4 two = (i64x4)rows[i];
        STORE(place.samples + 2 * i * place.stride, (int64_t)two[0]);
        STORE(place.samples + (2 * i + 1) * place.stride, (int64_t)two[1]);
        STORE(other_place.samples + 2 * i * other_place.stride, (int64_t)two[2]);
        STORE(other_place.samples + (2 * i + 1) * other_place.stride, (int64_t)two[3]);
    }
    return !__builtin_reduce_or(excess < 0);
}

static inline Place find_place(const Member *member, int block, int row, int column) {
    const Head *head = &member->head;
    int component = member->component[block], across = component ? 1 : head->across, down = component ? 1 : head->down;
    int part = component ? 0 : block;
    const Plane *plane = &member->planes[component];
    int64_t y = 8 * ((int64_t)(row - member->region.first_row) * down + part / across);
    int64_t x = 8 * ((int64_t)(column - member->region.first_column) * across + part % across);
    return (Place){plane->samples + y * plane->stride + x, plane->stride};
}

bool transform_mcu(const Member *member, const int16_t *coefficients, const int *dc, int row, int column) {
    bool is_good = true;
    i16x64 excess = {};
    for (int i = 0; i < member->num_blocks; i += 2) {
        int j = i + 1 < member->num_blocks ? i + 1 : i;  // The last of an odd number of blocks is transformed twice.
        i16x64 one = dequantize(member, member->component[i], coefficients + 128 * i + 64, dc[i], &excess);
        i16x64 other = dequantize(member, member->component[j], coefficients + 128 * j + 64, dc[j], &excess);
        is_good &= transform_blocks(one, other, find_place(member, i, row, column), find_place(member, j, row, column));
    }
    return is_good && !__builtin_reduce_or(excess);
}
