// Collect the tiles that image crops need, so that a device can decode the tiles: see tiles.h.
//
// An image is left to the processor if it is not a baseline JPEG with a tile table, if a table is damaged, or if its
// tiles need more room than the pixels of its crops. So the chunk has room for the tiles or the pixels.

#include "decoder.h"
#include "weights.h"

#include <string.h>

// Take memory from the chunk. Return its offset, or -1 if there is no room.
static int64_t take_bytes(Collection *call, int64_t num_bytes, int64_t limit) {
    int64_t offset = (call->num_used + 15) / 16 * 16;
    if (num_bytes > limit - offset) return -1;
    call->num_used = offset + num_bytes;
    return offset;
}

// Copy a Huffman table. Return its index, or -1 if it is missing or damaged, or if there are too many tables.
static int add_table(const uint8_t *counts, bool is_dc, TiledImage *image, int *num_tables) {
    Codes codes;
    if (!counts || !number_codes(counts, counts + MAX_CODE_LENGTH, &codes)) return -1;
    StoredTable table = {0};
    int num_symbols = 0;
    for (int i = 0; i < MAX_CODE_LENGTH; i++) num_symbols += counts[i];
    memcpy(table.lengths, counts, MAX_CODE_LENGTH);
    memcpy(table.symbols, counts + MAX_CODE_LENGTH, (size_t)num_symbols);
    for (int i = 0; i < num_symbols; i++) {
        if (is_dc && table.symbols[i] > 15) return -1;
    }
    for (int i = 0; i < *num_tables; i++) {
        if (image->is_dc[i] == is_dc && !memcmp(&image->tables[i], &table, sizeof table)) return i;
    }
    if (num_symbols == 0 || *num_tables == MAX_TILED_TABLES) return -1;
    image->tables[*num_tables] = table;
    image->is_dc[*num_tables] = is_dc;
    return (*num_tables)++;
}

// Copy the tables of each component.
static bool add_tables(const Head *head, TiledImage *image) {
    int num_tables = 0;
    for (int c = 0; c < head->num_components; c++) {
        int dc = add_table(head->huffman[head->scan.dc_table[c]], true, image, &num_tables);
        int ac = add_table(head->huffman[head->scan.ac_table[c]], false, image, &num_tables);
        if (dc < 0 || ac < 0) return false;
        image->dc_table[c] = (uint8_t)dc;
        image->ac_table[c] = (uint8_t)ac;
        memcpy(image->quantizers[c], head->quantizers[head->quantizer[c]], sizeof image->quantizers[c]);
    }
    return true;
}

static int64_t count_plan_taps(int64_t num_before, int64_t num_after, int64_t start, int64_t num_in_window,
                               int resampling) {
    if (resampling == OPENCV_BILINEAR) return 2;
    Range visible = find_visible(start, num_after, num_in_window);
    return count_taps(num_before, num_after, start + visible.start, start + visible.stop, resampling);
}

static TiledCrop describe_crop(const Plan *plan, const Row *row, int64_t *num_weights) {
    TiledCrop crop = {.plan = *plan, .height = row->height, .width = row->width, .weights = *num_weights};
    if (plan->new_height == plan->height && plan->new_width == plan->width) return crop;
    crop.taps_down = count_plan_taps(plan->height, plan->new_height, plan->window_top, row->height, plan->resampling);
    crop.taps_across = count_plan_taps(plan->width, plan->new_width, plan->window_left, row->width, plan->resampling);
    *num_weights += row->height * (1 + crop.taps_down) + row->width * (1 + crop.taps_across);
    return crop;
}

// Copy the tiles of an image's region. Return whether there was room and no damage was found.
static bool add_tiles(Collection *call, Member *member, TiledImage *image, int64_t limit) {
    Chain *chain = &call->workspace->chains[0];
    const Region *region = &member->region;
    int first = region->first_column / image->interval;
    int stop = (region->stop_column + image->interval - 1) / image->interval;
    image->num_tiles = (stop - first) * (region->stop_row - region->first_row);
    image->tiles = take_bytes(call, image->num_tiles * (int64_t)sizeof(Tile), limit);
    if (image->tiles < 0) return false;
    Tile *tiles = (Tile *)(call->chunk + image->tiles);
    int num_tiles = 0;
    while (num_tiles < image->num_tiles && take_stream(member, chain)) {
        int64_t length = (int64_t)((chain->stop - chain->bit) / 8);
        if (length > limit - call->num_used) return false;
        memcpy(call->chunk + call->num_used, chain->data.bytes, (size_t)length);
        tiles[num_tiles++] = (Tile){call->num_used, length, chain->row, chain->column};
        call->num_used += length;
    }
    return num_tiles == image->num_tiles;
}

static bool collect_image(Collection *call, int64_t i, TiledImage *tiled) {
    const Image *image = &call->images[i];
    const Plan *plans = call->plans + i * call->num_crops;
    const Row *rows = call->rows + i * call->num_crops;
    Member *member = &call->workspace->members[0];
    const Head *head = &member->head;
    const Region *region = &member->region;
    if (image->kept || image->num_channels || !read_head(image->content, image->length, &member->head)) return false;
    if (head->is_progressive || !add_crops(image, plans, rows, call->num_crops, member)) return false;
    if (!open_scan(image->content, image->length, member) || !member->scan.lengths) return false;
    *tiled = (TiledImage){
        .num_components = (uint8_t)head->num_components,
        .across = (uint8_t)head->across,
        .down = (uint8_t)head->down,
        .color = (uint8_t)head->color,
        .turn = image->turn,
        .num_blocks = (uint8_t)member->num_blocks,
        .height = head->height,
        .width = head->width,
        .first_row = region->first_row,
        .first_column = region->first_column,
        .num_rows = region->stop_row - region->first_row,
        .num_columns = region->stop_column - region->first_column,
        .interval = head->interval,
        .upright = region->upright,
    };
    tiled->num_samples = 64 * (int64_t)tiled->num_blocks * tiled->num_rows * tiled->num_columns;
    if (!add_tables(head, tiled)) return false;
    int64_t limit = call->num_used + call->max_bytes;
    tiled->crops = take_bytes(call, call->num_crops * (int64_t)sizeof(TiledCrop), limit);
    if (tiled->crops < 0) return false;
    TiledCrop *crops = (TiledCrop *)(call->chunk + tiled->crops);
    for (int64_t j = 0; j < call->num_crops; j++) {
        if (!plans[j].height) return false;
        crops[j] = describe_crop(&plans[j], &rows[j], &tiled->num_weights);
    }
    tiled->is_tiled = add_tiles(call, member, tiled, limit);
    return tiled->is_tiled;
}

void shardio_collect_tiles(Collection *call) {
    TiledImage *images = (TiledImage *)call->chunk;
    call->num_used = call->num_images * (int64_t)sizeof(TiledImage);
    for (int64_t i = 0; i < call->num_images; i++) {
        int64_t before = call->num_used;
        call->is_done[i] = collect_image(call, i, &images[i]);
        if (call->is_done[i]) continue;
        images[i] = (TiledImage){0};
        call->num_used = before;
    }
}
