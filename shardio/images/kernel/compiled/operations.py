"""Apply operations to images in place, one after the other.

Operations that mix colours work on planes, those with neighbours on pixels, and all others on either. Adjacent
operations that treat each pixel alone are applied together, block by block. An image is split and joined only where two
operations require it.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.blurring import blur
from shardio.images.kernel.compiled.memory import kernel_function, pointer, shaped
from shardio.images.kernel.compiled.mixtures import add_to_mixture, begin_mixture, end_mixture
from shardio.images.kernel.compiled.neighbours import erase, flip_vertically, sharpen, transform_affinely
from shardio.images.kernel.compiled.operation_records import (
    ADD_TO_MIXTURE,
    AFFINE,
    AUTOCONTRAST,
    BEGIN_MIXTURE,
    BLOCK,
    CONTRAST,
    END_MIXTURE,
    EQUALIZE,
    ERASE,
    GAUSSIAN_BLUR,
    INVERT,
    NEAREST,
    PERSPECTIVE,
    SHARPNESS,
    SLACK,
    VERTICAL_FLIP,
)
from shardio.images.kernel.compiled.planes import join_planes, split_planes
from shardio.images.kernel.compiled.pointwise import edit_blocks, mixes_colours
from shardio.images.kernel.compiled.tones import look_up, make_equalizing_table, stretch
from shardio.images.kernel.compiled.warping import moves_by_whole_pixels, warp

_F = np.float32


@kernel_function
def edit_images(rows, operations, scratch):
    """Apply operations to images.

    Args:
        rows: ROW [n], the images.
        operations: OPERATION [n, k], those of each image, in order.
        scratch: uint8 [...], SLACK bytes more than the largest image; for mixtures and for blurring,
            :func:`count_mixture_bytes` and :func:`count_blur_bytes` more.
    """
    for i in range(len(rows)):
        height, width = rows[i].height, rows[i].width
        pixels = carray(pointer(rows[i].address), 3 * height * width, np.uint8)
        _edit(pixels, height, width, operations[i], scratch)


@kernel_function
def _edit(pixels, height, width, operations, scratch):
    num_pixels = height * width
    size = 3 * num_pixels
    temporary = shaped(scratch, 0, (size + 4,))  # The planes, or a copy of the pixels and some bytes.
    planes = shaped(scratch, 0, (size,))
    block = shaped(scratch, size + SLACK - 3 * BLOCK, (3 * BLOCK,))
    table = shaped(scratch, size + 4, (256,))
    # For counts, or for what else an operation needs, such as PLACES.
    counts = carray(pointer(scratch.ctypes.data + (size + 4 + 256 + 63) // 64 * 64), 1024, np.int32)
    red = shaped(scratch, 0, (num_pixels,))
    green = shaped(scratch, num_pixels, (num_pixels,))
    blue = shaped(scratch, 2 * num_pixels, (num_pixels,))
    floats = _floats_after(scratch, size + SLACK)  # For blurring, or for a mixture and blurring within it.
    total, original = shaped(floats, 0, (size,)), shaped(scratch, len(scratch) - size, (size,))
    has_mixture = _has_mixture(operations)
    is_split, k = False, 0
    mean, knows_mean = _F(0), False  # Of the grey values.
    while k < len(operations):
        code, numbers = operations[k].code, operations[k].numbers
        if _is_pointwise(code):
            if code == CONTRAST and not knows_mean:
                splits = is_split or _works_on_planes(operations, k)
                sum_ = edit_blocks(pixels, planes, is_split, splits, True, operations[k:k], mean, block)
                is_split, mean = splits, _mean(sum_, num_pixels)
            stop = _find_end(operations, k)
            needs_mean = stop < len(operations) and operations[stop].code == CONTRAST
            stays_split = stop < len(operations) and _works_on_planes(operations, stop)
            sum_ = edit_blocks(pixels, planes, is_split, stays_split, needs_mean, operations[k:stop], mean, block)
            is_split, mean, knows_mean, k = stays_split, _mean(sum_, num_pixels), needs_mean, stop
            continue
        k, knows_mean = k + 1, False
        if code in (AUTOCONTRAST, EQUALIZE):
            if not is_split:
                split_planes(pixels, red, green, blue)
                is_split = True
            for plane in (red, green, blue):
                if code == AUTOCONTRAST:
                    stretch(plane, num_pixels, table)
                elif make_equalizing_table(plane, num_pixels, counts, table):
                    look_up(plane, num_pixels, table)
            continue
        if is_split:
            join_planes(red, green, blue, pixels)
            is_split = False
        if code == ERASE:
            erase(pixels, height, width, numbers)
        elif code == VERTICAL_FLIP:
            flip_vertically(pixels, height, width)
        elif code == BEGIN_MIXTURE:
            begin_mixture(pixels, original, total, _F(numbers[0]))
        elif code == ADD_TO_MIXTURE:
            add_to_mixture(pixels, original, total, _F(numbers[0]))
        elif code == END_MIXTURE:
            end_mixture(pixels, total)
        else:
            for i in range(size):
                temporary[i] = pixels[i]
            if code == SHARPNESS:
                sharpen(temporary, pixels, height, width, _F(numbers[0]))
            elif code == GAUSSIAN_BLUR:
                blur(temporary, pixels, height, width, numbers, floats[size if has_mixture else 0 :])
            elif code == AFFINE and (numbers[9] == NEAREST or moves_by_whole_pixels(numbers)):
                transform_affinely(temporary, pixels, height, width, numbers, counts)
            else:
                warp(temporary, pixels, height, width, numbers, code == PERSPECTIVE, counts)
    if is_split:
        join_planes(red, green, blue, pixels)


@kernel_function
def _is_pointwise(code):
    """Return whether an operation treats each pixel alone, once the mean is known; these have the lowest codes."""
    return code <= INVERT


@kernel_function
def _find_end(operations, start):
    """Return where operations that can be applied together end."""
    stop = start + 1
    while stop < len(operations) and _is_pointwise(operations[stop].code) and operations[stop].code != CONTRAST:
        stop += 1
    return stop


@kernel_function
def _works_on_planes(operations, start):
    """Return whether the next operations that are applied together are faster with planes than with pixels."""
    if operations[start].code in (AUTOCONTRAST, EQUALIZE):
        return True
    return _is_pointwise(operations[start].code) and mixes_colours(operations[start : _find_end(operations, start)])


@kernel_function
def _mean(total, num_pixels):
    return _F(np.int64(np.float64(total) / num_pixels + 0.5))


@kernel_function
def _floats_after(scratch, start):
    """Return the scratch memory from a byte on, or from the next multiple of 4, as float32."""
    start = (start + 3) // 4 * 4
    return carray(pointer(scratch.ctypes.data + start), (len(scratch) - start) // 4, np.float32)


@kernel_function
def _has_mixture(operations):
    count = 0
    for k in range(len(operations)):
        count += operations[k].code == BEGIN_MIXTURE
    return count > 0
