"""The records that the kernel works with, defined for both numpy and numba.

All memory of a call of the kernel is one record, :data:`WORKSPACE`. Its untouched parts take no memory. Images that are
decoded together form a *group* and are its *members*. Streams that are decoded side by side are *chains*: each is a
chain of dependent steps.
"""

from __future__ import annotations

import numpy as np

from shardio.images.jpeg.standard import FIRST_AC_TABLE, MAX_CODE_LENGTH, MAX_TABLE_ID, NUM_HUFFMAN_TABLES

GROUP_SIZE = 3
NUM_CHAINS = 3
MAX_COMPONENTS = 3
LUMA_FACTORS = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1))
"""Sampling factors of the first component; the others have (1, 1): 4:4:4, 4:2:2, 4:2:0, 4:4:0 and 4:1:1."""

MAX_BLOCKS = 6
"""The maximum number of blocks in an MCU: that of 4:2:0 and 4:1:1."""

LOOKUP_BITS = 9
"""Codes of up to this many bits, 99 % of all, are decoded by one lookup."""

NUM_LOOKUPS = 3 + GROUP_SIZE * NUM_HUFFMAN_TABLES
AREA = 4096
"""States of the entropy decoder for one layout of MCUs."""

NUM_AREAS = 2 * GROUP_SIZE + 1
"""Two for each member, for MCUs that are needed and for the others, and one in which chains without a stream wait."""

MAX_PIXELS = 1 << 20
"""The maximum number of pixels in a region, including lanes without an MCU. Larger ones are left to libjpeg-turbo."""

MAX_BYTES = 3 << 20
"""The maximum number of bytes in all streams of a group."""

PADDING = 4096
"""Bytes after the unstuffed data. Decoding a damaged MCU may read beyond the end of its stream before that is noticed,
by up to 1,296 bytes: six blocks of 64 coefficients of 27 bits."""

MAX_STREAMS = 1 << 15
MAX_SIDE = 1 << 14
"""The maximum number of rows or columns of a crop, before and after resizing."""

MAX_TAPS = 6 * MAX_SIDE
"""The maximum number of pairs of weights for all rows, or for all columns, of an antialiased crop. Bicubic ones have up
to 2 pairs for each pixel before resizing, and 2 more for each one after it."""

MAX_RESIZED = 8 * MAX_PIXELS
"""The maximum number of bytes in the horizontally resized rows of an antialiased crop."""

LANES_AT_ONCE = 128
"""The number of MCUs whose pixels are computed at once, a multiple of 16."""

OPENCV_BILINEAR, PILLOW_BILINEAR, PILLOW_BICUBIC = range(3)
"""How to resize. Pillow's are antialiased."""


def _record(**fields: object) -> np.dtype[np.void]:
    return np.dtype(
        [(name, *(kind if isinstance(kind, tuple) else (kind,))) for name, kind in fields.items()], align=True
    )


HEAD = _record(
    height=np.int64,
    width=np.int64,
    num_components=np.int64,
    across=np.int64,  # The largest sampling factors: an MCU has 8 * across by 8 * down pixels.
    down=np.int64,
    rows=np.int64,  # The number of MCU rows.
    columns=np.int64,  # The number of MCUs in a row.
    interval=np.int64,  # MCUs between restart markers, or 0 without them.
    colour=np.int64,
    quantiser=(np.int64, MAX_COMPONENTS),  # The index of each component's quantisation table.
    dc_table=(np.int64, MAX_COMPONENTS),  # The indices of each component's Huffman tables.
    ac_table=(np.int64, MAX_COMPONENTS),
    quantisers=(np.uint16, (MAX_TABLE_ID + 1, 64)),  # In natural order.
    huffman=(np.int64, NUM_HUFFMAN_TABLES),  # The offset of each table's code counts in the data, or 0.
    scan_start=np.int64,
    tile_table=np.int64,  # The offset of the tile table's own header, or 0 without a tile table.
    tile_table_stop=np.int64,
)
"""The contents of a JPEG's head."""

