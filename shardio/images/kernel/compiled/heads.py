"""Read what decoding needs of a JPEG's head into one record (annex B)."""

from __future__ import annotations

import numpy as np

from shardio.images.jpeg.standard import (
    APP0,
    APP9,
    APP14,
    APP15,
    COM,
    DHT,
    DQT,
    DRI,
    FIRST_AC_TABLE,
    MAX_CODE_LENGTH,
    MAX_TABLE_ID,
    NATURAL_ORDER,
    SOF0,
    SOF1,
    SOI,
    SOS,
)
from shardio.images.jpeg.tile_table import SIGNATURE, VERSION
from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.records import LUMA_FACTORS

GRAY, YCC, RGB = 0, 1, 2
"""What the components of an image mean."""

JFIF_VERSION = 1
_JFIF, _ADOBE = np.frombuffer(b"JFIF\0", np.uint8), np.frombuffer(b"Adobe", np.uint8)
_TILES = np.frombuffer(SIGNATURE + bytes([VERSION, 0, 1]), np.uint8)  # The start of a table that has only one part.


@kernel_function
def read_head(data, head):
    """Read the head of a file, uint8 [n]. Return whether the kernel can decode it.

    Damaged and unusual files are left to libjpeg-turbo.
    """
    stop = len(data)
    head.num_components = 0
    head.interval = 0
    head.tile_table = 0
    head.huffman[:] = 0
    head.quantisers[:] = 0
    has_jfif, adobe = False, -1
    frame = 0
    if stop < 4 or data[0] != 0xFF or data[1] != SOI:
        return False
    at = 2
    while True:
        if at + 4 > stop or data[at] != 0xFF:
            return False
        while at + 4 < stop and data[at + 1] == 0xFF:  # Fill bytes (B.1.1.2).
            at += 1
        marker = data[at + 1]
        first = at + 4
        end = at + 2 + (np.int64(data[at + 2]) << 8 | np.int64(data[at + 3]))
        if end < first or end > stop:
            return False
        if marker == DQT:
            if not _read_quantisers(data, first, end, head):
                return False
        elif marker == DHT:
            if not _find_huffman_tables(data, first, end, head):
                return False
        elif marker in (SOF0, SOF1):
            if frame or not _read_frame(data, first, end, head):
                return False
            frame = first
        elif marker == DRI:
            if end - first != 2:
                return False
            head.interval = np.int64(data[first]) << 8 | np.int64(data[first + 1])
        elif marker == APP0:
            # jdmarker.c, examine_app0 and examine_app14.
            if end - first >= 14 and _starts_with(data, first, end, _JFIF):
                if data[first + 5] != JFIF_VERSION:  # libjpeg warns.
                    return False
                has_jfif = True
        elif marker == APP14:
            if end - first >= 12 and _starts_with(data, first, end, _ADOBE):
                adobe = np.int64(data[first + 11])
        elif marker == APP9:
            if _starts_with(data, first, end, _TILES):
                head.tile_table, head.tile_table_stop = first + len(_TILES), end
        elif marker == SOS:
            break
        elif not (APP0 <= marker <= APP15 or marker == COM):
            return False
        at = end
    if not frame or not _read_scan(data, first, end, frame, head):
        return False
    head.scan_start = end
    head.colour = _find_colour(data, frame, head.num_components, has_jfif, adobe)
    return head.colour >= 0


@kernel_function
def _starts_with(data, first, end, words):
    if end - first < len(words):
        return False
    is_equal = True
    for i in range(len(words)):
        is_equal &= data[first + i] == words[i]
    return is_equal


@kernel_function
def _read_quantisers(data, first, end, head):
    """Read a DQT segment (B.2.4.1)."""
    at = first
    while at < end:
        num_bytes, table_id = 1 + np.int64(data[at] >> 4), np.int64(data[at] & 15)
        at += 1
        if num_bytes > 2 or table_id > MAX_TABLE_ID or at + 64 * num_bytes > end:
            return False
        for i in range(64):
            value = np.int64(data[at])
            if num_bytes == 2:
                value = value << 8 | np.int64(data[at + 1])
            head.quantisers[table_id, NATURAL_ORDER[i]] = value
            at += num_bytes
    return True


