"""Decode a chunk of JPEGs into the rows of a batch, in groups of up to three images."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.codes import lay_out_states, prepare_tables, read_huffman_tables
from shardio.images.kernel.compiled.entropy import decode_streams
from shardio.images.kernel.compiled.heads import read_head
from shardio.images.kernel.compiled.memory import kernel_function, pointer
from shardio.images.kernel.compiled.pixels import make_pixels
from shardio.images.kernel.compiled.records import GROUP_SIZE, MAX_PIXELS, MAX_SIDE, NUM_CHAINS
from shardio.images.kernel.compiled.regions import find_margin, lay_out_region
from shardio.images.kernel.compiled.rendering import find_needed, find_visible, fits, render
from shardio.images.kernel.compiled.streams import find_streams

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
        rows: ROW [n].
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
        is_added = _add_member(data, plans[i], rows[i].height, rows[i].width, num_members, work)
        if not is_added and work.is_full:
            _finish_group(num_members, plans, rows, is_done, work)
            num_members = 0
            is_added = _add_member(data, plans[i], rows[i].height, rows[i].width, num_members, work)
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
        if work.is_good[member] and make_pixels(member, work):
            head, region, i = work.heads[member], work.regions[member], work.indices[member]
            width = 8 * head.across
            row_length = region.stride * width
            top, left = 8 * head.down * region.first_row, width * region.first_column
            start = (plans[i].top - top) * row_length + plans[i].left - left
            out = carray(pointer(rows[i].address), (rows[i].height, rows[i].width, 3), np.uint8)
            render(work.pixels, start, row_length, plans[i], out, work)
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
    top, bottom, left, right = find_visible(plan, height, width)
    if top >= bottom or left >= right:
        return False
    if not fits(plan, bottom - top, right - left):
        return False
    first, stop = find_needed(
        plan.height, plan.new_height, plan.window_top + top, plan.window_top + bottom, plan.resampling
    )
    top, height = plan.top + first, stop - first
    first, stop = find_needed(
        plan.width, plan.new_width, plan.window_left + left, plan.window_left + right, plan.resampling
    )
    left, width = plan.left + first, stop - first
    lay_out_region(head, top, left, height, width, region)
    if 64 * head.across * head.down * (region.num_lanes + 2 * find_margin(region)) > MAX_PIXELS:
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
