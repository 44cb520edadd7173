"""Decode a chunk of JPEGs into the rows of a batch, in groups of up to three images."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.codes import lay_out_states, prepare_tables, read_huffman_tables
from shardio.images.kernel.compiled.colour import convert_ycc, join_colours
from shardio.images.kernel.compiled.entropy import decode_streams
from shardio.images.kernel.compiled.heads import GRAY, RGB, read_head
from shardio.images.kernel.compiled.idct import transform_block
from shardio.images.kernel.compiled.memory import kernel_function, pointer, shaped
from shardio.images.kernel.compiled.records import GROUP_SIZE, MAX_PIXELS, MAX_SIDE, NUM_CHAINS
from shardio.images.kernel.compiled.regions import lay_out_region
from shardio.images.kernel.compiled.resizing import find_range, find_sources, mix_rows, resize_row
from shardio.images.kernel.compiled.streams import find_streams
from shardio.images.kernel.compiled.upsampling import extend_borders, upsample

_ALIGNED = 32
"""Coefficients per cache line."""


@kernel_function
def decode_chunk(files, lengths, plans, order, rows, is_done, work):
    """Decode, crop, resize and mirror some JPEGs into the rows of a batch.

    Args:
        files: int64 [n], the files' addresses.
        lengths: int64 [n], the bytes of each file.
        plans: PLAN [n].
        order: int64 [n], the order in which to decode them. Adjacent images form a group until it has as many
            streams as are decoded at once, so a tiled image is alone. The members of a group should take equally long.
        rows: uint8 [n, height, width, 3], for the results.
        is_done: uint8 [n], set to 1 for each rendered image. The others are left to libjpeg-turbo: they are damaged, or
            of a kind that the kernel does not decode.
        work: A WORKSPACE that nothing else uses during the call.
    """
    if not work.is_prepared:
        prepare_tables(work)
        work.is_prepared = 1
    is_done[:] = 0
    num_members = 0
    _clear_group(work)
    for i in order:
        data = carray(pointer(files[i]), lengths[i], np.uint8)
        height, width = rows.shape[1], rows.shape[2]
        is_added = _add_member(data, plans[i], height, width, num_members, work)
        if not is_added and work.is_full:
            _finish_group(num_members, plans, rows, is_done, work)
            num_members = 0
            is_added = _add_member(data, plans[i], height, width, num_members, work)
        if is_added:
            work.indices[num_members] = i
            num_members += 1
        if num_members == GROUP_SIZE or work.num_streams >= NUM_CHAINS:
            _finish_group(num_members, plans, rows, is_done, work)
            num_members = 0
    _finish_group(num_members, plans, rows, is_done, work)


@kernel_function
def _finish_group(num_members, plans, rows, is_done, work):
    """Decode and render the members of the group, and empty it."""
    decode_streams(work)
    for member in range(num_members):
        if work.is_good[member] and _make_pixels(member, work):
            i = work.indices[member]
            _render(member, plans[i], rows[i], work)
            is_done[i] = 1
    _clear_group(work)


@kernel_function
def _clear_group(work):
    work.num_streams = work.num_bytes = 0
    work.num_coefficients = 1  # Chains without a stream write to the first one.


@kernel_function
def _add_member(data, plan, height, width, member, work):
    """Add an image to the group.

    Args:
        data: uint8, its file.
        plan: Its crop plan.
        height: The height of its row of the batch.
        width: The width of its row.
        member: Its index in the group.
        work: The workspace.

    Returns:
        Whether the kernel can decode it now. ``is_full`` says whether only the other members prevent that.
    """
    work.is_full = 0
    head, region = work.heads[member], work.regions[member]
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
    first, stop = find_range(plan.height, plan.new_height, plan.window_top + top, plan.window_top + bottom)
    top, height = plan.top + first, stop - first
    first, stop = find_range(plan.width, plan.new_width, plan.window_left + left, plan.window_left + right)
    left, width = plan.left + first, stop - first
    lay_out_region(head, top, left, height, width, region)
    if 64 * head.across * head.down * (region.num_lanes + 2 * _margin(region)) > MAX_PIXELS:
        return False
    region.coefficients = (work.num_coefficients + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    region.skipped = region.coefficients + (1 + 64 * region.num_blocks) * region.num_lanes
    num_coefficients = region.skipped + NUM_CHAINS * (1 + region.num_blocks) * head.columns
    if num_coefficients > len(work.coefficients):
        work.is_full = member > 0
        return False
    if not read_huffman_tables(data, member, work):
        return False
    num_streams, num_bytes = work.num_streams, work.num_bytes
    if not find_streams(data, member, work):
        work.num_streams, work.num_bytes = num_streams, num_bytes
        return False
    lay_out_states(member, work)
    work.coefficients[region.coefficients + region.num_lanes : region.skipped] = 0
    work.num_coefficients = num_coefficients
    work.is_good[member] = 1
    return True


@kernel_function
def _visible(plan, height, width):
    """Return the rows and columns of a window that are within the resized part."""
    top, bottom = max(-plan.window_top, 0), min(plan.new_height - plan.window_top, height)
    left, right = max(-plan.window_left, 0), min(plan.new_width - plan.window_left, width)
    return top, bottom, left, right


@kernel_function
def _margin(region):
    return region.stride + 1


@kernel_function
def _make_pixels(member, work):
    """Compute pixels from coefficients. Return whether all numbers are in the range that libjpeg-turbo computes with.

    Pixels are uint32 [rows of an MCU, columns of an MCU, lanes].
    """
    head, region = work.heads[member], work.regions[member]
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


@kernel_function
def _render(member, plan, out, work):
    """Resize a part of the image, and write a window of the result to uint8 [height, width, 3]."""
    head, region = work.heads[member], work.regions[member]
    height, width = out.shape[0], out.shape[1]
    top, bottom, left, right = _visible(plan, height, width)
    if top > 0 or left > 0 or bottom < height or right < width:  # Black beyond the part.
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
    kept = work.kept  # The two rows that are resized already: of adjacent rows, one is even and one is odd.
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
