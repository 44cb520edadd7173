// Decode the images of a chunk, and render their crops.
//
// Up to three images are decoded at the same time: a chain that has finished its stream starts the next stream of
// the same image, or opens the next image. An image is rendered when its last stream has been decoded.

#include "decoder.h"

#include <stdlib.h>

// Whether each buffer has exactly the needed size, so that AddressSanitizer detects any access beyond its end.
#if __has_feature(address_sanitizer)
enum { ALLOCATES_EXACTLY = 1 };
#else
enum { ALLOCATES_EXACTLY = 0 };
#endif

bool reserve(Buffer *buffer, size_t size) {
    if (size <= buffer->size && !ALLOCATES_EXACTLY) return true;
    if (size > MAX_BUFFER) return false;
    free(buffer->bytes);
    if (!ALLOCATES_EXACTLY) size += size / 4;  // So that images of similar sizes need no new memory.
    buffer->bytes = malloc(size);
    buffer->size = buffer->bytes ? size : 0;
    return buffer->bytes != NULL;
}

// Free the memory that a very large image needed.
static void shrink(Buffer *buffer) {
    if (buffer->size <= MAX_KEPT) return;
    free(buffer->bytes);
    *buffer = (Buffer){0};
}

static bool open_head(const Image *image, Head *head) {
    if (image->kept) return read_kept_head(image->kept, head);
    if (image->num_channels) return describe_stored(image, head);
    return read_head(image->content, image->length, head);
}

static bool open_planes(const Image *image, Member *member) {
    if (image->kept) return open_kept(image->kept, member);
    if (image->num_channels) return read_stored(image, member);
    return image->key ? prepare_to_keep(member) : allocate_planes(member);
}

// Prepare to decode an image. Return false if the kernel cannot decode the image.
static bool open_image(int64_t index, Member *member, Workspace *work) {
    const Call *call = work->call;
    const Image *image = &call->images[index];
    if (!open_head(image, &member->head)) return false;
    if (!add_crops(image, call->plans + index * call->num_crops, call->rows + index * call->num_crops, call->num_crops,
                   member))
        return false;
    if (!open_planes(image, member)) return false;
    member->index = index;
    member->is_open = member->is_good = true;
    member->is_decoded = image->kept || image->num_channels || member->head.is_progressive;
    member->num_busy = 0;
    member->has_more = false;
    if (member->head.is_progressive) return decode_progressive(image->content, image->length, member, work);
    if (member->is_decoded) return true;
    prepare_quantizers(member);
    return open_scan(image->content, image->length, member) && make_tables(member, work);
}

static void close_image(Member *member, Workspace *work) {
    member->is_open = false;
    for (int i = 0; i < NUM_TABLES; i++) member->tables[i] = NULL;
    if (work->current == member) work->current = NULL;
}

bool open_next_image(Workspace *work) {
    Member *member = work->members;
    while (member->is_open) member++;  // A chain without a stream leaves at least one member free.
    while (work->next_image < work->call->num_images) {
        if (!open_image(work->call->order[work->next_image++], member, work)) {
            close_image(member, work);
        } else if (member->is_decoded) {
            finish_image(member, work);
        } else {
            work->current = member;
            return true;
        }
    }
    return false;
}

void finish_image(Member *member, Workspace *work) {
    const Call *call = work->call;
    const Image *image = &call->images[member->index];
    if (member->is_good && render_crops(member, work)) {
        call->is_done[member->index] = 1;
        if (image->key) keep(member, image, work);
    }
    close_image(member, work);
}

void shardio_decode_chunk(const Call *call) {
    Workspace *work = call->workspace;
    if (!work->is_prepared) prepare_tables(work);
    work->is_prepared = true;
    work->call = call;
    work->current = NULL;
    work->next_image = 0;
    for (int64_t i = 0; i < call->num_images; i++) call->is_done[i] = 0;
    decode_streams(work);
    Buffer *buffers[] = {&work->colors, &work->turned,       &work->columns, &work->rows, &work->resized,
                         &work->taps,   &work->coefficients, &work->scan,    &work->kept};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) shrink(buffers[i]);
    for (int i = 0; i < NUM_CHAINS; i++) {
        shrink(&work->members[i].memory);
        shrink(&work->chains[i].data);
    }
}
