"""Decode a chunk of JPEGs into the rows of a batch, in groups of up to three images."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.codes import lay_out_states, prepare_tables, read_huffman_tables
from shardio.images.kernel.compiled.entropy import decode_streams
from shardio.images.kernel.compiled.heads import read_head
from shardio.images.kernel.compiled.memory import kernel_function, pointer
from shardio.images.kernel.compiled.pixels import make_pixels
from shardio.images.kernel.compiled.records import GROUP_SIZE, MAX_PIXELS, MAX_SIDE, NUM_CHAINS, TRANSPOSED
from shardio.images.kernel.compiled.regions import find_margin, lay_out_region
from shardio.images.kernel.compiled.rendering import find_needed, find_visible, fits, render
from shardio.images.kernel.compiled.streams import find_streams
from shardio.images.kernel.compiled.turning import find_stored_box, turn_pixels

_ALIGNED = 32
"""Coefficients per cache line."""


@kernel_function
def decode_chunk(images, plans, order, rows, is_done, work):
    """Decode some JPEGs; crop, resize and mirror them into the rows of a batch.

    Args:
        images: IMAGE [n].
        plans: PLAN [n, crops].
        order: int64 [n], the order in which to decode them. Adjacent images form a group until it has as many
            streams as are decoded at once, so a tiled image is alone. The members of a group should take equally long.
        rows: ROW [n, crops].
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
        is_added = _add_member(images[i], plans[i], rows[i], num_members, work)
        if not is_added and work.is_full:
            _finish_group(num_members, images, plans, rows, is_done, work)
            num_members = 0
            is_added = _add_member(images[i], plans[i], rows[i], num_members, work)
        if is_added:
            work.indices[num_members] = i
            num_members += 1
        if num_members == GROUP_SIZE or work.num_streams >= NUM_CHAINS:
            _finish_group(num_members, images, plans, rows, is_done, work)
            num_members = 0
    _finish_group(num_members, images, plans, rows, is_done, work)


@kernel_function
def _finish_group(num_members, images, plans, rows, is_done, work):
    """Decode and render the members of the group, and empty it."""
    decode_streams(work)
    for member in range(num_members):
        if work.is_good[member] and make_pixels(member, work):
            i = work.indices[member]
            _render_crops(member, images[i].turn, plans[i], rows[i], work)
            is_done[i] = 1
    _clear_group(work)


@kernel_function
def _render_crops(member, turn, plans, rows, work):
    """Render all crops of an image whose pixels are made."""
    head, region = work.heads[member], work.regions[member]
    box = region.top, region.left, region.height, region.width
    top, left, _, _ = find_stored_box(box, turn, head.height, head.width)
    row_length = 8 * head.across * region.stride
    first = (top - 8 * head.down * region.first_row) * row_length + left - 8 * head.across * region.first_column
    pixels = work.pixels
    if turn:
        turn_pixels(pixels, first, row_length, region.height, region.width, turn, work.turned)
        pixels, first, row_length = work.turned, 0, region.width
    for j in range(len(plans)):
        if not plans[j].height:
            continue
        start = first + (plans[j].top - region.top) * row_length + plans[j].left - region.left
        out = carray(pointer(rows[j].address), (rows[j].height, rows[j].width, 3), np.uint8)
        render(pixels, start, row_length, plans[j], out, work)


@kernel_function
def _clear_group(work):
    work.num_streams = work.num_bytes = 0
    work.num_coefficients = 1  # Chains without a stream write to the first one.


@kernel_function
def _add_member(image, plans, rows, member, work):
    """Add an image to the group.

    Args:
        image: The IMAGE.
        plans: PLAN [crops].
        rows: ROW [crops].
        member: Its index in the group.
        work: The workspace.

    Returns:
        Whether the kernel can decode it now. ``is_full`` says whether only the other members prevent that.
    """
    work.is_full = 0
    head, region = work.heads[member], work.regions[member]
    data = carray(pointer(image.address), image.length, np.uint8)
    if not read_head(data, head):
        return False
    height, width = (head.width, head.height) if image.turn & TRANSPOSED else (head.height, head.width)
    region.top, region.left, region.height, region.width = height, width, -height, -width
    for j in range(len(plans)):
        if plans[j].height and not _add_crop(plans[j], rows[j], height, width, region):
            return False
    if region.height <= 0:  # There is no crop.
        return False
    box = region.top, region.left, region.height, region.width
    top, left, height, width = find_stored_box(box, image.turn, head.height, head.width)
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


@kernel_function
def _add_crop(plan, row, height, width, region):
    """Extend the needed box of an image by that of a crop. Return whether the kernel can render the crop.

    Args:
        plan: The crop's PLAN.
        row: Its ROW.
        height: The height of the upright picture.
        width: Its width.
        region: The image's region.
    """
    if plan.top < 0 or plan.left < 0 or plan.height < 1 or plan.width < 1:
        return False
    if plan.top > height - plan.height or plan.left > width - plan.width:
        return False
    if max(plan.height, plan.width, plan.new_height, plan.new_width) > MAX_SIDE:
        return False
    top, bottom, left, right = find_visible(plan, row.height, row.width)
    if top >= bottom or left >= right or not fits(plan, bottom - top, right - left):
        return False
    first_row, stop_row = find_needed(
        plan.height, plan.new_height, plan.window_top + top, plan.window_top + bottom, plan.resampling
    )
    first_column, stop_column = find_needed(
        plan.width, plan.new_width, plan.window_left + left, plan.window_left + right, plan.resampling
    )
    bottom = max(region.top + region.height, plan.top + stop_row)
    right = max(region.left + region.width, plan.left + stop_column)
    region.top, region.left = min(region.top, plan.top + first_row), min(region.left, plan.left + first_column)
    region.height, region.width = bottom - region.top, right - region.left
    return True
