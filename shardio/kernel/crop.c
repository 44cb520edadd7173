// Find the MCUs that the crops of an image need, and render the crops.

#include "resize.h"

// Convert a box of the upright picture to a box of the stored picture, which has `height` × `width` pixels.
static Box find_stored_box(Box box, int turn, int64_t height, int64_t width) {
    if (turn & TRANSPOSED) box = (Box){box.left, box.top, box.width, box.height};
    if (turn & UPSIDE_DOWN) box.top = height - box.top - box.height;
    if (turn & MIRRORED) box.left = width - box.left - box.width;
    return box;
}

// Extend the needed box of an upright picture to include what a crop needs. Return whether the crop can be rendered.
static bool add_crop(const Plan *plan, const Row *row, int64_t height, int64_t width, Box *box) {
    if (plan->top < 0 || plan->left < 0 || plan->height < 1 || plan->width < 1) return false;
    if (plan->top > height - plan->height || plan->left > width - plan->width) return false;
    if (plan->new_height < 1 || plan->new_width < 1) return false;
    if (plan->new_height > MAX_NEW_SIDE || plan->new_width > MAX_NEW_SIDE) return false;
    Range rows = find_visible(plan->window_top, plan->new_height, row->height);
    Range columns = find_visible(plan->window_left, plan->new_width, row->width);
    if (rows.start >= rows.stop || columns.start >= columns.stop) return false;
    rows = find_needed(plan->height, plan->new_height, plan->window_top + rows.start, plan->window_top + rows.stop,
                       plan->resampling);
    columns = find_needed(plan->width, plan->new_width, plan->window_left + columns.start,
                          plan->window_left + columns.stop, plan->resampling);
    int64_t bottom = max(box->top + box->height, plan->top + rows.stop);
    int64_t right = max(box->left + box->width, plan->left + columns.stop);
    box->top = min(box->top, plan->top + rows.start);
    box->left = min(box->left, plan->left + columns.start);
    box->height = bottom - box->top;
    box->width = right - box->left;
    return true;
}

bool add_crops(const Image *image, const Plan *plans, const Row *rows, int64_t num_crops, Member *member) {
    const Head *head = &member->head;
    bool is_transposed = image->turn & TRANSPOSED;
    int64_t height = is_transposed ? head->width : head->height, width = is_transposed ? head->height : head->width;
    Box box = {height, width, -height, -width};
    for (int64_t i = 0; i < num_crops; i++) {
        if (plans[i].height && !add_crop(&plans[i], &rows[i], height, width, &box)) return false;
    }
    if (box.height <= 0) return false;  // There is no crop.
    Region *region = &member->region;
    region->upright = box;
    region->box = box = find_stored_box(box, image->turn, head->height, head->width);
    // Where chroma is subsampled, one more sample is needed, from which libjpeg interpolates (jdsample.c).
    int64_t down = 8 * head->down, across = 8 * head->across;
    int64_t margin_down = head->down > 1 ? head->down : 0, margin_across = head->across > 1 ? head->across : 0;
    region->first_row = (int)(max(box.top - margin_down, 0) / down);
    region->stop_row = (int)min((box.top + box.height + margin_down + down - 1) / down, head->rows);
    region->first_column = (int)(max(box.left - margin_across, 0) / across);
    region->stop_column = (int)min((box.left + box.width + margin_across + across - 1) / across, head->columns);
    int num_first = head->across * head->down;  // The number of blocks of the first component; the rest have one each.
    member->num_blocks = num_first + head->num_components - 1;
    for (int block = 0; block < member->num_blocks; block++)
        member->component[block] = (uint8_t)max(block - num_first + 1, 0);
    return true;
}

// ------------------------------------------------------------------------------------------------------- Rendering

// A picture from which rows are read.
typedef struct {
    const Member *member;
    Workspace *work;
    const Plan *plan;
    int64_t start, stop;       // The columns that the crop needs.
    const uint8_t *turned[3];  // The colors of the region's box, turned upright; or NULL.
} Picture;

static Pixels read_row(const void *source, int64_t row, int place) {
    const Picture *picture = source;
    const Region *region = &picture->member->region;
    Pixels pixels;
    if (picture->turned[0]) {
        int64_t at = (row + picture->plan->top - region->upright.top) * region->upright.width + picture->plan->left -
                     region->upright.left;
        for (int c = 0; c < 3; c++) pixels.colors[c] = picture->turned[c] + at;
        return pixels;
    }
    int64_t shift = picture->plan->left - 8 * (int64_t)picture->member->head.across * region->first_column;
    pixels = make_row(picture->member, row + picture->plan->top, shift + picture->start, shift + picture->stop, place,
                      picture->work);
    for (int c = 0; c < 3; c++) pixels.colors[c] += shift;
    return pixels;
}

