"""The records that the kernel reads and writes: those of kernel.h, as numpy types."""

from __future__ import annotations

import numpy as np

LUMA_FACTORS = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1))
"""Sampling factors of the first component: 4:4:4, 4:2:2, 4:2:0, 4:4:0 and 4:1:1. Other components have (1, 1)."""

IMAGES_AT_ONCE = 3
"""The number of images whose decoding the kernel interleaves. With fewer images in a call, each image takes longer."""

OPENCV_BILINEAR, PILLOW_BILINEAR, PILLOW_BICUBIC, PILLOW_BOX = range(4)
"""Resampling methods. Pillow's methods use antialiasing."""

UPSIDE_DOWN, MIRRORED, TRANSPOSED = 1, 2, 4

WORKSPACE_BYTES = 1 << 20
"""The memory that decoding needs, in addition to the memory that the kernel allocates itself."""


def _record(**fields: object) -> np.dtype[np.void]:
    return np.dtype(
        [(name, *(kind if isinstance(kind, tuple) else (kind,))) for name, kind in fields.items()], align=True
    )


PLAN = _record(
    top=np.int64,  # The part of the upright picture to resize, in pixels.
    left=np.int64,
    height=np.int64,  # 0 if the crop is left out.
    width=np.int64,
    new_height=np.int64,  # The size of the resized part.
    new_width=np.int64,
    window_top=np.int64,  # The corner of the window to return, which may extend beyond the resized part.
    window_left=np.int64,
    is_flipped=np.uint8,  # Whether to mirror the window.
    resampling=np.uint8,  # OPENCV_BILINEAR, PILLOW_BILINEAR, PILLOW_BICUBIC or PILLOW_BOX.
)
"""The plan of one crop."""

IMAGE = _record(
    content=np.int64,  # The address of the JPEG or of the first pixel; 0 if the pixels are read from the file.
    length=np.int64,  # The number of bytes of the JPEG or of the pixels.
    kept=np.int64,  # The address of the kept image, or 0.
    key=np.uint64,  # The key under which to keep a JPEG, or 0 not to keep it.
    offset=np.int64,  # The offset of the first pixel in the file.
    height=np.int64,  # This field and the next three describe uncompressed pixels.
    width=np.int64,
    file=np.int32,  # The descriptor of an open file.
    num_channels=np.uint8,  # 1 for gray, 3 for color; 0 for a JPEG.
    turn=np.uint8,  # How to turn the stored picture upright: UPSIDE_DOWN, MIRRORED, then TRANSPOSED, ORed together.
)
"""An image in a chunk: a JPEG, a kept image, or uncompressed pixels, perhaps in a file."""

CACHE = _record(
    num_bytes=np.int64,  # The size of the memory.
    num_slots=np.int64,  # A power of two.
    used=np.int64,  # The number of bytes in use, beginning with the first.
    unused=(np.int64, 5),
)
"""The start of the memory for decoded images (kept.c)."""

SLOT = _record(
    key=np.uint64,  # 0 if the slot is free.
    offset=np.int64,  # The offset of the image in the cache's memory; 0 if there is no image yet.
)
"""A slot of a CACHE."""

ROW = _record(
    pixels=np.int64,  # The address of uint8 [height, width, 3].
    height=np.int64,
    width=np.int64,
)
"""The destination of a crop."""

CALL = _record(
    num_images=np.int64,
    num_crops=np.int64,  # The number of crops to render from each image.
    images=np.int64,  # The address of IMAGE [num_images].
    plans=np.int64,  # The address of PLAN [num_images, num_crops].
    order=np.int64,  # The address of int64 [num_images]: the order in which to decode the images.
    rows=np.int64,  # The address of ROW [num_images, num_crops].
    is_done=np.int64,  # The address of uint8 [num_images], set to 1 for each image whose crops are rendered.
    workspace=np.int64,  # The address of WORKSPACE_BYTES bytes that nothing else uses during the call.
    cache=np.int64,  # The address of a CACHE; 0 if no image is kept.
    cache_file=np.int64,  # The descriptor of the cache's memory.
)
"""The arguments of shardio_decode_chunk (chunk.c)."""

COLLECTION = _record(
    num_images=np.int64,
    num_crops=np.int64,  # The number of crops of each image.
    images=np.int64,  # The address of IMAGE [num_images].
    plans=np.int64,  # The address of PLAN [num_images, num_crops].
    rows=np.int64,  # The address of ROW [num_images, num_crops]: the sizes of the crops.
    max_bytes=np.int64,  # The number of bytes that an image may take, not counting its TILED_IMAGE.
    chunk=np.int64,  # Output: the address of uint8 [...], which tiles.h describes.
    is_done=np.int64,  # Output: the address of uint8 [num_images], whether each image's tiles are in the chunk.
    workspace=np.int64,  # As in a CALL.
    num_used=np.int64,  # Output: the number of bytes used in the chunk.
)
"""The arguments of shardio_collect_tiles (tiles.c), and its results."""