REGION = _record(
    top=np.int64,  # The needed pixels, as a box of the upright picture.
    left=np.int64,
    height=np.int64,
    width=np.int64,
    first_row=np.int64,  # The needed MCUs.
    stop_row=np.int64,
    first_column=np.int64,
    stop_column=np.int64,
    stride=np.int64,  # Lanes from an MCU to the one below it.
    num_lanes=np.int64,
    num_blocks=np.int64,  # The number of blocks in an MCU.
    component=(np.int64, MAX_BLOCKS),  # The component of each block.
    coefficients=np.int64,  # The index of the region's first coefficient among those of the group.
    skipped=np.int64,  # The same for MCUs that are decoded but not needed: one row of them for each chain.
)
"""The part of an image that a crop needs, and its place in memory."""

STREAM = _record(
    member=np.int64,
    mcu=np.int64,  # Its first MCU, counted from the scan's first one.
    num_mcus=np.int64,  # How many of its MCUs are needed, from the first on.
    start=np.int64,  # Its first bit in the unstuffed data.
    stop=np.int64,  # The end of its last byte, in bits.
    is_whole=np.uint8,  # Whether the bits must end with the MCUs.
)
"""Entropy-coded data that can be decoded without the data before it."""

CHAIN = _record(
    index=np.int64,
    stream=np.int64,
    mcu=np.int64,  # The first MCU of the run being decoded, counted from the scan's first one.
    run=np.int64,  # The length of the run: MCUs of one row, either all needed or all not needed.
    num_left=np.int64,  # MCUs that follow in the stream.
    is_needed=np.uint8,
    start=np.uint64,  # The state in which an MCU begins.
    lookup=np.uint64,  # The first lookup table of an MCU.
    base=np.int64,  # The index of the run's first MCU among the coefficients.
    limit=np.uint64,  # The end of the stream, in bits.
    dc=(np.int64, MAX_COMPONENTS),  # The last DC coefficient of each component.
)
"""The progress of one of the streams that are decoded side by side."""

WORKSPACE = _record(
    is_prepared=np.uint8,
    heads=(HEAD, GROUP_SIZE),
    regions=(REGION, GROUP_SIZE),
    starts=(np.int64, GROUP_SIZE),  # The state in which an MCU begins.
    is_good=(np.uint8, GROUP_SIZE),  # Whether no damage has been found so far.
    indices=(np.int64, GROUP_SIZE),  # The index of each member in the chunk.
    streams=(STREAM, MAX_STREAMS),
    num_streams=np.int64,
    next_stream=np.int64,
    num_busy=np.int64,  # Chains that have a stream.
    bits=(np.uint8, MAX_BYTES + PADDING),  # The streams without stuffed bytes.
    num_bytes=np.int64,
    is_full=np.uint8,  # Whether an image did not fit only because of the other members.
    entries=(np.uint64, NUM_LOOKUPS << LOOKUP_BITS),  # What a code does, by its lookup table and the next nine bits.
    limits=(np.int64, (GROUP_SIZE, NUM_HUFFMAN_TABLES, MAX_CODE_LENGTH + 1)),  # For longer codes, see codes.py.
    offsets=(np.int64, (GROUP_SIZE, NUM_HUFFMAN_TABLES, MAX_CODE_LENGTH + 1)),
    symbols=(np.uint8, (GROUP_SIZE, NUM_HUFFMAN_TABLES, 256)),
    states=(np.uint64, NUM_AREAS * AREA),
    chains=(CHAIN, NUM_CHAINS),
    coefficients=(np.int16, GROUP_SIZE * 3 * MAX_PIXELS),
    num_coefficients=np.int64,
    between=(np.int16, 64 * LANES_AT_ONCE),  # Between the passes of the inverse DCT.
    chroma=(np.uint8, 2 * MAX_PIXELS),
    samples=(np.uint8, (3, 256 * LANES_AT_ONCE)),  # One for each pixel and component.
    sums=(np.int16, 8 * (LANES_AT_ONCE + 2)),
    places=(np.int64, MAX_PIXELS // 64),  # The index of the first pixel of each MCU.
    pixels=(np.uint32, MAX_PIXELS + 2 * MAX_SIDE),  # Pixels after a row's end are read, with a weight of 0.
    turned=(np.uint32, MAX_PIXELS + 2 * MAX_SIDE),  # The same, turned upright.
    columns=(np.int64, MAX_SIDE),  # The first pixel that each column of the result mixes or sums.
    column_weights=(np.uint32, MAX_SIDE),  # The weights of the two pixels that it mixes.
    column_taps=(np.uint32, (2, 4 * MAX_TAPS)),  # The weights of those that it sums.
    rows=(np.int64, MAX_SIDE),
    row_taps=(np.uint32, (2, MAX_TAPS)),
    resized_rows=(np.uint8, MAX_RESIZED),  # Rows to sum, resized horizontally.
    weights=(np.int32, (2, MAX_SIDE)),  # The weights of the two rows (or columns) that each row (or column) mixes.
    resized=(np.int16, (2, 3 * MAX_SIDE + 4)),  # Two rows, resized horizontally.
    kept=(np.int64, 2),  # The indices of these two rows.
)
"""The memory of a call of the kernel."""

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
    resampling=np.uint8,  # OPENCV_BILINEAR, PILLOW_BILINEAR or PILLOW_BICUBIC.
)
"""The plan of one crop."""

