// Declarations that the stages of decoding share: the parts of an image, and the stages' functions.
//
// An image goes through these files, in this order:
//
//   chunk.c      decode the images of a chunk, and render their crops
//   head.c       read the markers before the scan (ISO/IEC 10918-1, annex B)
//   crop.c       find the MCUs that the crops need; render the crops
//   scan.c       find the restart intervals that these MCUs need, and copy them without stuffed bytes
//   huffman.c    make lookup tables for the Huffman codes (C.2)
//   entropy.c    decode three streams side by side: bits become coefficients (F.2.2)
//   progressive.c  decode the scans of a progressive image, instead of scan.c, huffman.c and entropy.c (annex G)
//   idct.c       dequantize and transform each MCU as soon as it is decoded: coefficients become samples (A.3.3)
//   kept.c       keep decoded images, and find their planes; the stages above are then skipped
//   stored.c     read rows of uncompressed pixels, instead of the stages above
//   color.c      interpolate chroma, and convert a row of samples to red, green and blue
//   resize.c     resize rows with the same results as OpenCV's INTER_LINEAR
//   antialias.c  resize rows with the same results as Pillow
//
// Pixels are those of libjpeg-turbo's default decoder. An image that is damaged, or of a kind that is not decoded here,
// is left to libjpeg-turbo: the kernel never rejects an image.
//
// Why no read or write is out of bounds:
//
//   files            Each read follows a comparison with the end of the file or, in head.c, of a segment. The lengths
//                    of a tile table are used only if they add up to those of the scan (find_tile_table in scan.c).
//   Huffman tables   A table with more codes than their lengths allow, or with more than 256 symbols, is refused.
//   scans            A scan is copied to a buffer with PADDING more bytes. unstuff() writes up to 64 bytes after the
//                    copy. An MCU, or a block of a progressive scan, begins at or before the end of the copy. An
//                    MCU has at most 6 × (27 + 63 × 26) bits, a progressive block 64 × 32, and a look-ahead reads 8
//                    more bytes.
//   coefficients     Their indices are states of huffman.c, below ALL_STATES: a code leads at most 15 states beyond
//                    its block, and such states lead only out of the loop. progressive.c compares an index with the
//                    scan's last index, and finds blocks by the image's size.
//   stored pixels    Their number of bytes follows from their size. Full rows are read; the memory has room for them.
//   kept images      Only the kernel writes them, to memory that it has allocated for them alone.
//   samples          Only MCUs of the region are transformed. allocate_planes() sizes the planes by the region.
//   rows of pixels   A row has room for the region's pixels. In rows and planes, vectors may read and write MARGIN more
//                    bytes before and after. A crop is within its picture, or is refused. Its source pixels
//                    are within the region, and a gathering vector reads at most 128 bytes, starting at one of them.
//   crops            Rows are written in full, except that the last pixels of each are copied one by one.
//
// tiles.c uses head.c, crop.c and scan.c to collect the restart intervals that a device decodes: see stages.h.
//
// tokens.c explains why recoding is safe; edit.h, neighbors.c and warping.c do so for operations on pixels.

#ifndef SHARDIO_DECODER_H
#define SHARDIO_DECODER_H

#include "codes.h"
#include "kernel.h"

enum {
    MAX_TABLE_ID = 3,  // The highest identifier of quantization and Huffman tables (B.2.4).
    NUM_TABLES = 8,    // Huffman tables: four for DC coefficients, then four for AC coefficients.
    FIRST_AC_TABLE = 4,
    PADDING = 4096,
    MARGIN = 128,
    NUM_CHAINS = 3,     // Streams that are decoded side by side: each is a chain of dependent steps.
    NUM_STATES = 4096,  // The states of an image: see huffman.c.
    ALL_STATES = (NUM_CHAINS + 1) * NUM_STATES,  // The states of each member, and those of chains without a stream.
    DONE = 1 << 10,                              // States and bits of states: see huffman.c.
    WAITING = DONE + 16,
    REST = 1 << 11,
    PREFIX_BITS = 6,
    MAX_LOOKUP_BITS = 18,  // The maximum number of bits in a code and its value: three times as many fit into a word.
    NUM_CACHED_TABLES = 24,
    MAX_NEW_SIDE = 1 << 20,  // Of resized parts.
    MAX_BUFFER = 1 << 30,
    MAX_KEPT = 1 << 25,  // Larger buffers are not kept for the next call.
};

// Memory that grows, and is kept from one image to the next.
typedef struct {
    uint8_t *bytes;
    size_t size;
} Buffer;

