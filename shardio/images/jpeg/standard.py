"""Constants of the JPEG standard, ITU-T Recommendation T.81 (ISO/IEC 10918-1).

Where comments in :mod:`shardio.images` name a section, table, figure or annex without a source, they refer to T.81.
"""

from __future__ import annotations

import numpy as np

# The second bytes of markers; the first is 0xFF (table B.1).
SOI, EOI, SOS, DQT, DHT, DRI, DAC, COM = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xCC, 0xFE
SOF0, SOF1, SOF2, SOF9, JPG = 0xC0, 0xC1, 0xC2, 0xC9, 0xC8
APP0, APP1, APP2, APP9, APP14, APP15 = 0xE0, 0xE1, 0xE2, 0xE9, 0xEE, 0xEF
RST0 = 0xD0
"""The first of eight restart markers, which are used in rotation: RST0 + i % 8 (E.1.4)."""

FRAME_MARKERS = frozenset(range(SOF0, SOF0 + 16)) - {DHT, JPG, DAC}
"""SOF0 to SOF15. Three markers in that range mean something else."""

MAX_SEGMENT_LENGTH = 65535
"""The maximum length of a segment in bytes, without its marker but with its two length bytes (B.1.1.4)."""

MAX_BLOCKS_IN_MCU = 10
"""The maximum number of blocks in an MCU, in a scan of several components (B.2.3)."""

USUAL_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in [(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (1, 4)])
"""Sampling factors of 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:4:1."""

MAX_TABLE_ID = 3
"""Quantization tables are numbered 0 to 3, and so are DC and AC Huffman tables (B.2.4)."""

FIRST_AC_TABLE = 4
NUM_HUFFMAN_TABLES = 8
"""The tables that a scan can name, in one sequence: DC 0 to 3, then AC 0 to 3."""

MAX_CODE_LENGTH = 16
"""The maximum length of a Huffman code in bits (C.1)."""

MAX_DC_SIZE, MAX_AC_SIZE = 11, 10
"""The maximum bits of a DC difference and of an AC coefficient in a baseline image of 8 bits (tables F.1 and F.2)."""

MAX_DC = 2047
"""The largest absolute value of a DC coefficient. The sum of the differences must fit into 12 bits."""

MAX_DC_SYMBOL = 15
"""libjpeg refuses DC tables with larger symbols, whether the scan uses them or not (jdhuff.c)."""

ICC_SIGNATURE = b"ICC_PROFILE\0"
"""The beginning of an APP2 segment that contains a part of a color profile (ICC.1:2022, annex B.4)."""

EOB, ZRL = 0x00, 0xF0
"""The AC symbols for the end of the block and for sixteen zeros (F.1.2.2)."""

NATURAL_ORDER = np.array(
    [
        *(0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5),
        *(12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28),
        *(35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51),
        *(58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63),
    ],
    np.int64,
)
"""int64 [64]: the index in a block, row by row, of each coefficient of the zigzag sequence (figure A.6)."""


def marker_bytes(marker: int) -> bytes:
    """Return a marker as it appears in a file."""
    return bytes([0xFF, marker])


JPEG_START = marker_bytes(SOI) + b"\xff"
"""The first bytes of a JPEG file: SOI and the start of another marker (B.2.1)."""
