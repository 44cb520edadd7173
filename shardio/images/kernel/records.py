"""The records that the kernel works with, as numpy and numba both know them.

All memory of a call of the kernel is one record, :data:`WORKSPACE`; what was never used of it takes no memory. Images
that are decoded side by side each have a *seat*, streams that are decoded side by side are its *chains*.
"""

from __future__ import annotations

import numpy as np

MAX_SEATS = 3
NUM_CHAINS = 3
MAX_COMPONENTS = 3
LUMA_FACTORS = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1))
"""Sampling factors of the first component, the others having (1, 1): 4:4:4, 4:2:2, 4:2:0, 4:4:0 and 4:1:1."""

MAX_BLOCKS = 6
"""Of an MCU: those of 4:2:0 and 4:1:1."""

NUM_SLOTS = 8
"""Huffman tables that a file can have: DC 0 to 3, then AC 0 to 3 (ITU-T T.81, B.2.4.2)."""

FIRST_AC_SLOT = 4

SHORT = 9
"""Bits of the codes that are found by one look: 99 % of all."""

MAX_LENGTH = 16
"""Bits of a code at the most."""

NUM_TABLES = 3 + MAX_SEATS * NUM_SLOTS
AREA = 4096
"""States of the entropy decoder for one layout of MCUs."""

NUM_AREAS = 2 * MAX_SEATS + 1
"""Two for each seat, for MCUs that are needed and those that are not; and one where chains wait that have no stream."""

MAX_PIXELS = 1 << 20
"""Of a region, with its lanes that are no MCUs; what is larger is left to libjpeg-turbo."""

MAX_BYTES = 3 << 20
"""Of the streams of images that are decoded side by side."""

PADDING = 4096
"""Bytes behind the unstuffed data. A damaged MCU may take bits beyond its stream's end, which is noticed behind it: six
blocks of 64 coefficients of 27 bits are 1,296 bytes."""

MAX_STREAMS = 1 << 15
MAX_SIDE = 1 << 14
"""Rows and columns of a crop, before and after it is resized."""


def _record(**fields: object) -> np.dtype[np.void]:
    return np.dtype(
        [(name, *(kind if isinstance(kind, tuple) else (kind,))) for name, kind in fields.items()], align=True
    )


HEAD = _record(
    height=np.int64,
    width=np.int64,
    num_components=np.int64,
    across=np.int64,  # The largest sampling factors: an MCU has 8 times as many pixels.
    down=np.int64,
    rows=np.int64,  # Of MCUs.
    columns=np.int64,
    interval=np.int64,  # MCUs between restart markers; 0 without them.
    colour=np.int64,
    quantiser=(np.int64, MAX_COMPONENTS),  # The number of each component's quantisation table,
    dc_slot=(np.int64, MAX_COMPONENTS),  # and those of its Huffman tables.
    ac_slot=(np.int64, MAX_COMPONENTS),
    quantisers=(np.uint16, (4, 64)),  # In natural order.
    huffman=(np.int64, NUM_SLOTS),  # Where the table's numbers of codes lie in the data; 0 where there is none.
    scan_start=np.int64,
    tile_table=np.int64,  # Where the tile table's own header lies; 0 where there is none.
    tile_table_stop=np.int64,
)
"""What a JPEG's head says."""

REGION = _record(
    first_row=np.int64,  # The needed MCUs.
    stop_row=np.int64,
    first_column=np.int64,
    stop_column=np.int64,
    stride=np.int64,  # Lanes from an MCU to the one below it.
    num_lanes=np.int64,
    num_blocks=np.int64,  # In an MCU.
    component=(np.int64, MAX_BLOCKS),  # Of each of them.
    coefficients=np.int64,  # Where the region's coefficients begin among those of all seats,
    skipped=np.int64,  # and where those of MCUs that are read and not needed, a row of them for each chain.
)
"""The part of a picture that a crop needs, and where it lies in memory."""

STREAM = _record(
    seat=np.int64,
    mcu=np.int64,  # Its first MCU, counted from the scan's first one.
    num_mcus=np.int64,  # How many of its MCUs are wanted, from the first on.
    start=np.int64,  # Its first bit in the unstuffed data,
    stop=np.int64,  # the end of its last byte, in bits,
    is_whole=np.uint8,  # and whether the bits must end where the MCUs do.
)
"""Entropy-coded data that can be decoded without what stands before."""