// Make a buffer at least `size` bytes large. Its contents may be lost. Return whether there was enough memory.
bool reserve(Buffer *buffer, size_t size);

// The header of a scan (B.2.3).
typedef struct {
    int num_components;
    uint8_t components[MAX_COMPONENTS];
    uint8_t dc_table[MAX_COMPONENTS], ac_table[MAX_COMPONENTS];  // For each component in the scan.
    int start, end;                                              // The first and the last coefficient, in zigzag order.
    int high, low;  // The successive approximation: the number of low bits missing before this scan, and after it.
} ScanHeader;

typedef struct {
    bool is_progressive;
    bool is_interleaved;  // Whether the first plane has pixels of three colors, instead of a component's samples.
    int height, width, num_components;
    int across, down;   // The sampling factors of the first component. The others have 1 × 1.
    int rows, columns;  // The numbers of rows and columns of MCUs.
    int interval;       // The number of MCUs between restart markers; 0 without markers.
    Color color;
    bool has_jfif;
    int adobe;  // The color transform of an Adobe segment, or -1.
    uint8_t ids[MAX_COMPONENTS], quantizer[MAX_COMPONENTS];
    uint16_t quantizers[MAX_TABLE_ID + 1][64];  // In zigzag order; the first value is 0 if there is no table.
    const uint8_t *huffman[NUM_TABLES];         // For each table: its numbers of codes, then its symbols; or NULL.
    ScanHeader scan;                            // The header of the last scan that was read.
    int64_t scan_start;
    int64_t tile_table, tile_table_stop;  // The offsets of the tile table's header (0: none) and end.
} Head;

// Read the markers of a file up to its first scan. Return false if the kernel does not decode such files.
bool read_head(const uint8_t *data, int64_t length, Head *head);

// Read the markers between an offset and the next scan. Return SOS, EOI, or 0 if the kernel does not decode such
// files.
int read_markers(const uint8_t *data, int64_t length, int64_t at, Head *head);

// The second bytes of markers; the first is 0xFF (table B.1).
enum { RST0 = 0xD0, SOI = 0xD8, EOI = 0xD9, SOS = 0xDA };

// The coefficients of all blocks of each component of a progressive image: [rows][columns][64], in zigzag order, for
// whole MCUs. The coefficients of blocks outside the image are arbitrary.
typedef struct {
    int16_t *blocks[MAX_COMPONENTS];
    int across[MAX_COMPONENTS], down[MAX_COMPONENTS];   // The number of blocks in an MCU.
    int rows[MAX_COMPONENTS], columns[MAX_COMPONENTS];  // The numbers of rows and columns of blocks in the image.
    int stride[MAX_COMPONENTS];                         // The number of blocks from one row to the next.
    int8_t missing[MAX_COMPONENTS][64];                 // The number of bits not known yet; -1 if no bit is known.
    int num_scans;                                      // The number of decoded scans.
    const uint8_t *stop;                                // The end of the last decoded scan.
} Coefficients;

// The MCUs of an image that its crops need.
typedef struct {
    Box box, upright;  // The needed pixels, in the stored and in the upright picture.
    int first_row, stop_row, first_column, stop_column;
} Region;

// The samples of one component. `samples` points to the first sample of the region's first MCU. MARGIN more bytes
// before the first row and after the last one may be read and written.
typedef struct {
    uint8_t *samples;
    int64_t stride;
} Plane;

// The meaning of the next bits of a stream: one code and its value, or two of each. See huffman.c.
typedef struct {
    uint8_t bits;   // The number of bits of the codes and the values.
    int8_t place;   // The place of the first value, relative to the next state.
    int16_t bias;   // The number to add to the bits to get the first value.
    int16_t step;   // The number to add to the state.
    int8_t keep;    // A mask for the new state: a block's end sets the lowest six bits to 0.
    int8_t second;  // The second value, or 0.
} Entry;

typedef struct {
    uint8_t counts[MAX_CODE_LENGTH], symbols[256];
    int num_symbols;  // 0 if there is no table.
    bool is_dc;
    uint64_t last_use;
    Codes codes;
    Entry single[1 << LOOKUP_BITS], pairs[1 << LOOKUP_BITS], rest[1 << LOOKUP_BITS];
} HuffmanTable;

// The restart intervals of an image.
typedef struct {
    const uint8_t *at, *stop;               // The data of the next interval, and the file's end.
    int64_t next, num_intervals, interval;  // The next interval, the number of intervals, the MCUs per interval.
    const uint8_t *lengths;                 // The lengths in the tile table, or NULL.
    int length_bytes;
} Scan;