UPSIDE_DOWN, MIRRORED, TRANSPOSED = 1, 2, 4

IMAGE = _record(
    address=np.int64,  # The address of the file.
    length=np.int64,  # The bytes of the file.
    turn=np.uint8,  # How to turn the stored picture upright: UPSIDE_DOWN, MIRRORED and then TRANSPOSED, or'ed.
)
"""An image of a chunk."""

ROW = _record(
    address=np.int64,  # The address of uint8 [height, width, 3].
    height=np.int64,
    width=np.int64,
)
"""Where a crop belongs."""

CALL = _record(
    num_images=np.int64,
    num_crops=np.int64,  # How many crops to render of each image.
    images=np.int64,  # The address of IMAGE [num_images].
    plans=np.int64,  # The address of PLAN [num_images, num_crops].
    order=np.int64,  # The address of int64 [num_images]: the order in which to decode them.
    rows=np.int64,  # The address of ROW [num_images, num_crops].
    is_done=np.int64,  # The address of uint8 [num_images], set to 1 for each image whose crops are rendered.
    workspace=np.int64,  # The address of a WORKSPACE that nothing else uses during the call.
)
"""The arguments of :func:`shardio.images.kernel.compiled.chunk.decode_chunk`."""

HUFFMAN_TABLE = _record(
    lengths=(np.uint8, MAX_CODE_LENGTH),  # The number of codes of each length; zeros if there is no such table.
    symbols=(np.uint8, 256),  # In the order of their codes.
)
"""A Huffman table as in a DHT segment (B.2.4.2)."""

COMPONENT = _record(
    dc_table=np.int64,  # The index of its DC table.
    ac_table=np.int64,
    dc_read=np.int64,  # The last DC coefficient read, from which the next one is predicted.
    dc_written=np.int64,  # The last DC coefficient written. Predictions restart at other MCUs.
)
"""A component of a scan to recode."""

VALUE_BITS = 11
"""A token holds the index of a Huffman table, a symbol, and the value of the bits that follow the symbol's code:
``(table << 8 | symbol) << VALUE_BITS | value``."""

NO_TOKEN = (FIRST_AC_TABLE << 8 | 0xFF) << VALUE_BITS
"""A token that is written as nothing: no baseline image has its symbol."""

