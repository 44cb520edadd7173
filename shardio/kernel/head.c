// Read the parts of a JPEG's head that decoding needs (annex B).

#include "decoder.h"

#include <string.h>

enum {
    SOF0 = 0xC0,
    SOF1 = 0xC1,
    SOF2 = 0xC2,
    DHT = 0xC4,
    DQT = 0xDB,
    DRI = 0xDD,
    APP0 = 0xE0,
    APP9 = 0xE9,
    APP14 = 0xEE,
    APP15 = 0xEF,
    COM = 0xFE,
};

static const uint8_t TILES[] = {'s', 'h', 'a', 'r', 'd', 'i',
                                'o', 0,   1,   0,   1};  // The first bytes of a one-segment tile table.

// The content of a segment, after the marker and the length: data[first] to data[end - 1].
typedef struct {
    const uint8_t *data;
    int64_t first, end;
} Segment;

static int read_16(const uint8_t *data) { return data[0] << 8 | data[1]; }

static bool starts_with(Segment segment, const void *bytes, int64_t count) {
    return segment.end - segment.first >= count && memcmp(segment.data + segment.first, bytes, (size_t)count) == 0;
}

// DQT: quantization tables (B.2.4.1).
static bool read_quantizers(Segment segment, Head *head) {
    for (int64_t at = segment.first; at < segment.end;) {
        int num_bytes = 1 + (segment.data[at] >> 4), id = segment.data[at] & 15;
        at++;
        if (num_bytes > 2 || id > MAX_TABLE_ID || at + 64 * num_bytes > segment.end) return false;
        for (int k = 0; k < 64; k++, at += num_bytes)
            head->quantizers[id][k] = (uint16_t)(num_bytes == 2 ? read_16(segment.data + at) : segment.data[at]);
    }
    return true;
}

// DHT: Huffman tables (B.2.4.2).
static bool find_huffman_tables(Segment segment, Head *head) {
    for (int64_t at = segment.first; at < segment.end;) {
        int is_ac = segment.data[at] >> 4, id = segment.data[at] & 15, num_symbols = 0;
        at++;
        if (is_ac > 1 || id > MAX_TABLE_ID || at + MAX_CODE_LENGTH > segment.end) return false;
        for (int i = 0; i < MAX_CODE_LENGTH; i++) num_symbols += segment.data[at + i];
        if (num_symbols > 256 || at + MAX_CODE_LENGTH + num_symbols > segment.end) return false;
        head->huffman[FIRST_AC_TABLE * is_ac + id] = segment.data + at;
        at += MAX_CODE_LENGTH + num_symbols;
    }
    return true;
}

// SOF: the frame header (B.2.2) of an 8-bit image with one component or three. Only the first component may have larger
// factors.
static bool read_frame(Segment segment, Head *head) {
    static const uint8_t FACTORS[] = {0x11, 0x21, 0x22, 0x12, 0x41};  // 4:4:4, 4:2:2, 4:2:0, 4:4:0 and 4:1:1.
    const uint8_t *frame = segment.data + segment.first;
    if (segment.end - segment.first < 6 || frame[0] != 8) return false;
    int count = frame[5];
    if ((count != 1 && count != 3) || segment.end - segment.first != 6 + 3 * count) return false;
    head->height = read_16(frame + 1);
    head->width = read_16(frame + 3);
    if (head->height == 0 || head->width == 0) return false;
    head->num_components = count;
    int factors = frame[7], across = factors >> 4, down = factors & 15;
    if (count == 1) {
        if (across < 1 || across > 4 || down < 1 || down > 4) return false;
        factors = 0x11;  // The MCU of a single component is one block, regardless of the factors (A.2.2).
        across = down = 1;
    }
    for (int c = 0; c < count; c++) {
        head->ids[c] = frame[6 + 3 * c];
        head->quantizer[c] = frame[8 + 3 * c];
        if (head->quantizer[c] > MAX_TABLE_ID || (c > 0 && frame[7 + 3 * c] != 0x11)) return false;
    }
    if (!memchr(FACTORS, factors, sizeof FACTORS)) return false;
    head->across = across;
    head->down = down;
    head->rows = (head->height + 8 * down - 1) / (8 * down);
    head->columns = (head->width + 8 * across - 1) / (8 * across);
    return true;
}

