// Run the stages of a device on a processor, one thread after another. This gives the same pixels, so the stages can be
// tested where there is no device.

#include "kernel.h"
#include "stages.h"

// The number of threads that an image needs in a stage.
static int64_t count_threads(const Batch *batch, int64_t i, int stage) {
    const TiledImage *image = find_image(&batch->locations[i]);
    int64_t num_mcus = (int64_t)image->num_rows * image->num_columns, num_lines = 0;
    for (int64_t j = 0; j < batch->num_crops; j++) num_lines += batch->targets[j].height + batch->targets[j].width;
    const int64_t counts[] = {NUM_LOOKUPS, num_lines, image->num_tiles, image->num_blocks * num_mcus,
                              image->upright.height * image->upright.width};
    return counts[stage];
}

void shardio_decode_tiles(const Batch *batch) {
    void (*const stages[])(const Batch *, int64_t, int64_t) = {make_lookup, find_weights, decode_tile, transform_block,
                                                               make_color};
    for (int stage = 0; stage < 5; stage++) {
        for (int64_t i = 0; i < batch->num_images; i++) {
            int64_t num_threads = count_threads(batch, i, stage);
            for (int64_t thread = 0; thread < num_threads; thread++) stages[stage](batch, i, thread);
        }
    }
    for (int64_t j = 0; j < batch->num_crops; j++) {
        for (int64_t i = 0; i < batch->num_images; i++) {
            for (int64_t thread = 0; thread < batch->targets[j].height * batch->targets[j].width; thread++)
                render_pixel(batch, i, j, thread);
        }
    }
}
