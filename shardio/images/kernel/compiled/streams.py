"""Split a scan into streams: the restart intervals that a part of the image needs, without stuffed bytes.

A stream can be decoded without the data before it: it is a restart interval, or the whole scan of an image without
restart markers (E.1.4 and F.1.2.3).
"""

from __future__ import annotations

import numpy as np

from shardio.images.jpeg.standard import EOI, RST0
from shardio.images.kernel.compiled.memory import COPIED_AT_ONCE, copy_up_to_ff, kernel_function
from shardio.images.kernel.compiled.records import PADDING

_ONE, _STEP = np.uint64(1), np.uint64(COPIED_AT_ONCE)


@kernel_function
def find_streams(data, member, work):
    """Append the streams that an image's region needs to the workspace's.

    Args:
        data: uint8, the file.
        member: The index of the image in the group.
        work: The workspace.

    Returns:
        Whether the scan looks intact and there is enough room. ``is_full`` says whether there is not enough room only
        because of the other members' streams.
    """
    head, region, stop = work.heads[member], work.regions[member], len(data)
    num_mcus = head.rows * head.columns
    interval = head.interval if head.interval else num_mcus
    num_intervals = (num_mcus + interval - 1) // interval
    if stop - head.scan_start < 2 or data[stop - 2] != 0xFF or data[stop - 1] != EOI:
        return False  # The file may be truncated below the part.
    lengths, length_bytes = _find_tile_table(data, head, num_intervals)
    at = head.scan_start
    for i in range(num_intervals):
        mcu = i * interval
        if mcu >= region.stop_row * head.columns:
            break
        count = min(interval, num_mcus - mcu)
        is_wanted = _meets(mcu, count, head.columns, region)
        end = at + _big_endian(data, lengths + i * length_bytes, length_bytes) if lengths else stop
        start = work.num_bytes
        if is_wanted or not lengths:
            if work.num_streams == len(work.streams) or start + (end - at) + PADDING > len(work.bits):
                work.is_full = member > 0
                return False
            found, after = unstuff(data, at, end, work.bits, start)
            if lengths and found != end:
                return False
            expected = EOI if i == num_intervals - 1 else RST0 + i % 8
            if not lengths and (found + 2 > stop or data[found + 1] != expected):
                return False
            end = found
            if is_wanted:
                stream = work.streams[work.num_streams]
                stream.member, stream.mcu, stream.num_mcus, stream.is_whole = member, mcu, count, 1
                if head.interval == 0:
                    stream.num_mcus = region.stop_row * head.columns
                    stream.is_whole = region.stop_row == head.rows
                stream.start, stream.stop = 8 * start, 8 * after
                work.num_streams += 1
                work.num_bytes = after
        at = end + 2
    return True


@kernel_function
def _meets(mcu, count, columns, region):
    """Return whether any MCU of a stream is in the region."""
    first_row, stop_row = region.first_row, region.stop_row
    first_column, stop_column = region.first_column, region.stop_column
    last = mcu + count - 1
    row, last_row = mcu // columns, last // columns
    if last_row < first_row or row >= stop_row:
        return False
    if row == last_row:
        return last - row * columns >= first_column and mcu - row * columns < stop_column
    if last_row - row > 1:
        return True
    if row >= first_row and mcu - row * columns < stop_column:
        return True
    return last_row < stop_row and last - last_row * columns >= first_column


@kernel_function
def _big_endian(data, at, num_bytes):
    value = np.int64(0)
    for i in range(num_bytes):
        value = value << 8 | np.int64(data[at + i])
    return value


@kernel_function
def _find_tile_table(data, head, num_intervals):
    """Return the offset of the intervals' lengths and the bytes of each length, or 0 and 0 without a table that fits.

    This reads tables that fill one segment: see :mod:`shardio.images.jpeg.tile_table`.
    """
    at, stop = head.tile_table, len(data)
    if at == 0 or head.interval == 0 or head.columns % head.interval or head.tile_table_stop - at < 11:
        return 0, 0
    num_bytes = np.int64(data[at + 6])
    fits = _big_endian(data, at, 2) == head.height and _big_endian(data, at + 2, 2) == head.width
    fits = fits and _big_endian(data, at + 4, 2) == head.interval and (num_bytes == 2 or num_bytes == 4)
    if not fits or head.tile_table_stop - (at + 11) != num_intervals * num_bytes:
        return 0, 0
    end = head.scan_start
    for i in range(num_intervals):
        end += _big_endian(data, at + 11 + i * num_bytes, num_bytes)
        expected = EOI if i == num_intervals - 1 else RST0 + i % 8
        if end + 2 > stop or data[end] != 0xFF or data[end + 1] != expected:
            return 0, 0
        end += 2
    if end - 2 - head.scan_start != _big_endian(data, at + 7, 4):
        return 0, 0
    return at + 11, num_bytes


@kernel_function
def unstuff(data, start, stop, out, num_bytes):
    """Copy entropy-coded bytes up to a marker, or to ``stop``, without the zero after each 0xFF.

    Bytes after the last one may be overwritten, but no more than were read.

    Returns:
        The offset at which it stopped, and the number of bytes in ``out``.
    """
    at, end, to = np.uint64(start), np.uint64(stop), np.uint64(num_bytes)
    while at < end:
        if at + _STEP <= end:
            num_copied = copy_up_to_ff(data, at, out, to)
        else:
            num_copied = np.uint64(0)
            while at + num_copied < end and data[at + num_copied] != 0xFF:
                out[to + num_copied] = data[at + num_copied]
                num_copied += _ONE
        at += num_copied
        to += num_copied
        if at < end and data[at] == 0xFF:
            if at + _ONE >= end or data[at + _ONE] != 0:
                break
            out[to] = 0xFF
            at += np.uint64(2)
            to += _ONE
    return np.int64(at), np.int64(to)