CHAIN = _record(
    number=np.int64,
    stream=np.int64,
    mcu=np.int64,  # The first MCU of the run that is being decoded, counted from the scan's first one.
    run=np.int64,  # How many MCUs it has: all needed, or none, and all of one row.
    left=np.int64,  # How many MCUs follow in the stream.
    is_needed=np.uint8,
    start=np.uint64,  # The state in which an MCU begins,
    table=np.uint64,  # its first table,
    base=np.int64,  # and the place of the run's first MCU among the coefficients.
    limit=np.uint64,  # Bits behind which there are none.
    dc=(np.int64, MAX_COMPONENTS),  # The last DC coefficient of each component.
)
"""Where one of the streams side by side is."""

WORKSPACE = _record(
    is_prepared=np.uint8,
    heads=(HEAD, MAX_SEATS),
    regions=(REGION, MAX_SEATS),
    starts=(np.int64, MAX_SEATS),  # The state in which an MCU begins.
    good=(np.uint8, MAX_SEATS),  # Whether nothing is wrong with the image so far.
    seated=(np.int64, MAX_SEATS),  # Which image of the chunk it is.
    streams=(STREAM, MAX_STREAMS),
    num_streams=np.int64,
    next_stream=np.int64,
    num_busy=np.int64,  # Chains that have a stream.
    bits=(np.uint8, MAX_BYTES + PADDING),  # The streams without stuffed bytes.
    num_bytes=np.int64,
    is_full=np.uint8,  # Whether there was no place for an image beside others.
    entries=(np.uint64, NUM_TABLES << SHORT),  # What a code does, by its table and the next nine bits.
    limits=(np.int64, (MAX_SEATS, NUM_SLOTS, MAX_LENGTH + 1)),  # For longer codes, see entropy.py.
    offsets=(np.int64, (MAX_SEATS, NUM_SLOTS, MAX_LENGTH + 1)),
    symbols=(np.uint8, (MAX_SEATS, NUM_SLOTS, 256)),
    states=(np.uint64, NUM_AREAS * AREA),
    chains=(CHAIN, NUM_CHAINS),
    coefficients=(np.int16, MAX_SEATS * 3 * MAX_PIXELS),
    num_coefficients=np.int64,
    between=(np.int16, MAX_PIXELS),  # Between the passes of the inverse DCT.
    samples=(np.uint8, 6 * MAX_PIXELS),
    sums=(np.int16, MAX_PIXELS // 8 + 64),
    pixels=(np.uint32, MAX_PIXELS),
    columns=(np.int64, (2, MAX_SIDE)),  # Which two pixels each column of the result is mixed of,
    column_weights=(np.uint32, MAX_SIDE),  # and how.
    rows=(np.int64, MAX_SIDE),
    weights=(np.int32, (2, MAX_SIDE)),  # Of the two rows, or columns, that each of the result is mixed of.
    resized=(np.int16, (2, 3 * MAX_SIDE + 1)),  # Two rows, resized across,
    kept=(np.int64, 2),  # and which they are.
)
"""What a call of the kernel works in."""

PLAN = _record(
    top=np.int64,  # A part of the picture, in pixels,
    left=np.int64,
    height=np.int64,
    width=np.int64,
    new_height=np.int64,  # what it is resized to,
    new_width=np.int64,
    window_top=np.int64,  # of that a window, which may reach beyond,
    window_left=np.int64,
    is_flipped=np.uint8,  # and whether that is mirrored.
)
"""What is to be made of an image."""

CALL = _record(
    num_images=np.int64,
    files=np.int64,  # The address of int64 [num_images]: the files' addresses.
    lengths=np.int64,  # Of int64 [num_images]: the bytes of each.
    plans=np.int64,  # Of PLAN [num_images].
    order=np.int64,  # Of int64 [num_images]: in which order to decode them.
    rows=np.int64,  # Of uint8 [num_images, height, width, 3]: where the results go.
    height=np.int64,
    width=np.int64,
    is_done=np.int64,  # Of uint8 [num_images]: 1 for each image that was drawn.
    workspace=np.int64,  # Of a WORKSPACE that nobody else uses meanwhile.
)
"""What the kernel is called with."""
