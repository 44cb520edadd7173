// Pixels that are stored without compression, as in binary PPM and PGM files: side by side, row by row.
//
// Only the rows that the crops need are read, from memory or from a file. These rows become planes, from which color.c
// makes rows of pixels: one plane of samples for gray, and one of interleaved pixels for colors.

#include "decoder.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SIDE = 1 << 28 };

bool describe_stored(const Image *image, Head *head) {
    if (image->height < 1 || image->height > MAX_SIDE || image->width < 1 || image->width > MAX_SIDE) return false;
    if (image->num_channels != 1 && image->num_channels != 3) return false;
    if (image->length != image->num_channels * image->height * image->width) return false;
    *head = (Head){
        .height = (int)image->height,
        .width = (int)image->width,
        .num_components = image->num_channels,
        .across = 1,
        .down = 1,
        .rows = (int)(image->height + 7) / 8,
        .columns = (int)(image->width + 7) / 8,
        .color = RGB,
        .is_interleaved = image->num_channels == 3,
    };
    return true;
}

// Read bytes of a file. Return false if the file ends early or cannot be read.
static bool read_file(int file, int64_t offset, int64_t num_bytes, uint8_t *out) {
    while (num_bytes > 0) {
        ssize_t num_read = pread(file, out, (size_t)num_bytes, offset);
        if (num_read < 0 && errno == EINTR) continue;
        if (num_read <= 0) return false;
        offset += num_read;
        num_bytes -= num_read;
        out += num_read;
    }
    return true;
}

bool read_stored(const Image *image, Member *member) {
    Region *region = &member->region;
    region->first_column = 0;  // A crop's rows are read in full, because most of their pixels are needed.
    region->stop_column = member->head.columns;
    int64_t stride = image->num_channels * image->width, first = 8 * (int64_t)region->first_row;
    int64_t num_rows = 8 * (int64_t)region->stop_row - first;
    if (!reserve(&member->memory, (size_t)(num_rows * stride + 2 * MARGIN))) return false;
    member->planes[0] = (Plane){member->memory.bytes + MARGIN, stride};
    const Box *box = &region->box;
    int64_t start = box->top * stride, num_bytes = box->height * stride;
    uint8_t *out = member->planes[0].samples + (box->top - first) * stride;
    if (!image->content) return read_file(image->file, image->offset + start, num_bytes, out);
    memcpy(out, image->content + start, (size_t)num_bytes);
    return true;
}