STORED_TABLE = _record(
    lengths=(np.uint8, 16),  # The number of codes of each length; zeros if there is no such table.
    symbols=(np.uint8, 256),  # The symbols, in the order of their codes.
)
"""A Huffman table as in a DHT segment (B.2.4.2)."""

MAX_TILED_TABLES = 4
"""The number of Huffman tables in a TILED_IMAGE."""

LOOKUP_BITS = 10
"""The number of bits that select an entry in a lookup table."""

CHUNK_PADDING = 8
"""The number of bytes after the data of a chunk of tiles."""

TILE = _record(
    offset=np.int64,  # The offset of the interval's data in the chunk.
    length=np.int64,
    row=np.int32,  # The position of the interval's first MCU in the picture.
    column=np.int32,
)
"""A restart interval for a device to decode."""

TILED_CROP = _record(
    plan=PLAN,
    height=np.int64,  # The size of the result.
    width=np.int64,
    taps_down=np.int64,  # The maximum number of pixels summed for a new pixel; 0 without resizing.
    taps_across=np.int64,
    weights=np.int64,  # The index of the crop's first element among the image's weights: see stages.h.
)
"""A crop for a device to render."""

TILED_IMAGE = _record(
    is_tiled=np.uint8,  # Whether the device decodes the image. If not, only ``pixels`` is meaningful.
    num_components=np.uint8,
    across=np.uint8,
    down=np.uint8,
    color=np.uint8,
    turn=np.uint8,
    num_blocks=np.uint8,  # The number of blocks in an MCU.
    dc_table=(np.uint8, 3),  # The index of each component's tables in ``tables``.
    ac_table=(np.uint8, 3),
    is_dc=(np.uint8, MAX_TILED_TABLES),  # Whether each table has codes of DC coefficients.
    height=np.int32,  # The size of the stored picture.
    width=np.int32,
    first_row=np.int32,  # The MCUs that the crops need.
    first_column=np.int32,
    num_rows=np.int32,
    num_columns=np.int32,
    interval=np.int32,  # The number of MCUs in each tile.
    num_tiles=np.int32,
    pixels=np.int64,  # The offset of the pixels of each crop, uint8 [height, width, 3].
    crops=np.int64,  # The offset of TILED_CROP [crops].
    tiles=np.int64,  # The offset of TILE [num_tiles].
    upright=(np.int64, 4),  # The pixels that the crops need, in the upright picture: top, left, height and width.
    num_samples=np.int64,  # The numbers of samples and weights: see stages.h.
    num_weights=np.int64,
    quantizers=(np.uint16, (3, 64)),  # The quantization table of each component, in zigzag order.
    tables=(STORED_TABLE, MAX_TILED_TABLES),
)
"""An image in a chunk. Offsets are relative to the chunk's first byte (tiles.h)."""

LOCATION = _record(
    chunk=np.int64,  # The address of the chunk.
    num_bytes=np.int64,  # The size of the chunk.
    index=np.int64,  # The index of the image in the chunk.
    block=np.int64,  # The image's first elements in the arrays of a BATCH.
    sample=np.int64,
    color=np.int64,
    weight=np.int64,
)
"""The place of an image in a chunk, and of its parts in the arrays of a BATCH."""

UINT8, FLOAT32, FLOAT16, BFLOAT16 = range(4)
"""The dtypes of a TARGET."""

TARGET = _record(
    pixels=np.int64,  # The address of the first pixel.
    height=np.int64,
    width=np.int64,
    image_stride=np.int64,  # In elements, like the strides that follow.
    row_stride=np.int64,
    column_stride=np.int64,
    color_stride=np.int64,
    dtype=np.int64,
    scale=(np.float32, 3),  # Each color becomes color * scale + shift, unless the dtype is UINT8.
    shift=(np.float32, 3),
)
"""The destination of one crop of each image."""

BATCH = _record(
    num_images=np.int64,
    num_crops=np.int64,
    locations=np.int64,  # The address of LOCATION [num_images].
    targets=np.int64,  # The address of TARGET [num_crops].
    lookups=np.int64,  # The address of uint16 [num_images, MAX_TILED_TABLES, 2 ** LOOKUP_BITS].
    weights=np.int64,  # The address of int64 [weights].
    coefficients=np.int64,  # The address of int16 [blocks, 64], in zigzag order; zeros before the first stage.
    samples=np.int64,  # The address of uint8 [samples].
    colors=np.int64,  # The address of uint32 [pixels].
    is_damaged=np.int64,  # Output: the address of int32 [num_images], zeros before the first stage.
)
"""A batch for a device to decode (stages.h)."""

