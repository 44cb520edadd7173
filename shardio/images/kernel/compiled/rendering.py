"""Render a crop: resize a part of an image's pixels, and write a window of the result to a row of the batch."""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.antialiasing import (
    count_pairs,
    find_antialiased_range,
    find_taps,
    resize_row_antialiased,
    sum_resized_rows,
)
from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.records import MAX_RESIZED, MAX_TAPS, OPENCV_BILINEAR
from shardio.images.kernel.compiled.resizing import copy_row, find_range, find_sources, mix_rows, resize_row


@kernel_function
def find_visible(plan, height, width):
    """Return the rows and columns of a window that are within the resized part."""
    top, bottom = max(-plan.window_top, 0), min(plan.new_height - plan.window_top, height)
    left, right = max(-plan.window_left, 0), min(plan.new_width - plan.window_left, width)
    return top, bottom, left, right


@kernel_function
def find_needed(num_before, num_after, start, stop, resampling):
    """Return the range of rows or columns that the range [start, stop) of the resized ones needs."""
    if resampling == OPENCV_BILINEAR:
        return find_range(num_before, num_after, start, stop)
    return find_antialiased_range(num_before, num_after, start, stop, resampling)


@kernel_function
def fits(plan, num_rows, num_columns):
    """Return whether the workspace has enough memory to resize, for so many visible rows and columns of the result."""
    if plan.resampling == OPENCV_BILINEAR:
        return True
    num_row_pairs = count_pairs(plan.height, plan.new_height, plan.resampling)
    if num_row_pairs * num_rows > MAX_TAPS:
        return False
    if count_pairs(plan.width, plan.new_width, plan.resampling) * (num_columns + 3) > MAX_TAPS:
        return False
    return (plan.height + 2 * num_row_pairs) * (3 * num_columns + 16) <= MAX_RESIZED


@kernel_function
def render(pixels, start, row_length, plan, out, work):
    """Render a crop.

    Args:
        pixels: uint32 [...], an image. Only its needed pixels have to be there.
        start: The index of the first pixel of the plan's part, which may be below 0.
        row_length: The distance from one row to the next.
        plan: The crop plan.
        out: uint8 [height, width, 3], for the window.
        work: The workspace.
    """
    top, bottom, left, right = find_visible(plan, out.shape[0], out.shape[1])
    if top > 0 or left > 0 or bottom < out.shape[0] or right < out.shape[1]:  # Black beyond the part.
        out[:] = 0
    first_row, num_rows, num_columns = plan.window_top + top, bottom - top, right - left
    first, step = plan.window_left + left, 1
    if plan.is_flipped:
        first, step = plan.window_left + right - 1, -1
        left = out.shape[1] - right
    if plan.new_height == plan.height and plan.new_width == plan.width:
        for i in range(num_rows):
            row_start = start + (first_row + i) * row_length + first
            copy_row(pixels, row_start, step, _row(out, top + i, left, num_columns))
    elif plan.resampling == OPENCV_BILINEAR:
        _find_sources(plan, first_row, num_rows, first, step, num_columns, work)
        for i in range(num_rows):
            _mix(pixels, start, row_length, plan, i, _row(out, top + i, left, num_columns), work)
    else:
        num_pairs, num_row_pairs = _find_taps(plan, first_row, num_rows, first, step, num_columns, work)
        _, stop = find_antialiased_range(plan.height, plan.new_height, first_row, first_row + num_rows, plan.resampling)
        columns, rows, length = work.columns[: _round_up(num_columns)], work.rows[:num_rows], 3 * num_columns + 16
        next_row = rows[0]
        for i in range(num_rows):
            while next_row < min(rows[i] + 2 * num_row_pairs, stop):  # Others have no weight.
                row_start, to = start + next_row * row_length, (next_row - rows[0]) * length
                resize_row_antialiased(pixels, row_start, columns, work.column_taps, num_pairs, work.resized_rows, to)
                next_row += 1
            row, from_row = _row(out, top + i, left, num_columns), (rows[i] - rows[0]) * length
            sum_resized_rows(work.resized_rows, from_row, length, work.row_taps, i, num_rows, num_row_pairs, row)


@kernel_function
def _row(out, row, left, num_columns):
    """Return a part of a row of uint8 [height, width, 3] as uint8 [3 * num_columns]."""
    return shaped(out, 3 * (row * out.shape[1] + left), 3 * num_columns)


@kernel_function
def _find_taps(plan, first_row, num_rows, first_column, step, num_columns, work):
    """Determine what the rows and columns of the result sum. Return the numbers of pairs for columns and for rows."""
    resampling, columns, rows = plan.resampling, work.columns[: _round_up(num_columns)], work.rows[:num_rows]
    num_pairs = find_taps(
        plan.width, plan.new_width, first_column, step, num_columns, resampling, columns, work.column_taps, 4
    )
    return num_pairs, find_taps(
        plan.height, plan.new_height, first_row, 1, num_rows, resampling, rows, work.row_taps, 1
    )


@kernel_function
def _round_up(num_columns):
    """Return the number of columns that are computed: four at once."""
    return (num_columns + 3) // 4 * 4


@kernel_function
def _find_sources(plan, first_row, num_rows, first_column, step, num_columns, work):
    """Determine what the rows and columns of the result mix."""
    n, weights = _round_up(num_columns), work.weights
    columns, column_weights = work.columns[:n], work.column_weights
    find_sources(plan.width, plan.new_width, first_column, step, num_columns, True, columns, weights)
    for i in range(n):
        column_weights[i] = weights[0, i] | weights[1, i] << 16
    find_sources(plan.height, plan.new_height, first_row, 1, num_rows, False, work.rows[:num_rows], weights)
    work.kept[:] = -1


@kernel_function
def _mix(pixels, start, row_length, plan, i, out, work):
    """Mix two rows of the image to row i of the result."""
    columns = work.columns[: _round_up(len(out) // 3)]
    upper, lower = max(work.rows[i], 0), min(work.rows[i] + 1, plan.height - 1)
    for row in (upper, lower):  # Of adjacent rows, one is even and one is odd. The last two are kept.
        if work.kept[row % 2] != row:
            resize_row(pixels, start + row * row_length, columns, work.column_weights, work.resized[row % 2])
            work.kept[row % 2] = row
    weights = np.int16(work.weights[0, i]), np.int16(work.weights[1, i])
    mix_rows(work.resized[upper % 2], work.resized[lower % 2], weights[0], weights[1], out)
