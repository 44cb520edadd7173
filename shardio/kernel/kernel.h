// The functions that Python calls, and the records that Python fills in. The records have the same fields as the numpy
// types of the same names in kernel/records.py.
//
//   shardio_decode_chunk       chunk.c, and the files that decoder.h lists
//   shardio_collect_tiles, …   tiles.c and stages.c: what a device decodes, and how
//   shardio_find_kept          kept.c
//   shardio_read_size          head.c
//   shardio_read_scan, …       tokens.c and best_table.c: recoding with new restart intervals and Huffman tables
//   shardio_edit_images        edit.c, and the files that edit.h lists
//   shardio_normalize_image    normalize.c
//
// vectors.h defines vectors, and operations on them that differ between kinds of processors. bits.h reads bits.

#ifndef SHARDIO_KERNEL_H
#define SHARDIO_KERNEL_H

#include "tiles.h"

#define ENTRY __attribute__((visibility("default")))  // A function that Python calls. It takes a record's address.

// Decoded images in memory that processes share, followed by slots and images: see kept.c.
typedef struct {
    int64_t num_bytes;  // The size of the memory.
    int64_t num_slots;  // A power of two.
    int64_t used;       // The number of bytes in use, beginning with the first.
    int64_t unused[5];
} Cache;

typedef struct {
    uint64_t key;    // 0 if the slot is free.
    int64_t offset;  // The offset of the image in the cache's memory; 0 if there is no image yet.
} Slot;

// An image in a chunk: a JPEG, a kept image, or uncompressed pixels, perhaps in a file.
typedef struct {
    const uint8_t *content;  // The JPEG or the first pixel; NULL if the pixels are read from the file.
    int64_t length;
    const uint8_t *kept;    // The kept image, or NULL.
    uint64_t key;           // The key under which to keep a JPEG, or 0 not to keep it.
    int64_t offset;         // The offset of the first pixel in the file.
    int64_t height, width;  // These fields and the next two describe uncompressed pixels.
    int32_t file;           // The descriptor of an open file.
    uint8_t num_channels;   // 1 for gray, 3 for color; 0 for a JPEG.
    uint8_t turn;           // How to turn the stored picture upright: flags from shared.h, ORed together.
} Image;

// The destination of a crop.
typedef struct {
    uint8_t *pixels;  // [height, width, 3].
    int64_t height, width;
} Row;

typedef struct {
    int64_t num_images, num_crops;
    const Image *images;   // [num_images]
    const Plan *plans;     // [num_images, num_crops]
    const int64_t *order;  // [num_images], the order in which to decode the images.
    const Row *rows;       // [num_images, num_crops]
    uint8_t *is_done;      // [num_images], set to 1 for each image whose crops are rendered.
    struct Workspace *workspace;
    Cache *cache;        // NULL if no image is kept.
    int64_t cache_file;  // The descriptor of the cache's memory.
} Call;

ENTRY void shardio_decode_chunk(const Call *call);

// The collection of tiles for a device: see tiles.h.
typedef struct {
    int64_t num_images, num_crops;
    const Image *images;  // [num_images]
    const Plan *plans;    // [num_images, num_crops]
    const Row *rows;      // [num_images, num_crops], the sizes of the crops; no pixels are written.
    int64_t max_bytes;    // The number of bytes that an image may take, besides its TiledImage.
    uint8_t *chunk;       // Output: a TiledImage and max_bytes bytes for each image, plus CHUNK_PADDING bytes.
    uint8_t *is_done;     // Output: [num_images], whether each image's tiles are in the chunk.
    struct Workspace *workspace;
    int64_t num_used;  // Output: the number of bytes used in the chunk.
} Collection;

ENTRY void shardio_collect_tiles(Collection *call);

// Decode a batch of tiled images on the processor (stages.c). A damaged image's pixels are arbitrary.
ENTRY void shardio_decode_tiles(const Batch *batch);

// Return a kept image, which begins with height << 32 | width in 64 bits and its 8-bit turn, or NULL if there is none.
ENTRY const uint8_t *shardio_find_kept(Cache *cache, uint64_t key);

// Return height << 32 | width of a JPEG, or 0 if the kernel cannot read its head.
ENTRY int64_t shardio_read_size(const uint8_t *content, int64_t length);