// SOS: the scan header (B.2.3). A baseline scan has all components, and all of their coefficients.
static bool read_scan(Segment segment, Head *head) {
    const uint8_t *data = segment.data + segment.first;
    ScanHeader *scan = &head->scan;
    if (segment.end - segment.first < 1) return false;
    int count = scan->num_components = data[0];
    if (count < 1 || count > head->num_components || segment.end - segment.first != 4 + 2 * count) return false;
    for (int i = 0, c = 0; i < count; i++, c++) {
        while (c < head->num_components && head->ids[c] != data[1 + 2 * i]) c++;
        int dc = data[2 + 2 * i] >> 4, ac = data[2 + 2 * i] & 15;
        if (c == head->num_components || dc > MAX_TABLE_ID || ac > MAX_TABLE_ID) return false;
        if (!head->quantizers[head->quantizer[c]][0]) return false;
        scan->components[i] = (uint8_t)c;
        scan->dc_table[i] = (uint8_t)dc;
        scan->ac_table[i] = (uint8_t)(FIRST_AC_TABLE + ac);
        if (!head->is_progressive && (!head->huffman[dc] || !head->huffman[FIRST_AC_TABLE + ac])) return false;
    }
    scan->start = data[1 + 2 * count];
    scan->end = data[2 + 2 * count];
    scan->high = data[3 + 2 * count] >> 4;
    scan->low = data[3 + 2 * count] & 15;
    if (head->is_progressive) return true;
    return count == head->num_components && scan->start == 0 && scan->end == 63 && scan->high == 0 && scan->low == 0;
}

// Find the color space that libjpeg assumes (jdapimin.c, default_decompress_parms). Return false if libjpeg would warn.
static bool find_color(Head *head) {
    const uint8_t *ids = head->ids;
    if (head->num_components == 1)
        head->color = GRAY;
    else if (head->has_jfif)
        head->color = YCC;
    else if (head->adobe > 1)
        return false;
    else if (head->adobe >= 0)
        head->color = head->adobe == 0 ? RGB : YCC;
    else
        head->color = ids[0] == 'R' && ids[1] == 'G' && ids[2] == 'B' ? RGB : YCC;
    return true;
}

int read_markers(const uint8_t *data, int64_t length, int64_t at, Head *head) {
    for (;;) {
        while (at + 2 < length && data[at] == 0xFF && data[at + 1] == 0xFF) at++;  // Fill bytes (B.1.1.2).
        if (at + 2 > length || data[at] != 0xFF) return 0;
        int marker = data[at + 1];
        if (marker == EOI) return EOI;
        if (at + 4 > length) return 0;
        Segment segment = {data, at + 4, at + 2 + read_16(data + at + 2)};
        if (segment.end < segment.first || segment.end > length) return 0;
        // Other markers are rare between scans. libjpeg dequantizes a component with the table that is in effect at the
        // component's first scan (jdinput.c).
        if (head->scan_start && marker != DHT && marker != DRI && marker != SOS) return 0;
        if (marker == DQT) {
            if (!read_quantizers(segment, head)) return 0;
        } else if (marker == DHT) {
            if (!find_huffman_tables(segment, head)) return 0;
        } else if (marker == SOF0 || marker == SOF1 || marker == SOF2) {
            if (head->num_components || !read_frame(segment, head)) return 0;
            head->is_progressive = marker == SOF2;
        } else if (marker == DRI) {
            if (segment.end - segment.first != 2) return 0;
            head->interval = read_16(data + segment.first);
        } else if (marker == APP0) {  // jdmarker.c, examine_app0 and examine_app14.
            if (segment.end - segment.first >= 14 && starts_with(segment, "JFIF", 5)) {
                if (data[segment.first + 5] != 1) return 0;  // libjpeg warns about other versions.
                head->has_jfif = true;
            }
        } else if (marker == APP14) {
            if (segment.end - segment.first >= 12 && starts_with(segment, "Adobe", 5))
                head->adobe = data[segment.first + 11];
        } else if (marker == APP9) {
            if (starts_with(segment, TILES, sizeof TILES)) {
                head->tile_table = segment.first + (int64_t)sizeof TILES;
                head->tile_table_stop = segment.end;
            }
        } else if (marker == SOS) {
            head->scan_start = segment.end;
            return read_scan(segment, head) ? SOS : 0;
        } else if (!(APP0 <= marker && marker <= APP15) && marker != COM) {
            return 0;
        }
        at = segment.end;
    }
}

bool read_head(const uint8_t *data, int64_t length, Head *head) {
    memset(head, 0, sizeof *head);
    head->adobe = -1;
    if (length < 4 || data[0] != 0xFF || data[1] != SOI) return false;
    return read_markers(data, length, 2, head) == SOS && find_color(head);
}

int64_t shardio_read_size(const uint8_t *content, int64_t length) {
    Head head;
    return read_head(content, length, &head) ? (int64_t)head.height << 32 | head.width : 0;
}
