// Vectors: clang's vector extensions, and the few instructions for which clang's generic code is slower.
//
// Pixels are computed 32 at a time, as bytes or as two vectors of 16-bit numbers. If a function's comment says "in each
// lane", the function's vectors consist of 128-bit lanes, as on x86.

#ifndef SHARDIO_VECTORS_H
#define SHARDIO_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef int16_t i16x64 __attribute__((vector_size(128)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int64_t i64x4 __attribute__((vector_size(32)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x4 __attribute__((vector_size(4)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef int32_t i32x32 __attribute__((vector_size(128)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x32 __attribute__((vector_size(128)));
typedef double f64x4 __attribute__((vector_size(32)));

// Load a vector from any address, and store a vector to any address.
#define LOAD(type, address)                          \
    ({                                               \
        type loaded_;                                \
        memcpy(&loaded_, (address), sizeof loaded_); \
        loaded_;                                     \
    })
#define STORE(address, vector)                       \
    ({                                               \
        __typeof__(vector) stored_ = (vector);       \
        memcpy((address), &stored_, sizeof stored_); \
    })

// Interleave the first halves, or the second halves, of two vectors in each lane.
static inline i16x16 zip_low(i16x16 a, i16x16 b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
}
static inline i16x16 zip_high(i16x16 a, i16x16 b) {
    return __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
}