COMPONENT = _record(
    dc_table=np.int64,  # The index of the component's DC table.
    ac_table=np.int64,
    dc_read=np.int64,  # The last DC coefficient read, from which the next one is predicted.
    dc_written=np.int64,  # The last DC coefficient written, from which the next one is predicted.
)
"""A component of a scan to recode."""

RECODED, DAMAGED, EXCESS_DATA, WRONG_MARKER, OUT_OF_RANGE, NO_END, MISSING_SCANS, UNSUPPORTED = range(8)
"""The outcomes of reading a scan to recode it."""

READ_PADDING = 4096
"""The number of bytes after the unstuffed data that reading a damaged block may reach (tokens.c and progressive.c)."""

SCAN_READING = _record(
    data=np.int64,  # The address of uint8 [num_bytes]: the file from the scan's start, or a whole progressive file.
    num_bytes=np.int64,
    tables=np.int64,  # The address of STORED_TABLE [8].
    components=np.int64,  # The address of COMPONENT [components].
    num_components=np.int64,
    blocks=np.int64,  # The address of int64 [num_blocks]: the component index of each block in an MCU.
    num_blocks=np.int64,
    num_mcus=np.int64,
    old_interval=np.int64,  # The number of MCUs between restart markers in the data; 0 if there are none.
    new_interval=np.int64,  # The number of MCUs between restart markers in the recoded data; 0 if there are none.
    unstuffed=np.int64,  # The address of uint8 [num_bytes + READ_PADDING], for data without stuffed bytes.
    coefficients=np.int64,  # The address of int16 [num_mcus, num_blocks, 64], for a progressive file.
    counts=np.int64,  # Output: the address of int64 [8, 256], how often each symbol occurs in the tokens.
    tokens=np.int64,  # Output: the address of uint32 [...]. See tokens.c for its length.
    stops=np.int64,  # Output: the address of int64 [intervals], the end of each new interval in the tokens.
    outcome=np.int64,  # RECODED or the problem. The call sets this field and the fields after it.
    reached=np.int64,  # The MCU that was reached, or the scan of a progressive file.
    num_tokens=np.int64,
    stop=np.int64,  # The offset of the scan's end in the data.
)
"""The arguments of shardio_read_scan and shardio_read_progressive (tokens.c), and their results."""

SCAN_WRITING = _record(
    tokens=np.int64,  # The address of uint32 [tokens].
    stops=np.int64,  # The address of int64 [num_intervals], the end of each restart interval in the tokens.
    num_intervals=np.int64,
    tables=np.int64,  # The address of STORED_TABLE [8].
    # The address of the output, uint8 [...], which the call fills with entropy-coded data. See tokens.c for its length.
    out=np.int64,
    lengths=np.int64,  # Output: the address of int64 [num_intervals], the size of each interval without its marker.
    size=np.int64,  # The number of bytes written, set by the call.
)
"""The arguments of shardio_write_scan (tokens.c), and its results."""

BEST_TABLE = _record(
    counts=(np.int64, 256),  # How often each symbol occurs.
    num_codes=(np.int64, 258),  # The number of codes of each length; the first 17 elements are outputs.
    symbols=(np.int64, 257),  # Output: the symbols, sorted by the lengths of their codes.
    num_symbols=np.int64,  # Output: the number of symbols with a code.
)
"""The arguments of shardio_make_best_table (best_table.c), and its results."""

OPERATION = _record(code=np.int64, numbers=(np.float64, 12))
"""An operation on the pixels of one image: see kernel/operations.py."""

EDIT = _record(
    num_images=np.int64,
    num_operations=np.int64,  # The number of operations for each image.
    rows=np.int64,  # The address of ROW [num_images].
    operations=np.int64,  # The address of OPERATION [num_images, num_operations].
    scratch=np.int64,  # The address of uint8 [scratch_length], for temporary pixels.
    scratch_length=np.int64,
)
"""The arguments of shardio_edit_images (edit.c)."""

NORMALIZATION = _record(
    num_pixels=np.int64,
    pixels=np.int64,  # The address of uint8 [num_pixels, 3].
    result=np.int64,  # The address of float32 [3, num_pixels].
    means=(np.float32, 3),
    deviations=(np.float32, 3),
)
"""The arguments of shardio_normalize_image (normalize.c)."""