READER = _record(
    lookups=(np.uint64, NUM_HUFFMAN_TABLES << LOOKUP_BITS),  # By table and the next nine bits, see scan_reading.py.
    limits=(np.int64, (NUM_HUFFMAN_TABLES, MAX_CODE_LENGTH + 1)),  # For longer codes, see codes.py.
    offsets=(np.int64, (NUM_HUFFMAN_TABLES, MAX_CODE_LENGTH + 1)),
    symbols=(np.uint8, (NUM_HUFFMAN_TABLES, 256)),
    counts=(np.int64, NUM_HUFFMAN_TABLES << 8),  # How often each symbol occurs in the tokens: a result.
)
"""The tables for reading a scan."""

WRITER = _record(codes=(np.uint64, NUM_HUFFMAN_TABLES << 8))
"""The tables for writing a scan: see scan_writing.py."""

RECODED, DAMAGED, EXCESS_DATA, WRONG_MARKER, OUT_OF_RANGE = range(5)
"""The outcomes of reading a scan to recode it."""

READ_PADDING = 256
"""Bytes after the unstuffed data. Reading a damaged block may go on beyond the end of its restart interval before that
is noticed, by up to 217 bytes: coefficients of 27 bits (DC) and 63 times 26 bits (AC), and a word."""

SCAN = _record(
    data=np.int64,  # The address of uint8 [num_bytes]: the file from the scan's first byte on.
    num_bytes=np.int64,
    tables=np.int64,  # The address of HUFFMAN_TABLE [8].
    components=np.int64,  # The address of COMPONENT [num_components].
    num_components=np.int64,
    blocks=np.int64,  # The address of int64 [num_blocks]: the index of the component of each block of an MCU.
    num_blocks=np.int64,
    num_mcus=np.int64,
    old_interval=np.int64,  # MCUs between restart markers in the data; 0 if there are none.
    new_interval=np.int64,  # The same in the recoded data.
    reader=np.int64,  # The address of a READER.
    unstuffed=np.int64,  # The address of uint8 [num_unstuffed], for data without stuffed bytes.
    num_unstuffed=np.int64,  # num_bytes + READ_PADDING
    tokens=np.int64,  # The address of uint32 [max_tokens]: a result.
    max_tokens=np.int64,
    stops=np.int64,  # The address of int64 [num_intervals], the end of each new interval in the tokens: a result.
    num_intervals=np.int64,
    outcome=np.int64,  # RECODED or what is wrong; this and what follows is set by the call.
    mcu=np.int64,  # The MCU that was reached.
    num_tokens=np.int64,
    stop=np.int64,  # The offset of the scan's end in the data.
)
"""The arguments of :func:`shardio.images.kernel.compiled.scan_reading.read_scan`, and its results."""

CODED_SCAN = _record(
    tokens=np.int64,  # The address of uint32 [num_tokens].
    num_tokens=np.int64,
    stops=np.int64,  # The address of int64 [num_intervals], the end of each restart interval in the tokens.
    num_intervals=np.int64,
    tables=np.int64,  # The address of HUFFMAN_TABLE [8].
    writer=np.int64,  # The address of a WRITER.
    between=np.int64,  # The address of uint8 [between_size], for the data of an interval before stuffing.
    between_size=np.int64,
    out=np.int64,  # The address of uint8 [out_size], for the data: a result.
    out_size=np.int64,
    lengths=np.int64,  # The address of int64 [num_intervals], the bytes of each without its marker: a result.
    size=np.int64,  # The number of bytes written, set by the call.
)
"""The arguments of :func:`shardio.images.kernel.compiled.scan_writing.write_scan`, and its results."""

BEST_TABLE = _record(
    counts=(np.int64, 256),  # How often each symbol occurs.
    heap=(np.int64, 257),  # The trees that are not joined yet, see best_table.py.
    code_sizes=(np.int64, 257),
    others=(np.int64, 257),  # The next symbol in the same tree; -1 if there is none.
    num_codes=(np.int64, 258),  # By length; the first 17 are results.
    places=(np.int64, 258),  # By length: where the next symbol belongs.
    symbols=(np.int64, 257),  # Sorted by the lengths of their codes: a result.
    num_symbols=np.int64,  # A result.
)
"""The memory of :func:`shardio.images.kernel.compiled.best_table.make_best_table`: arguments, results, and between."""