// Copy the region's box to other memory, in the order of the upright picture.
static bool turn_box(Picture *picture, int turn) {
    const Member *member = picture->member;
    const Region *region = &member->region;
    Box box = region->box;
    int64_t size = box.height * box.width, shift = box.left - 8 * (int64_t)member->head.across * region->first_column;
    if (!reserve(&picture->work->turned, (size_t)(3 * size + 2 * MARGIN))) return false;
    int64_t down = turn & TRANSPOSED ? 1 : box.width, across = turn & TRANSPOSED ? box.height : 1, first = 0;
    if (turn & UPSIDE_DOWN) {
        first += (box.height - 1) * down;
        down = -down;
    }
    if (turn & MIRRORED) {
        first += (box.width - 1) * across;
        across = -across;
    }
    uint8_t *turned = picture->work->turned.bytes + MARGIN;
    for (int64_t row = 0; row < box.height; row++) {
        Pixels pixels = make_row(member, box.top + row, shift, shift + box.width, 0, picture->work);
        for (int c = 0; c < 3; c++) {
            uint8_t *out = turned + c * size + first + row * down;
            for (int64_t column = 0; column < box.width; column++)
                out[column * across] = pixels.colors[c][shift + column];
        }
    }
    for (int c = 0; c < 3; c++) picture->turned[c] = turned + c * size;
    return true;
}

// Copy rows of a crop that is not resized.
static void copy_rows(const Window *window, const Picture *picture) {
    const Member *member = picture->member;
    const Plan *plan = picture->plan;
    bool is_same = member->head.is_interleaved && !picture->turned[0] && window->column_step > 0;
    int64_t first = window->first_column;
    if (window->column_step < 0) first -= COLUMNS - 1;
    for (int64_t i = 0; i < window->num_rows; i++) {
        if (is_same) {
            const uint8_t *row = find_samples(member, 0, plan->top + window->first_row + i);
            memcpy(window->out + i * window->out_stride, row + 3 * (plan->left + first),
                   (size_t)(3 * window->num_columns));
            continue;
        }
        Pixels pixels = read_row(picture, window->first_row + i, 0);
        uint8_t *out = window->out + i * window->out_stride;
        for (int64_t at = 0; at < window->num_columns; at += COLUMNS) {
            u8x32 colors[3];
            for (int c = 0; c < 3; c++) {
                colors[c] = LOAD(u8x32, pixels.colors[c] + first + at * window->column_step);
                if (window->column_step < 0)
                    colors[c] =
                        __builtin_shufflevector(colors[c], colors[c], 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20,
                                                19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            }
            join_some_colors(colors[0], colors[1], colors[2], window->num_columns - at, out + 3 * at);
        }
    }
}

static bool render_crop(Picture *picture, const Plan *plan, const Row *row) {
    Range rows = find_visible(plan->window_top, plan->new_height, row->height);
    Range columns = find_visible(plan->window_left, plan->new_width, row->width);
    bool is_filled = rows.start == 0 && columns.start == 0 && rows.stop == row->height && columns.stop == row->width;
    if (!is_filled)
        memset(row->pixels, 0, 3 * (size_t)(row->height * row->width));  // Pixels beyond the resized part are black.
    int64_t left = plan->is_flipped ? row->width - columns.stop : columns.start;
    Window window = {
        .plan = plan,
        .first_row = plan->window_top + rows.start,
        .num_rows = rows.stop - rows.start,
        .first_column = plan->window_left + (plan->is_flipped ? columns.stop - 1 : columns.start),
        .num_columns = columns.stop - columns.start,
        .column_step = plan->is_flipped ? -1 : 1,
        .out = row->pixels + 3 * (rows.start * row->width + left),
        .out_stride = 3 * row->width,
    };
    Range needed = find_needed(plan->width, plan->new_width, plan->window_left + columns.start,
                               plan->window_left + columns.stop, plan->resampling);
    picture->plan = plan;
    picture->start = needed.start;
    picture->stop = needed.stop;
    if (plan->new_height == plan->height && plan->new_width == plan->width) {
        copy_rows(&window, picture);
        return true;
    }
    if (plan->resampling == OPENCV_BILINEAR) return resize_bilinear(&window, read_row, picture, picture->work);
    return resize_antialiased(&window, read_row, picture, picture->work);
}

bool render_crops(Member *member, Workspace *work) {
    const Call *call = work->call;
    int64_t i = member->index;
    Picture picture = {.member = member, .work = work};
    if (!reserve_row(member, work)) return false;
    if (!call->images[i].kept) extend_planes(member);
    if (call->images[i].turn && !turn_box(&picture, call->images[i].turn)) return false;
    for (int64_t j = i * call->num_crops; j < (i + 1) * call->num_crops; j++) {
        if (call->plans[j].height && !render_crop(&picture, &call->plans[j], &call->rows[j])) return false;
    }
    return true;
}
