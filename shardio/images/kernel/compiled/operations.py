"""Apply operations to images in place, one after the other.

Operations that mix colours work on planes, those with neighbours on pixels, and all others on either. An image is split
and joined only where two operations require it.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.blurring import blur
from shardio.images.kernel.compiled.hue import turn_hue
from shardio.images.kernel.compiled.memory import kernel_function, pointer, shaped
from shardio.images.kernel.compiled.mixtures import add_to_mixture, begin_mixture, end_mixture
from shardio.images.kernel.compiled.neighbours import erase, flip_vertically, sharpen, transform_affinely
from shardio.images.kernel.compiled.operation_records import (
    ADD_TO_MIXTURE,
    AFFINE,
    AUTOCONTRAST,
    BEGIN_MIXTURE,
    BRIGHTNESS,
    CONTRAST,
    END_MIXTURE,
    EQUALIZE,
    ERASE,
    GAUSSIAN_BLUR,
    GRAYSCALE,
    HUE,
    INVERT,
    NEAREST,
    NONE,
    PERSPECTIVE,
    POSTERIZE,
    SATURATION,
    SHARPNESS,
    SLACK,
    SOLARIZE,
    VERTICAL_FLIP,
)
from shardio.images.kernel.compiled.planes import join_planes, split_planes
from shardio.images.kernel.compiled.tones import (
    blend_with,
    blend_with_grey,
    invert,
    keep_bits,
    look_up,
    make_equalizing_table,
    make_grey,
    solarize,
    stretch,
    sum_grey,
)
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
    table = shaped(scratch, size + 4, (256,))
    # For counts, or for what else an operation needs, such as PLACES.
    counts = carray(pointer(scratch.ctypes.data + (size + 4 + 256 + 63) // 64 * 64), 1024, np.int32)
    red = shaped(scratch, 0, (num_pixels,))
    green = shaped(scratch, num_pixels, (num_pixels,))
    blue = shaped(scratch, 2 * num_pixels, (num_pixels,))
    floats = _floats_after(scratch, size + SLACK)  # For blurring, or for a mixture and blurring within it.
    total, original = shaped(floats, 0, (size,)), shaped(scratch, len(scratch) - size, (size,))
    has_mixture = _has_mixture(operations)
    is_split = False
    for k in range(len(operations)):
        code = operations[k].code
        if code == NONE:
            continue
        numbers = operations[k].numbers
        if not is_split and _needs_planes(code):
            split_planes(pixels, num_pixels, temporary)
            is_split = True
        elif is_split and _needs_pixels(code):
            join_planes(temporary, num_pixels, pixels)
            is_split = False
        values, factor = temporary if is_split else pixels, _F(numbers[0])
        if code == BRIGHTNESS:
            blend_with(values, size, _F(0), factor)
        elif code == CONTRAST:
            mean = np.int64(np.float64(sum_grey(red, green, blue, num_pixels)) / num_pixels + 0.5)
            blend_with(values, size, _F(mean), factor)
        elif code == SATURATION:
            blend_with_grey(red, green, blue, num_pixels, factor)
        elif code == HUE:
            turn_hue(red, green, blue, num_pixels, np.int32(numbers[0]))
        elif code == GRAYSCALE:
            make_grey(red, green, blue, num_pixels)
        elif code == SOLARIZE:
            if numbers[0] < 256:
                solarize(values, size, np.uint8(numbers[0]))
        elif code == POSTERIZE:
            keep_bits(values, size, np.uint8(numbers[0]))
        elif code == INVERT:
            invert(values, size)
        elif code == AUTOCONTRAST:
            for plane in (red, green, blue):
                stretch(plane, num_pixels, table)
        elif code == EQUALIZE:
            for plane in (red, green, blue):
                if make_equalizing_table(plane, num_pixels, counts, table):
                    look_up(plane, num_pixels, table)
        elif code == ERASE:
            erase(pixels, height, width, numbers)
        elif code == VERTICAL_FLIP:
            flip_vertically(pixels, height, width)
        elif code == BEGIN_MIXTURE:
            begin_mixture(pixels, original, total, factor)
        elif code == ADD_TO_MIXTURE:
            add_to_mixture(pixels, original, total, factor)
        elif code == END_MIXTURE:
            end_mixture(pixels, total)
        else:
            for i in range(size):
                temporary[i] = pixels[i]
            if code == SHARPNESS:
                sharpen(temporary, pixels, height, width, factor)
            elif code == GAUSSIAN_BLUR:
                blur(temporary, pixels, height, width, numbers, floats[size if has_mixture else 0 :])
            elif code == AFFINE and (numbers[9] == NEAREST or moves_by_whole_pixels(numbers)):
                transform_affinely(temporary, pixels, height, width, numbers, counts)
            else:
                warp(temporary, pixels, height, width, numbers, code == PERSPECTIVE, counts)
    if is_split:
        join_planes(temporary, num_pixels, pixels)


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


@kernel_function
def _needs_planes(code):
    return code in (CONTRAST, SATURATION, HUE, GRAYSCALE, AUTOCONTRAST, EQUALIZE)


@kernel_function
def _needs_pixels(code):
    # Sharpness is the first of these, and none mixes colours.
    return code >= SHARPNESS
