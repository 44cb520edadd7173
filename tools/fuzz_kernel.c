// Let libFuzzer choose what the kernel decodes: inputs that reach new code are kept, and changed further.
//
// The first HEAD_BYTES bytes of an input make the plans of its crops, and the rest is a JPEG. fuzz_kernel.py says where
// clang and its sanitizers come from. To run it for an hour on one core:
//
//   python tools/fuzz_kernel.py --write-seeds seeds
//   clang-19 -g -O2 -march=native -std=gnu11 -fwrapv -Wno-psabi -fsanitize=fuzzer,address,undefined,float-cast-overflow
//   \
//       -fno-sanitize-recover=all -Ishardio/kernel tools/fuzz_kernel.c shardio/kernel/*.c -lm -o fuzz_kernel
//   mkdir -p found && ./fuzz_kernel -max_total_time=3600 -max_len=20000 -timeout=10 found seeds
//
// To repeat an input that libFuzzer saved: ./fuzz_kernel crash-...

#include "decoder.h"

#include <stdlib.h>
#include <string.h>

enum { CROP_BYTES = 11, NUM_CROPS = 2, HEAD_BYTES = 1 + NUM_CROPS * CROP_BYTES, MAX_PIXELS = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// A plan for a part of a picture. If all bytes are 0, the plan is for the whole picture, shrunk to sides of at most
// 100.
static Plan make_plan(const uint8_t *bytes, int64_t height, int64_t width) {
    Plan plan = {.top = bytes[0] * height / 256, .left = bytes[1] * width / 256};
    plan.height = height - plan.top - bytes[2] * (height - plan.top) / 256;
    plan.width = width - plan.left - bytes[3] * (width - plan.left) / 256;
    plan.new_height = bytes[4] ? bytes[4] : min(plan.height, 100);
    plan.new_width = bytes[5] ? bytes[5] : min(plan.width, 100);
    plan.window_top = (int8_t)bytes[6];
    plan.window_left = (int8_t)bytes[7];
    plan.is_flipped = bytes[8] & 1;
    plan.resampling = (uint8_t)(bytes[8] >> 1) % 4;
    return plan;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static Workspace workspace, *work = &workspace;
    memset(work->tables, 0, sizeof work->tables);  // Results must not depend on earlier inputs.
    if (size < HEAD_BYTES) return -1;
    Image image = {.content = data + HEAD_BYTES, .length = (int64_t)size - HEAD_BYTES, .turn = data[0] & 7};
    Head head;
    if (!read_head(image.content, image.length, &head)) return 0;
    int64_t height = head.height, width = head.width, order = 0;
    if (height * width > MAX_PIXELS) return -1;  // Larger images only take longer.
    if (image.turn & TRANSPOSED) {
        height = head.width;
        width = head.height;
    }
    Plan plans[NUM_CROPS];
    Row rows[NUM_CROPS];
    for (int i = 0; i < NUM_CROPS; i++) {
        const uint8_t *bytes = data + 1 + i * CROP_BYTES;
        plans[i] = make_plan(bytes, height, width);
        rows[i] = (Row){NULL, 1 + bytes[9] % 100, 1 + bytes[10] % 100};
        rows[i].pixels = malloc(3 * (size_t)(rows[i].height * rows[i].width));
    }
    uint8_t is_done;
    shardio_decode_chunk(&(Call){1, NUM_CROPS, &image, plans, &order, rows, &is_done, work});
    for (int i = 0; i < NUM_CROPS; i++) free(rows[i].pixels);
    return 0;
}
