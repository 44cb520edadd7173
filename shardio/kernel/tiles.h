// Images that a device decodes from their tiles: the records that a processor fills in (tiles.c) and that the device
// reads (stages.h).
//
// A chunk of memory begins with the TiledImage of each image. After them come, for each image, its Crops, its Tiles,
// and the entropy-coded data of the tiles without stuffed bytes; or the pixels of its crops, if the processor has
// decoded it. Offsets count from the first byte of the chunk, which is aligned to 16 bytes. At least CHUNK_PADDING
// bytes follow the data.

#ifndef SHARDIO_TILES_H
#define SHARDIO_TILES_H

#include "shared.h"

enum {
    MAX_TILED_TABLES = 4,  // Huffman tables of an image: baseline images have at most two of each kind (table B.5).
    CHUNK_PADDING = 8,     // The device reads words.
};

// A restart interval.
typedef struct {
    int64_t offset, length;  // The offset and length of its data in the chunk.
    int32_t row, column;     // The position of its first MCU in the picture.
} Tile;

// How to render a crop.
typedef struct {
    Plan plan;
    int64_t height, width;           // The size of the result.
    int64_t taps_down, taps_across;  // The maximum number of pixels summed for a new pixel; 0 without resizing.
    int64_t weights;                 // The index of the crop's first element among the image's weights: see stages.h.
} TiledCrop;

typedef struct {
    uint8_t is_tiled;  // Whether the device decodes the image. If not, only `pixels` is meaningful.
    uint8_t num_components, across, down, color, turn;
    uint8_t num_blocks;                // The number of blocks in an MCU.
    uint8_t dc_table[3], ac_table[3];  // The index in `tables` of each component's tables.
    uint8_t is_dc[MAX_TILED_TABLES];   // Whether each table has codes of DC coefficients.
    int32_t height, width;             // The size of the stored picture.
    int32_t first_row, first_column;   // The MCUs that the crops need.
    int32_t num_rows, num_columns;
    int32_t interval, num_tiles;       // The number of MCUs in each tile; the number of tiles.
    int64_t pixels;                    // The offset of the pixels of each crop, uint8 [height, width, 3].
    int64_t crops, tiles;              // The offsets of TiledCrop [num_crops] and of Tile [num_tiles].
    Box upright;                       // The pixels that the crops need, in the upright picture.
    int64_t num_samples, num_weights;  // The numbers of samples and weights: see stages.h.
    uint16_t quantizers[3][64];        // Of each component, in zigzag order.
    StoredTable tables[MAX_TILED_TABLES];
} TiledImage;

// The place of an image in a chunk, and of its parts in the arrays of a Batch.
typedef struct {
    const uint8_t *chunk;
    int64_t num_bytes;  // The size of the chunk.
    int64_t index;      // The index of the image in the chunk.
    // The index of the image's first element in each array of a Batch; for `coefficients`, in blocks.
    int64_t block, sample, color, weight;
} Location;

typedef enum { UINT8, FLOAT32, FLOAT16, BFLOAT16 } Dtype;

// The destination of one crop of each image.
typedef struct {
    void *pixels;
    int64_t height, width;
    int64_t image_stride, row_stride, column_stride, color_stride;  // In elements.
    int64_t dtype;                                                  // A Dtype.
    float scale[3], shift[3];  // Each color becomes color * scale + shift, unless the dtype is UINT8.
} Target;

// A batch on the device.
typedef struct {
    int64_t num_images, num_crops;
    const Location *locations;  // [num_images]
    const Target *targets;      // [num_crops]
    uint16_t *lookups;          // [num_images, MAX_TILED_TABLES, 1 << LOOKUP_BITS]
    int64_t *weights;
    int16_t *coefficients;  // [blocks, 64], in zigzag order; zeros before the first stage.
    uint8_t *samples;
    uint32_t *colors;
    int32_t *is_damaged;  // Output: [num_images], zeros before the first stage.
} Batch;

#endif
