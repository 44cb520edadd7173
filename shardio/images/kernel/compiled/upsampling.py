"""libjpeg's "fancy" upsampling of chroma (jdsample.c).

A component with fewer samples than the image has pixels gets the missing ones by interpolation: three quarters of the
nearer sample and a quarter of the farther one. Input arrays are uint8 [8, 8, lanes], and output arrays are
uint8 [8 down, 8 across, n]. Input arrays have ``margin`` more lanes on both sides, so that the first and the last
lane have neighbours.

Samples beyond the image's border equal those at the border. This gives the same results as libjpeg's rules for the
first and last columns and rows.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function

_I = np.int16  # numba widens results to int64 unless each one is cast.


@kernel_function
def extend_borders(samples, margin, head, region):
    """Repeat the samples at the image's borders as far as they are in the region.

    Args:
        samples: uint8 [8, 8, margin + lanes + margin].
        margin: The lanes on each side.
        head: The file's head.
        region: The image's region.
    """
    stride = region.stride
    num_rows = region.stop_row - region.first_row
    if head.across > 1:
        width = (head.width + head.across - 1) // head.across
        last, column = (width - 1) // 8, (width - 1) % 8
        for row in range(num_rows):
            first_lane = margin + row * stride
            if region.first_column == 0:
                for i in range(8):
                    samples[i, 7, first_lane - 1] = samples[i, 0, first_lane]
            if region.first_column <= last < region.stop_column:
                lane = first_lane + last - region.first_column
                for i in range(8):
                    if column == 7:
                        samples[i, 0, lane + 1] = samples[i, 7, lane]
                    else:
                        samples[i, column + 1, lane] = samples[i, column, lane]
    if head.down > 1:
        height = (head.height + head.down - 1) // head.down
        last, line = (height - 1) // 8, (height - 1) % 8
        # The lane between two rows of MCUs is the upper row's right neighbour in column 0, the lower row's left one in
        # column 7.
        if region.first_row == 0:
            for j in range(8):
                start, stop = margin - (j == 7), margin + stride - (j != 0)
                samples[7, j, start - stride : stop - stride] = samples[0, j, start:stop]
        if region.first_row <= last < region.stop_row:
            lane = margin + (last - region.first_row) * stride
            for j in range(8):
                start, stop = lane - (j == 7), lane + stride - (j != 0)
                if line == 7:
                    samples[0, j, start + stride : stop + stride] = samples[7, j, start:stop]
                else:
                    samples[line + 1, j, start:stop] = samples[line, j, start:stop]


@kernel_function
def upsample(samples, first, head, stride, sums, out):
    """Upsample a component of n lanes by the image's sampling factors.

    Args:
        samples: uint8 [8, 8, margin + lanes + margin], with borders extended.
        first: The first lane, counted from the margin's start, and more than ``stride``.
        head: The file's head.
        stride: Lanes from an MCU to the one below it.
        sums: int16 [8, n + 2], for intermediate results.
        out: uint8 [8 down, 8 across, n].
    """
    # Rows of one or two samples are not interpolated (jdsample.c, jinit_upsampler: downsampled_width > 2).
    is_fancy = (head.width + head.across - 1) // head.across > 2
    if head.across == 2 and head.down == 2 and is_fancy:
        _upsample_both(samples, first, stride, sums, out)
    elif head.across == 2 and head.down == 1 and is_fancy:
        _upsample_across(samples, first, out)
    elif head.across == 1 and head.down == 2:
        _upsample_down(samples, first, stride, out)
    else:
        _repeat(samples, first, head.down, head.across, out)


@kernel_function
def _upsample_both(samples, first, stride, sums, out):
    """Double both sides, as h2v2_fancy_upsample does."""
    num_lanes = out.shape[2]
    for row in range(16):
        i = row // 2
        for j in range(8):
            near = samples[i, j, first - 1 :]
            if row % 2 == 0:
                far = samples[i - 1, j, first - 1 :] if i else samples[7, j, first - 1 - stride :]
            else:
                far = samples[i + 1, j, first - 1 :] if i < 7 else samples[0, j, first - 1 + stride :]
            total = sums[j]
            for lane in range(num_lanes + 2):
                total[lane] = np.int16(_I(_I(near[lane]) * _I(3)) + _I(far[lane]))
        for j in range(8):
            this = sums[j, 1:]
            before = sums[j - 1, 1:] if j else sums[7, 0:]
            after = sums[j + 1, 1:] if j < 7 else sums[0, 2:]
            left, right = out[row, 2 * j], out[row, 2 * j + 1]
            for lane in range(num_lanes):
                three = _I(_I(this[lane]) * _I(3))
                left[lane] = np.uint8(_I(_I(three + _I(before[lane])) + _I(8)) >> _I(4))
                right[lane] = np.uint8(_I(_I(three + _I(after[lane])) + _I(7)) >> _I(4))


@kernel_function
def _upsample_across(samples, first, out):
    """Double the width, as h2v1_fancy_upsample does."""
    num_lanes = out.shape[2]
    for i in range(8):
        for j in range(8):
            this = samples[i, j, first:]
            before = samples[i, j - 1, first:] if j else samples[i, 7, first - 1 :]
            after = samples[i, j + 1, first:] if j < 7 else samples[i, 0, first + 1 :]
            left, right = out[i, 2 * j], out[i, 2 * j + 1]
            for lane in range(num_lanes):
                three = _I(_I(this[lane]) * _I(3))
                left[lane] = np.uint8(_I(_I(three + _I(before[lane])) + _I(1)) >> _I(2))
                right[lane] = np.uint8(_I(_I(three + _I(after[lane])) + _I(2)) >> _I(2))


@kernel_function
def _upsample_down(samples, first, stride, out):
    """Double the height, as h1v2_fancy_upsample does."""
    num_lanes = out.shape[2]
    for i in range(8):
        for j in range(8):
            this = samples[i, j, first:]
            above = samples[i - 1, j, first:] if i else samples[7, j, first - stride :]
            below = samples[i + 1, j, first:] if i < 7 else samples[0, j, first + stride :]
            upper, lower = out[2 * i, j], out[2 * i + 1, j]
            for lane in range(num_lanes):
                three = _I(_I(this[lane]) * _I(3))
                upper[lane] = np.uint8(_I(_I(three + _I(above[lane])) + _I(1)) >> _I(2))
                lower[lane] = np.uint8(_I(_I(three + _I(below[lane])) + _I(2)) >> _I(2))


@kernel_function
def _repeat(samples, first, down, across, out):
    """Repeat samples, as h2v1_upsample, h2v2_upsample and int_upsample do."""
    num_lanes = out.shape[2]
    for row in range(8 * down):
        for column in range(8 * across):
            out[row, column, :] = samples[row // down, column // across, first : first + num_lanes]
