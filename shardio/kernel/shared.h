// Definitions that the code for CPUs and the code for GPUs share: plans of crops, and the terms of JPEG.

#ifndef SHARDIO_SHARED_H
#define SHARDIO_SHARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// How to turn a stored picture upright: these flags, which are ORed together and applied in this order.
enum { UPSIDE_DOWN = 1, MIRRORED = 2, TRANSPOSED = 4 };

// Resampling methods. Pillow's methods use antialiasing.
enum { OPENCV_BILINEAR, PILLOW_BILINEAR, PILLOW_BICUBIC, PILLOW_BOX };

// The plan of one crop.
typedef struct {
    // The part of the upright picture to resize. The height is 0 if the crop is left out.
    int64_t top, left, height, width;
    int64_t new_height, new_width;    // The size of the resized part.
    int64_t window_top, window_left;  // The corner of the window to return, which may extend beyond the resized part.
    uint8_t is_flipped;               // Whether to mirror the window.
    uint8_t resampling;
} Plan;

// A part of a picture, in pixels.
typedef struct {
    int64_t top, left, height, width;
} Box;

// Rows or columns, from the first to one past the last.
typedef struct {
    int64_t start, stop;
} Range;

typedef enum { GRAY, YCC, RGB } Color;

enum {
    MAX_COMPONENTS = 3,
    MAX_BLOCKS = 6,  // The most blocks in an MCU: 4:2:0 and 4:1:1 have six.
    MAX_DC = 2047,   // The largest coefficients of images with 8-bit samples (F.1.2.1 and F.1.2.2).
    MAX_AC = 1023,
    HALF_RANGE = 1 << 14,  // The sum of two numbers below this limit fits into 16 bits: see idct.c.
    LOOKUP_BITS = 10,
};

// A Huffman table as in a DHT segment (B.2.4.2). Python has checked that the lengths leave enough codes without the
// code of all ones, and that there are at most 256 symbols.
typedef struct {
    uint8_t lengths[16];   // The number of codes of each length; zeros if there is no such table.
    uint8_t symbols[256];  // The symbols, in the order of their codes.
} StoredTable;

#ifndef __CUDACC__  // CUDA has these functions.
static inline int64_t min(int64_t one, int64_t other) { return one < other ? one : other; }
static inline int64_t max(int64_t one, int64_t other) { return one > other ? one : other; }
#endif

#endif
