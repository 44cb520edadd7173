"""Decode tiles with the stages of a device, run by the processor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from shardio.images.tiled import COUNTED, lay_out, locate
from shardio.kernel.functions import CHUNK_ALIGNMENT, Content, Functions, Kernel, count_chunk_bytes
from shardio.kernel.records import BATCH, CHUNK_PADDING, TARGET, TILED_IMAGE
from tests.images.pictures import Array

MAX_BYTES = 1 << 18
"""The number of bytes that an image's tiles may have here, even if its crops are small."""


def render_by_stages(
    functions: Functions,
    kernel: Kernel,
    images: Sequence[Content],
    plans: NDArray[np.void],
    turns: NDArray[np.uint8],
    shape: tuple[int, ...],
) -> tuple[NDArray[np.bool_], Array, NDArray[np.bool_]]:
    """Render equally sized crops of n images with the stages.

    Return which images have tiles, bool [n]; their crops, uint8 [n * crops, height, width, 3]; and which are damaged.
    """
    num_rows, height, width, _ = shape
    sizes = [(height, width)] * (num_rows // len(images))
    with patch("shardio.kernel.functions.count_image_bytes", lambda sizes: MAX_BYTES):
        chunk = np.zeros(count_chunk_bytes(len(images), sizes) + CHUNK_ALIGNMENT, np.uint8)
        chunk = chunk[-chunk.ctypes.data % CHUNK_ALIGNMENT :]
        is_tiled, num_used = kernel.collect(images, plans, sizes, chunk, turns)
    tiled = chunk[: len(images) * TILED_IMAGE.itemsize].view(TILED_IMAGE)
    for index in np.flatnonzero(~is_tiled):  # These images have pixels instead of tiles.
        tiled["pixels"][index] = num_used
        num_used += math.prod(shape) // len(images)
    num_used = -(-(num_used + CHUNK_PADDING) // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    crops, is_damaged = decode_tiles(functions, chunk[:num_used], len(images), sizes)
    return is_tiled, np.stack(crops, axis=1).reshape(shape), is_damaged


def decode_tiles(
    functions: Functions, memory: NDArray[np.uint8], num_images: int, sizes: Sequence[tuple[int, int]]
) -> tuple[list[Array], NDArray[np.bool_]]:
    """Decode n images of a chunk. Return the crops, each uint8 [n, height, width, 3], and which images are damaged."""
    images = memory[: num_images * TILED_IMAGE.itemsize].view(TILED_IMAGE)
    layout = lay_out(images[COUNTED], locate([(memory.ctypes.data, len(memory), num_images)]), sizes)
    crops = [np.full((num_images, *size, 3), 77, np.uint8) for size in sizes]
    targets = np.zeros(len(sizes), TARGET)
    for target, pixels in zip(targets, crops, strict=True):
        target["pixels"], (target["height"], target["width"]) = pixels.ctypes.data, pixels.shape[1:3]
        strides = ("image_stride", "row_stride", "column_stride", "color_stride")
        for name, stride in zip(strides, pixels.strides, strict=True):
            target[name] = stride
    arrays: dict[str, NDArray[Any]] = {name: np.zeros(-(-size // 8), np.int64) for name, size in layout.lengths.items()}
    arrays |= {"locations": layout.locations, "targets": targets, "is_damaged": np.zeros(num_images, np.int32)}
    batch = np.zeros(1, BATCH)
    batch["num_images"], batch["num_crops"] = num_images, len(sizes)
    for name, array in arrays.items():
        batch[name] = array.ctypes.data
    functions.decode_tiles(batch.ctypes.data)
    return crops, arrays["is_damaged"].astype(bool)