// Scans are recoded as tokens. A token holds the index of a Huffman table, a symbol, and the value of the bits that
// follow the symbol's code: (table << 8 | symbol) << VALUE_BITS | value. Nothing is written for NO_TOKEN: no baseline
// image has its symbol.
enum { VALUE_BITS = 11, NO_TOKEN = (4 << 8 | 0xFF) << VALUE_BITS };

// A component of a scan to recode.
typedef struct {
    int64_t dc_table, ac_table;   // The indices of the component's tables: DC 0 to 3, then AC 0 to 3.
    int64_t dc_read, dc_written;  // The last DC coefficients read and written, from which the next ones are predicted.
} Component;

typedef enum { RECODED, DAMAGED, EXCESS_DATA, WRONG_MARKER, OUT_OF_RANGE, NO_END, MISSING_SCANS, UNSUPPORTED } Outcome;

typedef struct {
    const uint8_t *data;  // [num_bytes], the file from the scan's start, or a whole progressive file.
    int64_t num_bytes;
    const StoredTable *tables;  // [8]; unused for progressive files.
    Component *components;      // [num_components]
    int64_t num_components;
    const int64_t *blocks;  // [num_blocks], the component index of each block in an MCU.
    int64_t num_blocks, num_mcus;
    // The numbers of MCUs between restart markers in the data and in the recoded data; 0 without markers.
    int64_t old_interval, new_interval;
    uint8_t *unstuffed;     // [num_bytes + 4096], for data without stuffed bytes.
    int16_t *coefficients;  // [num_mcus, num_blocks, 64], for a progressive file.
    int64_t *counts;        // Output: [8, 256], how often each symbol occurs in the tokens.
    uint32_t *tokens;       // Output. See tokens.c for the lengths of this array and of the next one.
    int64_t *stops;         // Output: the end of each new interval in the tokens.
    int64_t outcome;        // An Outcome. The call sets this field and the fields after it.
    int64_t reached;        // The MCU that was reached, or the scan of a progressive file.
    int64_t num_tokens;
    int64_t stop;  // The offset of the scan's end in the data.
} ScanReading;

typedef struct {
    const uint32_t *tokens;
    const int64_t *stops;  // [num_intervals], the end of each restart interval in the tokens.
    int64_t num_intervals;
    const StoredTable *tables;  // [8]
    uint8_t *out;               // Output: the data. See tokens.c for its length.
    int64_t *lengths;           // Output: [num_intervals], the number of bytes of each interval without its marker.
    int64_t size;               // The number of bytes written, set by the call.
} ScanWriting;

typedef struct {
    int64_t counts[256];     // How often each symbol occurs.
    int64_t num_codes[258];  // The number of codes of each length; the first 17 elements are output.
    int64_t symbols[257];    // Output: the symbols, sorted by the lengths of their codes.
    int64_t num_symbols;     // Output: the number of symbols with a code.
} BestTable;

ENTRY void shardio_read_scan(ScanReading *call);
ENTRY void shardio_read_progressive(ScanReading *call);
ENTRY void shardio_write_scan(ScanWriting *call);
ENTRY void shardio_make_best_table(BestTable *call);

// The codes of operations on pixels. Their numbers are described in kernel/operations.py.
enum {
    NONE,
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    HUE,
    GRAYSCALE,
    SOLARIZE,
    POSTERIZE,
    INVERT,
    AUTOCONTRAST,
    EQUALIZE,
    SHARPNESS,
    AFFINE,
    PERSPECTIVE,
    GAUSSIAN_BLUR,
    ERASE,
    VERTICAL_FLIP,
    BEGIN_MIXTURE,
    ADD_TO_MIXTURE,
    END_MIXTURE
};

// Interpolation methods of AFFINE and PERSPECTIVE, numbered as in Pillow.
enum { NEAREST = 0, BILINEAR = 2, BICUBIC = 3 };

typedef struct {
    int64_t code;
    double numbers[12];
} Operation;

typedef struct {
    int64_t num_images, num_operations;
    const Row *rows;              // [num_images], the images.
    const Operation *operations;  // [num_images, num_operations]
    uint8_t *scratch;             // [scratch_length], for copies, mixtures and blurring: see functions.py.
    int64_t scratch_length;
} Edit;

ENTRY void shardio_edit_images(const Edit *call);

// A conversion of an image to floating-point numbers.
typedef struct {
    int64_t num_pixels;
    const uint8_t *pixels;  // [num_pixels, 3]
    float *result;          // [3, num_pixels]
    float means[3], deviations[3];
} Normalization;

ENTRY void shardio_normalize_image(const Normalization *call);

#endif