static inline i16x16 zip_bytes_low(u8x32 a, u8x32 b) {
    return (i16x16)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 16, 48, 17, 49,
                                           18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55);
}
static inline i16x16 zip_bytes_high(u8x32 a, u8x32 b) {
    return (i16x16)__builtin_shufflevector(a, b, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 24, 56,
                                           25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

// Bytes as 16-bit numbers: pack_bytes(widen_low(v), widen_high(v)) is v.
static inline i16x16 widen_low(u8x32 bytes) { return zip_bytes_low(bytes, (u8x32){}); }
static inline i16x16 widen_high(u8x32 bytes) { return zip_bytes_high(bytes, (u8x32){}); }

// Two factors for sum_products, repeated.
#define PAIR(a, b) ((i16x16)((i32x8){} + (int32_t)((uint32_t)(uint16_t)(b) << 16 | (uint16_t)(a))))

// For each pair of adjacent numbers in `a`, the sum of their products with those in `b`.
static inline i32x8 sum_products(i16x16 a, i16x16 b) {
#if defined(__AVX2__)
    return (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    union {
        i16x16 whole;
        __m128i half[2];
    } x = {a}, y = {b};
    union {
        i32x8 whole;
        __m128i half[2];
    } sums;
    for (int i = 0; i < 2; i++) sums.half[i] = _mm_madd_epi16(x.half[i], y.half[i]);
    return sums.whole;
#else
    i32x16 products = __builtin_convertvector(a, i32x16) * __builtin_convertvector(b, i32x16);
    return __builtin_shufflevector(products, products, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(products, products, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// For each pair of adjacent bytes, the sum of their products with two 8-bit numbers. The sums must fit into 16 bits.
static inline i16x16 sum_byte_products(u8x32 bytes, int8_t first, int8_t second) {
#if defined(__AVX2__)
    return (i16x16)_mm256_maddubs_epi16((__m256i)bytes,
                                        _mm256_set1_epi16((int16_t)((uint8_t)first | (uint8_t)second << 8)));
#elif defined(__SSSE3__)
    __m128i factors = _mm_set1_epi16((int16_t)((uint8_t)first | (uint8_t)second << 8));
    union {
        u8x32 whole;
        __m128i half[2];
    } x = {bytes};
    union {
        i16x16 whole;
        __m128i half[2];
    } sums;
    for (int i = 0; i < 2; i++) sums.half[i] = _mm_maddubs_epi16(x.half[i], factors);
    return sums.whole;
#else
    u16x16 twos = (u16x16)bytes;
    return (i16x16)(twos & 255) * first + (i16x16)(twos >> 8) * second;
#endif
}

// Convert two vectors of 32-bit numbers to 16 bits, with saturation; in each lane, those of `a` come first.
static inline i16x16 pack(i32x8 a, i32x8 b) {
#if defined(__AVX2__)
    return (i16x16)_mm256_packs_epi32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    union {
        i32x8 whole;
        __m128i half[2];
    } x = {a}, y = {b};
    union {
        i16x16 whole;
        __m128i half[2];
    } packed;
    for (int i = 0; i < 2; i++) packed.half[i] = _mm_packs_epi32(x.half[i], y.half[i]);
    return packed.whole;
#else
    i32x16 both = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    both = __builtin_elementwise_min(__builtin_elementwise_max(both, (i32x16){} - 32768), (i32x16){} + 32767);
    return __builtin_convertvector(both, i16x16);
#endif
}

// Convert two vectors of 16-bit numbers to bytes, with saturation; in each lane, those of `a` come first.
static inline u8x32 pack_bytes(i16x16 a, i16x16 b) {
#if defined(__AVX2__)
    return (u8x32)_mm256_packus_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    union {
        i16x16 whole;
        __m128i half[2];
    } x = {a}, y = {b};
    union {
        u8x32 whole;
        __m128i half[2];
    } packed;
    for (int i = 0; i < 2; i++) packed.half[i] = _mm_packus_epi16(x.half[i], y.half[i]);
    return packed.whole;
#else
    i16x32 both = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23, 8, 9, 10, 11,
                                          12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    both = __builtin_elementwise_min(__builtin_elementwise_max(both, (i16x32){}), (i16x32){} + 255);
    return __builtin_convertvector(both, u8x32);
#endif
}

// The upper halves of the products.
static inline i16x16 upper_products(i16x16 a, i16x16 b) {
#if defined(__AVX2__)
    return (i16x16)_mm256_mulhi_epi16((__m256i)a, (__m256i)b);
#else
    return __builtin_convertvector(__builtin_convertvector(a, i32x16) * __builtin_convertvector(b, i32x16) >> 16,
                                   i16x16);
#endif
}

// Three colors of 32 pixels, side by side.
static inline __attribute__((always_inline)) void join_colors(u8x32 red, u8x32 green, u8x32 blue, uint8_t *out) {
#define THREE(i) i, i + 32, i + 64
    u8x64 both =
        __builtin_shufflevector(red, green, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42,
                                43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63);
    u8x64 last =
        __builtin_shufflevector(blue, blue, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    u8x64 first =
        __builtin_shufflevector(both, last, THREE(0), THREE(1), THREE(2), THREE(3), THREE(4), THREE(5), THREE(6),
                                THREE(7), THREE(8), THREE(9), THREE(10), THREE(11), THREE(12), THREE(13), THREE(14),
                                THREE(15), THREE(16), THREE(17), THREE(18), THREE(19), THREE(20), 21);
    u8x32 rest = __builtin_shufflevector(both, last, 53, 85, THREE(22), THREE(23), THREE(24), THREE(25), THREE(26),
                                         THREE(27), THREE(28), THREE(29), THREE(30), THREE(31));
#undef THREE
    STORE(out, first);
    STORE(out + 64, rest);
}

// The inverse of join_colors: the colors of 32 pixels, 16 in each lane. In three parts of 16 bytes, no two bytes of a
// color have the same place. So the parts are blended into the bytes of one color, which are then put in order.
static inline __attribute__((always_inline)) void split_colors(const uint8_t *pixels, u8x32 colors[3]) {
    const u8x32 thirds = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0,
                          0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0};
    const u8x32 is_first = (u8x32)(thirds == 0), is_second = (u8x32)(thirds == 1);
    u8x32 parts[3];
    for (int i = 0; i < 3; i++) {
        memcpy(&parts[i], pixels + 16 * i, 16);
        memcpy((uint8_t *)&parts[i] + 16, pixels + 48 + 16 * i, 16);
    }
    for (int c = 0; c < 3; c++) {
        u8x32 others = (is_second & parts[(c + 2) % 3]) | (~is_second & parts[(c + 1) % 3]);
        colors[c] = (is_first & parts[c]) | (~is_first & others);
    }
    colors[0] = __builtin_shufflevector(colors[0], colors[0], 0, 3, 6, 9, 12, 15, 2, 5, 8, 11, 14, 1, 4, 7, 10, 13, 16,
                                        19, 22, 25, 28, 31, 18, 21, 24, 27, 30, 17, 20, 23, 26, 29);
    colors[1] = __builtin_shufflevector(colors[1], colors[1], 1, 4, 7, 10, 13, 0, 3, 6, 9, 12, 15, 2, 5, 8, 11, 14, 17,
                                        20, 23, 26, 29, 16, 19, 22, 25, 28, 31, 18, 21, 24, 27, 30);
    colors[2] = __builtin_shufflevector(colors[2], colors[2], 2, 5, 8, 11, 14, 1, 4, 7, 10, 13, 0, 3, 6, 9, 12, 15, 18,
                                        21, 24, 27, 30, 17, 20, 23, 26, 29, 16, 19, 22, 25, 28, 31);
}

// Whether look_up_bytes needs only a few instructions.
#if defined(__AVX512VBMI__) || defined(__aarch64__)
enum { LOOKS_UP_VECTORS = 1 };
#else
enum { LOOKS_UP_VECTORS = 0 };
#endif

// Replace bytes with those in a table of 256.
static inline __attribute__((always_inline)) u8x64 look_up_bytes(const uint8_t *table, u8x64 bytes) {
#if defined(__AVX512VBMI__)
    __m512i indices = (__m512i)bytes;
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), indices, _mm512_loadu_si512(table + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), indices, _mm512_loadu_si512(table + 192));
    return (u8x64)_mm512_mask_blend_epi8(_mm512_movepi8_mask(indices), low, high);
#elif defined(__aarch64__)
    uint8x16x4_t quarters[4];
    for (int i = 0; i < 4; i++) quarters[i] = vld1q_u8_x4(table + 64 * i);
    union {
        u8x64 whole;
        uint8x16_t parts[4];
    } vector = {bytes};
    for (int i = 0; i < 4; i++) {
        uint8x16_t indices = vector.parts[i], found = vqtbl4q_u8(quarters[0], indices);
        for (int j = 1; j < 4; j++)
            found = vqtbx4q_u8(found, quarters[j], vsubq_u8(indices, vdupq_n_u8((uint8_t)(64 * j))));
        vector.parts[i] = found;
    }
    return vector.whole;
#else
    for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
    return bytes;
#endif
}

// Eight bytes as one number, most significant byte first.
static inline uint64_t load_word(const uint8_t *bytes) { return __builtin_bswap64(LOAD(uint64_t, bytes)); }

// Copy entropy-coded bytes up to a marker, or to `stop`, without the zero after each 0xFF (F.1.2.3). Return the
// end of the copied data, and move `out` to the end of the copy. Up to 64 bytes after the copy may be overwritten.
static inline const uint8_t *unstuff(const uint8_t *at, const uint8_t *stop, uint8_t **out) {
    uint8_t *to = *out;
#if defined(__AVX512VBMI2__)
    uint64_t is_after_ff = 0;  // Whether the byte before `at` is 0xFF.
    while (at < stop) {
        int64_t left = stop - at;
        uint64_t there = left < 64 ? (1ull << left) - 1 : ~0ull;
        __m512i bytes = _mm512_maskz_loadu_epi8(there, at);
        uint64_t ff = _mm512_mask_cmpeq_epi8_mask(there, bytes, _mm512_set1_epi8(-1));
        uint64_t after_ff = (ff << 1 | is_after_ff) & there;
        uint64_t kept = there;
        if (after_ff) {
            uint64_t markers = after_ff & ~_mm512_cmpeq_epi8_mask(bytes, _mm512_setzero_si512());
            kept &= ~after_ff;
            if (markers) {  // The marker's 0xFF has been copied: it is the last byte before the marker's second byte.
                int second = __builtin_ctzll(markers);
                kept &= (1ull << second) - 1;
                _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(kept, bytes));
                *out = to + __builtin_popcountll(kept) - 1;
                return at + second - 1;
            }
            bytes = _mm512_maskz_compress_epi8(kept, bytes);
        }
        _mm512_storeu_si512(to, bytes);
        to += __builtin_popcountll(kept);
        is_after_ff = ff >> 63;
        at += 64;
    }
    if (to > *out && stop[-1] == 0xFF) {  // The last 0xFF is not data, because no zero follows.
        *out = to - 1;
        return stop - 1;
    }
    *out = to;
    return stop;
#else
    while (at < stop) {
        while (stop - at >= 32) {
            u8x32 bytes = LOAD(u8x32, at);
            STORE(to, bytes);
            u8x32 is_ff = (u8x32)(bytes == 0xFF);
            if (__builtin_reduce_or(is_ff)) break;
            at += 32;
            to += 32;
        }
        while (at < stop && *at != 0xFF) *to++ = *at++;
        if (at < stop) {
            if (at + 1 >= stop || at[1] != 0) break;
            *to++ = 0xFF;
            at += 2;
        }
    }
    *out = to;
    return at;
#endif
}

#endif
