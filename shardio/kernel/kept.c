// Decoded images that are kept in memory shared by processes, so that later epochs decode nothing.
//
// The memory holds a Cache, its slots, and the kept images one after another. A slot is found by an image's key,
// like an entry of a hash table with linear probing. Nothing is ever removed or moved. Processes take slots and memory
// with atomic operations, and publish an image's offset after its samples, so an incomplete image is never seen if
// its process ends while writing.
//
// A kept image consists of a KeptHead and the samples of each component as color.c reads them: each row has one extra
// sample on each side. Vector loads read up to MARGIN bytes after the last row.

#include "decoder.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    int64_t size;  // height << 32 | width
    uint8_t turn, num_components, across, down, color;
} KeptHead;

enum { ALIGNMENT = 64, MAX_PROBES = 64 };

_Static_assert(sizeof(Cache) % ALIGNMENT == 0, "slots are aligned");

// Return the slot of a key; NULL if the key has none, or there is no room for one.
static Slot *find_slot(Cache *cache, uint64_t key, bool is_added) {
    Slot *slots = (Slot *)(cache + 1);
    for (uint64_t i = 0; i < MAX_PROBES; i++) {
        Slot *slot = &slots[(key + i) & (uint64_t)(cache->num_slots - 1)];
        uint64_t found = __atomic_load_n(&slot->key, __ATOMIC_RELAXED);
        if (found == 0) {
            if (!is_added) return NULL;
            if (__atomic_compare_exchange_n(&slot->key, &found, key, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                return slot;
        }
        if (found == key) return slot;
    }
    return NULL;
}

const uint8_t *shardio_find_kept(Cache *cache, uint64_t key) {
    Slot *slot = find_slot(cache, key, false);
    int64_t offset = slot ? __atomic_load_n(&slot->offset, __ATOMIC_ACQUIRE) : 0;
    return offset ? (const uint8_t *)cache + offset : NULL;
}

static void use_whole_region(Member *member) {
    Region *region = &member->region;
    region->first_row = region->first_column = 0;
    region->stop_row = member->head.rows;
    region->stop_column = member->head.columns;
}

bool read_kept_head(const uint8_t *kept, Head *head) {
    const KeptHead *from = (const KeptHead *)kept;
    *head = (Head){
        .height = (int)(from->size >> 32),
        .width = (int)(from->size & 0xFFFFFFFF),
        .num_components = from->num_components,
        .across = from->across,
        .down = from->down,
        .color = (Color)from->color,
    };
    head->rows = (head->height + 8 * head->down - 1) / (8 * head->down);
    head->columns = (head->width + 8 * head->across - 1) / (8 * head->across);
    return true;
}

static int64_t count_stride(const Head *head, int component) { return count_across(head, component) + 2; }

bool open_kept(const uint8_t *kept, Member *member) {
    use_whole_region(member);
    uint8_t *samples = (uint8_t *)kept + ALIGNMENT + 1;
    for (int c = 0; c < member->head.num_components; c++) {
        member->planes[c] = (Plane){samples, count_stride(&member->head, c)};
        samples += member->planes[c].stride * count_down(&member->head, c);
    }
    return true;
}

bool prepare_to_keep(Member *member) {
    use_whole_region(member);
    return allocate_planes(member);
}

// Take memory. Return its offset, or 0 if there is not enough.
static int64_t take_memory(Cache *cache, int64_t num_bytes) {
    int64_t offset = __atomic_load_n(&cache->used, __ATOMIC_RELAXED);
    do {
        if (num_bytes > cache->num_bytes - offset) return 0;
    } while (!__atomic_compare_exchange_n(&cache->used, &offset, offset + num_bytes, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return offset;
}

// Write bytes to the cache's file: page faults in its memory would be slower. Return whether all were written.
static bool write_file(int file, const uint8_t *bytes, int64_t num_bytes, int64_t offset) {
    while (num_bytes > 0) {
        ssize_t num_written = pwrite(file, bytes, (size_t)num_bytes, offset);
        if (num_written < 0 && errno == EINTR) continue;
        if (num_written <= 0) return false;
        bytes += num_written;
        num_bytes -= num_written;
        offset += num_written;
    }
    return true;
}

void keep(const Member *member, const Image *image, Workspace *work) {
    const Head *head = &member->head;
    Cache *cache = work->call->cache;
    Slot *slot = find_slot(cache, image->key, true);
    if (!slot || __atomic_load_n(&slot->offset, __ATOMIC_RELAXED)) return;
    int64_t num_bytes = ALIGNMENT + MARGIN;
    for (int c = 0; c < head->num_components; c++) num_bytes += count_stride(head, c) * count_down(head, c);
    num_bytes = (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!reserve(&work->kept, (size_t)num_bytes)) return;
    uint8_t *out = work->kept.bytes;
    memset(out, 0, ALIGNMENT);
    *(KeptHead *)out = (KeptHead){(int64_t)head->height << 32 | head->width,
                                  image->turn,
                                  (uint8_t)head->num_components,
                                  (uint8_t)head->across,
                                  (uint8_t)head->down,
                                  (uint8_t)head->color};
    out += ALIGNMENT;
    for (int c = 0; c < head->num_components; c++) {
        const Plane *plane = &member->planes[c];
        int64_t stride = count_stride(head, c);
        for (int64_t row = 0; row < count_down(head, c); row++, out += stride)
            memcpy(out, plane->samples + row * plane->stride - 1, (size_t)stride);
    }
    memset(out, 0, (size_t)(work->kept.bytes + num_bytes - out));
    int64_t offset = take_memory(cache, num_bytes);
    if (offset && write_file((int)work->call->cache_file, work->kept.bytes, num_bytes, offset))
        __atomic_store_n(&slot->offset, offset, __ATOMIC_RELEASE);
}
