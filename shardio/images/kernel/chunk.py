"""A chunk of JPEGs, from files to the rows of a batch: what is done in turn, for up to three images side by side."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.codes import lay_out_states, prepare_tables, read_huffman_tables
from shardio.images.kernel.colour import convert_ycc, join_colours
from shardio.images.kernel.entropy import decode_streams
from shardio.images.kernel.heads import GRAY, RGB, read_head
from shardio.images.kernel.idct import transform_block
from shardio.images.kernel.memory import compiled, pointer, shaped
from shardio.images.kernel.records import MAX_PIXELS, MAX_SEATS, MAX_SIDE, NUM_CHAINS
from shardio.images.kernel.regions import lay_out_region
from shardio.images.kernel.resizing import find_range, find_sources, mix_rows, resize_row
from shardio.images.kernel.streams import find_streams
from shardio.images.kernel.upsampling import extend_borders, upsample

_ALIGNED = 32
"""Coefficients in a line of the cache."""


@compiled
def decode_chunk(files, lengths, plans, order, rows, is_done, work):
    """Decode, crop, resize and mirror some JPEGs into the rows of a batch.

    Args:
        files: int64 [n], the files' addresses.
        lengths: int64 [n], the bytes of each.
        plans: PLAN [n].
        order: int64 [n], in which order to decode them. Neighbours are decoded side by side, until they have as many
            streams as are decoded at once: a tiled image is alone. Best, neighbours take equally long.
        rows: uint8 [n, height, width, 3], for the results.
        is_done: uint8 [n], to be made 1 for each image that is drawn. All others are left to libjpeg-turbo: they are
            damaged, or none that this is made for.
        work: A WORKSPACE that nobody else uses meanwhile.
    """
    if not work.is_prepared:
        prepare_tables(work)
        work.is_prepared = 1
    is_done[:] = 0
    num_seated = 0
    _clear_seats(work)
    for i in order:
        data = carray(pointer(files[i]), lengths[i], np.uint8)
        height, width = rows.shape[1], rows.shape[2]
        is_seated = _take_seat(data, plans[i], height, width, num_seated, work)
        if not is_seated and work.is_full:
            _empty_seats(num_seated, plans, rows, is_done, work)
            num_seated = 0
            is_seated = _take_seat(data, plans[i], height, width, num_seated, work)
        if is_seated:
            work.seated[num_seated] = i
            num_seated += 1
        if num_seated == MAX_SEATS or work.num_streams >= NUM_CHAINS:
            _empty_seats(num_seated, plans, rows, is_done, work)
            num_seated = 0
    _empty_seats(num_seated, plans, rows, is_done, work)


@compiled
def _empty_seats(num_seated, plans, rows, is_done, work):
    """Decode and draw the images that have seats."""
    decode_streams(work)
    for seat in range(num_seated):
        if work.good[seat] and _make_pixels(seat, work):
            i = work.seated[seat]
            _draw(seat, plans[i], rows[i], work)
            is_done[i] = 1
    _clear_seats(work)


@compiled
def _clear_seats(work):
    work.num_streams = work.num_bytes = 0
    work.num_coefficients = 1  # The first one is where chains write that have no stream.


@compiled
def _take_seat(data, plan, height, width, seat, work):
    """Prepare to decode an image beside those that have a seat already.

    Args:
        data: uint8, its file.
        plan: What is to be made of it.
        height: Of its row of the batch.
        width: Of that.
        seat: Its number.
        work: The workspace.

    Returns:
        Whether it can be decoded. If it can but for those that have a seat, ``is_full`` says so.
    """
    work.is_full = 0
    head, region = work.heads[seat], work.regions[seat]
    if not read_head(data, head):
        return False
    if plan.top < 0 or plan.left < 0 or plan.height < 1 or plan.width < 1:
        return False
    if plan.top > head.height - plan.height or plan.left > head.width - plan.width:
        return False
    if max(plan.height, plan.width, plan.new_height, plan.new_width) > MAX_SIDE:
        return False
    top, bottom, left, right = _visible(plan, height, width)
    if top >= bottom or left >= right:
        return False
    first, behind = find_range(plan.height, plan.new_height, plan.window_top + top, plan.window_top + bottom)
    top, height = plan.top + first, behind - first
    first, behind = find_range(plan.width, plan.new_width, plan.window_left + left, plan.window_left + right)
    left, width = plan.left + first, behind - first
    lay_out_region(head, top, left, height, width, region)
    if 64 * head.across * head.down * (region.num_lanes + 2 * _margin(region)) > MAX_PIXELS:
        return False
    region.coefficients = (work.num_coefficients + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    region.skipped = region.coefficients + (1 + 64 * region.num_blocks) * region.num_lanes
    num_coefficients = region.skipped + NUM_CHAINS * (1 + region.num_blocks) * head.columns
    if num_coefficients > len(work.coefficients):
        work.is_full = seat > 0
        return False
    if not read_huffman_tables(data, seat, work):
        return False
    num_streams, num_bytes = work.num_streams, work.num_bytes
    if not find_streams(data, seat, work):
        work.num_streams, work.num_bytes = num_streams, num_bytes
        return False
    lay_out_states(seat, work)
    work.coefficients[region.coefficients + region.num_lanes : region.skipped] = 0
    work.num_coefficients = num_coefficients
    work.good[seat] = 1
    return True


@compiled
def _visible(plan, height, width):
    """Return which rows and columns of a window have something in them: where it does not reach beyond the picture."""
    top, bottom = max(-plan.window_top, 0), min(plan.new_height - plan.window_top, height)
    left, right = max(-plan.window_left, 0), min(plan.new_width - plan.window_left, width)
    return top, bottom, left, right


@compiled
def _margin(region):
    return region.stride + 1


@compiled
def _make_pixels(seat, work):
    """Make pixels of coefficients; return whether the numbers are such as libjpeg-turbo computes with.

    Pixels are uint32 [rows of an MCU, columns of an MCU, lanes].
    """
    head, region = work.heads[seat], work.regions[seat]
    lanes, num_luma = region.num_lanes, head.across * head.down
    margin = _margin(region)
    between = shaped(work.between, 0, (8, 8, lanes))
    first = region.coefficients + lanes
    blocks = shaped(work.coefficients, first, (region.num_blocks, 8, 8, lanes))
    luma = shaped(work.samples, 0, (num_luma, 8, 8, lanes))
    end = num_luma * 64 * lanes
    for block in range(num_luma):
        quantiser = head.quantisers[head.quantiser[0]]
        if not transform_block(blocks[block], quantiser, between, luma[block], 0):
            return False
    pixels = shaped(work.pixels, 0, (8 * head.down, 8 * head.across, lanes))
    if head.colour == GRAY:
        for row in range(8):
            for column in range(8):
                gray = luma[0, row, column]
                join_colours(gray, gray, gray, pixels[row, column])
        return True
    width = margin + lanes + margin
    chroma = shaped(work.samples, end, (2, 8, 8, width))
    end += 2 * 64 * width
    whole = shaped(work.samples, end, (2, 8 * head.down, 8 * head.across, lanes))
    sums = shaped(work.sums, 0, (8, lanes + 2))
    for c in range(2):
        quantiser = head.quantisers[head.quantiser[c + 1]]
        if not transform_block(blocks[num_luma + c], quantiser, between, chroma[c], margin):
            return False
        extend_borders(chroma[c], margin, head, region)
        upsample(chroma[c], margin, head, region.stride, sums, whole[c])
    for row in range(8 * head.down):
        for column in range(8 * head.across):
            first = luma[row // 8 * head.across + column // 8, row % 8, column % 8]
            second, third = whole[0, row, column], whole[1, row, column]
            if head.colour == RGB:
                join_colours(first, second, third, pixels[row, column])
            else:
                convert_ycc(first, second, third, pixels[row, column])
    return True


@compiled
def _draw(seat, plan, out, work):
    """Resize a box of the picture, and put a window of that into uint8 [height, width, 3]."""
    head, region = work.heads[seat], work.regions[seat]
    height, width = out.shape[0], out.shape[1]
    top, bottom, left, right = _visible(plan, height, width)
    if top > 0 or left > 0 or bottom < height or right < width:  # Black beyond what there is.
        out[:] = 0
    num_columns, num_rows = right - left, bottom - top
    down, across, lanes = 8 * head.down, 8 * head.across, region.num_lanes
    first, step = plan.window_left + left, 1
    if plan.is_flipped:
        first, step = plan.window_left + right - 1, -1
        left = width - right
    columns, next_columns = work.columns[0, :num_columns], work.columns[1, :num_columns]
    column_weights, weights = work.column_weights[:num_columns], work.weights
    find_sources(plan.width, plan.new_width, first, step, True, columns, weights)
    for i in range(num_columns):
        column, next_column = plan.left + columns[i], plan.left + min(columns[i] + 1, plan.width - 1)
        columns[i] = column % across * lanes + column // across - region.first_column
        next_columns[i] = next_column % across * lanes + next_column // across - region.first_column
        column_weights[i] = weights[0, i] | weights[1, i] << 16
    rows = work.rows[:num_rows]
    find_sources(plan.height, plan.new_height, plan.window_top + top, 1, False, rows, weights)
    kept = work.kept  # Which rows are resized already; neighbours are one odd and one even row.
    kept[:] = -1
    for i in range(num_rows):
        upper, lower = max(rows[i], 0), min(rows[i] + 1, plan.height - 1)
        for source in (upper, lower):
            if kept[source % 2] != source:
                row = plan.top + source
                start = row % down * across * lanes + (row // down - region.first_row) * region.stride
                resize_row(work.pixels[start:], columns, next_columns, column_weights, work.resized[source % 2])
                kept[source % 2] = source
        mix_rows(
            work.resized[upper % 2], work.resized[lower % 2], np.int16(weights[0, i]), np.int16(weights[1, i]),
            shaped(out, 3 * ((top + i) * width + left), 3 * num_columns),
        )  # fmt: skip