// An image that is being decoded.
typedef struct {
    int64_t index;    // The image's index in the chunk.
    bool is_open;     // Whether the member holds an image.
    bool is_good;     // Whether no damage has been found so far.
    bool is_decoded;  // Whether the planes are complete, in which case there are no streams.
    bool has_more;    // Whether there may be more streams to decode.
    int num_busy;     // The number of chains that decode a stream of the image.
    Head head;
    Region region;
    Scan scan;
    int num_blocks;  // The number of blocks in an MCU.
    uint8_t component[MAX_BLOCKS];
    uint16_t quantizers[MAX_COMPONENTS][64], limits[MAX_COMPONENTS][64];  // See idct.c.
    int first_state, state_offset;  // The state in which an MCU begins; the number added to the member's states.
    const HuffmanTable *tables[NUM_TABLES];
    Plane planes[MAX_COMPONENTS];
    Buffer memory;  // The memory of the planes.
} Member;

// A stream that is being decoded: a restart interval, or the whole scan of an image without restart markers.
typedef struct {
    Member *member;
    int row, column;     // The position of the next MCU.
    int num_left;        // The number of MCUs to decode.
    bool is_whole;       // Whether the data must end with the last MCU.
    uint64_t bit, stop;  // The addresses of the next bit and the end of the data, times 8.
    uint64_t state;
    int dc[MAX_COMPONENTS];  // The last DC coefficients.
    Buffer data;
    int16_t coefficients[ALL_STATES] __attribute__((aligned(64)));  // Indexed by state.
} Chain;

// A row of the picture: red, green and blue.
typedef struct {
    const uint8_t *colors[3];
} Pixels;

// All memory of a call. Python provides it filled with zeros, and reuses it for the next call.
typedef struct Workspace {
    bool is_prepared;
    uint64_t num_uses;  // The number of times that a Huffman table was found or made.
    Member members[NUM_CHAINS];
    Member *current;  // The member whose streams are decoded next.
    const Call *call;
    int64_t next_image;  // The place of the next image in the order of the call.
    int num_busy;        // The number of chains that have a stream.
    Chain chains[NUM_CHAINS];
    HuffmanTable tables[NUM_CACHED_TABLES];
    Entry stay[1 << LOOKUP_BITS], wait[1 << LOOKUP_BITS], jump[1 << LOOKUP_BITS];  // For states without codes.
    const Entry *next[ALL_STATES];  // The table for the next code, by state.
    uint8_t zeros[16];              // The data of chains without a stream.
    Buffer colors, turned, columns, rows, resized, taps, coefficients, scan, kept;
} Workspace;

_Static_assert(sizeof(Workspace) <= 1 << 20, "a workspace has WORKSPACE_BYTES: see kernel/records.py");

bool open_scan(const uint8_t *data, int64_t length, Member *member);
bool take_stream(Member *member, Chain *chain);

bool read_kept_head(const uint8_t *kept, Head *head);
bool open_kept(const uint8_t *kept, Member *member);
bool prepare_to_keep(Member *member);
void keep(const Member *member, const Image *image, Workspace *work);

void prepare_tables(Workspace *work);
bool make_tables(Member *member, Workspace *work);

void decode_streams(Workspace *work);

void prepare_quantizers(Member *member);
bool decode_progressive(const uint8_t *data, int64_t length, Member *member, Workspace *work);
int64_t count_coefficients(const Head *head);
Outcome decode_scans(const uint8_t *data, int64_t length, Head *head, uint8_t *unstuffed, Coefficients *coefficients);
int16_t *find_block(const Coefficients *coefficients, int component, int64_t row, int64_t column);

bool transform_mcu(const Member *member, const int16_t *coefficients, const int *dc, int row, int column);

bool describe_stored(const Image *image, Head *head);
bool read_stored(const Image *image, Member *member);

bool add_crops(const Image *image, const Plan *plans, const Row *rows, int64_t num_crops, Member *member);
bool allocate_planes(Member *member);
bool render_crops(Member *member, Workspace *work);

// Functions of chunk.c that entropy.c calls.
bool open_next_image(Workspace *work);
void finish_image(Member *member, Workspace *work);

int64_t count_across(const Head *head, int component);
int64_t count_down(const Head *head, int component);
void extend_planes(Member *member);
bool reserve_row(const Member *member, Workspace *work);
const uint8_t *find_samples(const Member *member, int component, int64_t row);
Pixels make_row(const Member *member, int64_t row, int64_t start, int64_t stop, int place, Workspace *work);

#endif