@kernel_function
def _find_huffman_tables(data, first, end, head):
    """Store the offsets of the tables of a DHT segment (B.2.4.2)."""
    at = first
    while at < end:
        is_ac, table_id = data[at] >> 4, data[at] & 15
        if is_ac > 1 or table_id > MAX_TABLE_ID or at + 1 + MAX_CODE_LENGTH > end:
            return False
        num_symbols = 0
        for i in range(MAX_CODE_LENGTH):
            num_symbols += np.int64(data[at + 1 + i])
        if num_symbols > 256 or at + 1 + MAX_CODE_LENGTH + num_symbols > end:
            return False
        head.huffman[FIRST_AC_TABLE * is_ac + table_id] = at + 1
        at += 1 + MAX_CODE_LENGTH + num_symbols
    return True


@kernel_function
def _read_frame(data, first, end, head):
    """Read a frame header (B.2.2): 8 bits, one component or three; only the first may have more samples."""
    if end - first < 6 or data[first] != 8:
        return False
    head.height = np.int64(data[first + 1]) << 8 | np.int64(data[first + 2])
    head.width = np.int64(data[first + 3]) << 8 | np.int64(data[first + 4])
    num_components = np.int64(data[first + 5])
    if end - first != 6 + 3 * num_components or head.height == 0 or head.width == 0:
        return False
    if num_components != 1 and num_components != 3:
        return False
    head.num_components = num_components
    across, down = np.int64(data[first + 7] >> 4), np.int64(data[first + 7] & 15)
    if num_components == 1:
        if not (1 <= across <= 4 and 1 <= down <= 4):
            return False
        across = down = np.int64(1)  # Its MCU is one block, whatever the factors say (A.2.2).
    for c in range(num_components):
        if data[first + 8 + 3 * c] > MAX_TABLE_ID or (c > 0 and data[first + 7 + 3 * c] != 0x11):
            return False
        head.quantiser[c] = data[first + 8 + 3 * c]
    head.across, head.down = across, down
    head.rows = (head.height + 8 * down - 1) // (8 * down)
    head.columns = (head.width + 8 * across - 1) // (8 * across)
    is_supported = False
    for factors in LUMA_FACTORS:
        is_supported |= factors[0] == across and factors[1] == down
    return is_supported


@kernel_function
def _read_scan(data, first, end, frame, head):
    """Read a scan header (B.2.3): all components in one scan, and all of their coefficients."""
    n = head.num_components
    if end - first != 4 + 2 * n or data[first] != n:
        return False
    if data[end - 3] != 0 or data[end - 2] != 63 or data[end - 1] != 0:
        return False
    for c in range(n):
        table_ids = data[first + 2 + 2 * c]
        if table_ids >> 4 > MAX_TABLE_ID or table_ids & 15 > MAX_TABLE_ID:
            return False
        if data[first + 1 + 2 * c] != data[frame + 6 + 3 * c]:
            return False
        head.dc_table[c], head.ac_table[c] = np.int64(table_ids >> 4), np.int64(FIRST_AC_TABLE + (table_ids & 15))
        if head.huffman[head.dc_table[c]] == 0 or head.huffman[head.ac_table[c]] == 0:
            return False
        if head.quantisers[head.quantiser[c], 0] == 0:
            return False
    return True


@kernel_function
def _find_colour(data, frame, num_components, has_jfif, adobe):
    """Return what libjpeg takes the components for (jdapimin.c, default_decompress_parms), or -1 if it warns."""
    if num_components == 1:
        return GRAY
    if has_jfif:
        return YCC
    if adobe >= 0:
        if adobe > 1:
            return -1
        return RGB if adobe == 0 else YCC
    is_rgb = data[frame + 6] == 0x52 and data[frame + 9] == 0x47 and data[frame + 12] == 0x42  # "R", "G", "B"
    return RGB if is_rgb else YCC
