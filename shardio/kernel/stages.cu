// The stages as CUDA kernels. The first dimension of a grid counts the threads of an image, the second one the images,
// and the third one the crops.

#include "stages.h"

#define STAGE extern "C" __global__ void

static __device__ int64_t find_thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }

STAGE shardio_make_lookup(const Batch *batch) { make_lookup(batch, blockIdx.y, find_thread()); }
STAGE shardio_find_weights(const Batch *batch) { find_weights(batch, blockIdx.y, find_thread()); }
STAGE shardio_decode_tile(const Batch *batch) { decode_tile(batch, blockIdx.y, find_thread()); }
STAGE shardio_transform_block(const Batch *batch) { transform_block(batch, blockIdx.y, find_thread()); }
STAGE shardio_make_color(const Batch *batch) { make_color(batch, blockIdx.y, find_thread()); }
STAGE shardio_render_pixel(const Batch *batch) { render_pixel(batch, blockIdx.y, blockIdx.z, find_thread()); }
