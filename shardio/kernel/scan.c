// Split a scan into streams: the restart intervals that an image's region needs, without stuffed bytes.
//
// A stream can be decoded without the data before it: it is a restart interval, or the whole scan of an image without
// restart markers (E.1.4 and F.1.2.3).

#include "decoder.h"
#include "vectors.h"

#include <string.h>

static int64_t read_big_endian(const uint8_t *data, int num_bytes) {
    int64_t value = 0;
    for (int i = 0; i < num_bytes; i++) value = value << 8 | data[i];
    return value;
}

// Whether any of `count` MCUs, beginning at `mcu`, is in the region.
static bool meets(int64_t mcu, int64_t count, const Head *head, const Region *region) {
    int64_t columns = head->columns, last = mcu + count - 1, row = mcu / columns, last_row = last / columns;
    if (last_row < region->first_row || row >= region->stop_row) return false;
    bool begins_left = mcu - row * columns < region->stop_column;
    bool ends_right = last - last_row * columns >= region->first_column;
    if (row == last_row) return begins_left && ends_right;
    return last_row - row > 1 || (row >= region->first_row && begins_left) ||
           (last_row < region->stop_row && ends_right);
}

static bool is_marker(const uint8_t *at, int code) { return at[0] == 0xFF && at[1] == code; }

// The marker after an interval.
static int find_marker(const Scan *scan, int64_t interval) {
    return interval == scan->num_intervals - 1 ? EOI : RST0 + (int)(interval % 8);
}

// Use the lengths of the restart intervals from a tile table that fills one segment, if it fits the image, and if the
// right marker follows each interval: whether a file is damaged must not depend on the crop.
static void find_tile_table(const uint8_t *data, const Head *head, Scan *scan) {
    const uint8_t *table = data + head->tile_table;
    scan->lengths = NULL;
    if (!head->tile_table || !head->interval || head->columns % head->interval) return;
    if (head->tile_table_stop - head->tile_table < 11) return;
    int num_bytes = table[6];
    if (read_big_endian(table, 2) != head->height || read_big_endian(table + 2, 2) != head->width) return;
    if (read_big_endian(table + 4, 2) != head->interval || (num_bytes != 2 && num_bytes != 4)) return;
    if (head->tile_table_stop - (head->tile_table + 11) != scan->num_intervals * num_bytes) return;
    const uint8_t *end = scan->at;
    for (int64_t i = 0; i < scan->num_intervals; i++) {
        const uint8_t *at = table + 11 + i * num_bytes;
        int64_t length = num_bytes == 2 ? read_big_endian(at, 2) : read_big_endian(at, 4);  // Each call is one load.
        if (length > scan->stop - end - 2 || !is_marker(end + length, find_marker(scan, i))) return;
        end += length + 2;
    }
    if (end - scan->at - 2 != read_big_endian(table + 7, 4)) return;
    scan->lengths = table + 11;
    scan->length_bytes = num_bytes;
}

bool open_scan(const uint8_t *data, int64_t length, Member *member) {
    const Head *head = &member->head;
    Scan *scan = &member->scan;
    // A file without an EOI marker may be truncated below the region.
    if (length - head->scan_start < 2 || !is_marker(data + length - 2, EOI)) return false;
    int64_t num_mcus = (int64_t)head->rows * head->columns;
    scan->interval = head->interval ? head->interval : num_mcus;
    scan->num_intervals = (num_mcus + scan->interval - 1) / scan->interval;
    scan->next = 0;
    scan->at = data + head->scan_start;
    scan->stop = data + length;
    find_tile_table(data, head, scan);
    member->has_more = true;
    return true;
}

// Find the next stream that the region needs, and copy it to a chain. Return false after the last stream
// of the region, or after damage. The lengths in the tile table keep `at` within the scan: see find_tile_table.
bool take_stream(Member *member, Chain *chain) {
    const Head *head = &member->head;
    const Region *region = &member->region;
    Scan *scan = &member->scan;
    int64_t num_mcus = (int64_t)head->rows * head->columns, num_needed = (int64_t)region->stop_row * head->columns;
    for (; scan->next < scan->num_intervals && scan->next * scan->interval < num_needed; scan->next++) {
        int64_t mcu = scan->next * scan->interval, count = min(scan->interval, num_mcus - mcu);
        bool is_wanted = meets(mcu, count, head, region);
        const uint8_t *end = scan->stop;
        if (scan->lengths) {
            end = scan->at + read_big_endian(scan->lengths + scan->next * scan->length_bytes, scan->length_bytes);
            if (!is_wanted) {
                scan->at = end + 2;
                continue;
            }
        }
        if (!reserve(&chain->data, (size_t)(end - scan->at) + PADDING)) break;
        uint8_t *to = chain->data.bytes;
        const uint8_t *found = unstuff(scan->at, end, &to);
        if (scan->lengths && found != end) break;
        if (scan->stop - found < 2 || !is_marker(found, find_marker(scan, scan->next))) break;
        scan->at = found + 2;
        if (!is_wanted) continue;
        scan->next++;
        chain->member = member;
        chain->row = (int)(mcu / head->columns);
        chain->column = (int)(mcu % head->columns);
        chain->num_left = (int)(head->interval ? count : num_needed);
        chain->is_whole = chain->num_left == count;
        chain->bit = 8 * (uint64_t)(uintptr_t)chain->data.bytes;
        chain->stop = 8 * (uint64_t)(uintptr_t)to;
        return true;
    }
    member->has_more = false;
    if (scan->next < scan->num_intervals && scan->next * scan->interval < num_needed) member->is_good = false;
    return false;
}
