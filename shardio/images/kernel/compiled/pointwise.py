"""Apply operations that treat each pixel alone, one block after another, so that a block stays in the first cache."""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.hue import turn_hue
from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.operation_records import (
    BLOCK,
    BRIGHTNESS,
    CONTRAST,
    GRAYSCALE,
    HUE,
    INVERT,
    POSTERIZE,
    SATURATION,
    SOLARIZE,
)
from shardio.images.kernel.compiled.planes import join_planes, split_planes
from shardio.images.kernel.compiled.tones import (
    blend_with,
    blend_with_grey,
    invert,
    keep_bits,
    make_grey,
    solarize,
    sum_grey,
)

_F = np.float32


@kernel_function
def edit_blocks(pixels, planes, is_split, stays_split, sums_grey, operations, mean, block):
    """Apply some operations to an image, which is in ``planes`` if ``is_split``, else in ``pixels``.

    Args:
        pixels: uint8 [3 n], pixel by pixel.
        planes: uint8 [3 n], colour by colour.
        is_split: Where the image is.
        stays_split: Where to leave it.
        sums_grey: Whether to add up the grey values of the result.
        operations: OPERATION [k], those that treat each pixel alone.
        mean: float32, the mean grey value of the image, if one of them changes the contrast.
        block: uint8 [3 BLOCK], temporary memory.

    Returns:
        The sum of the grey values, or 0.
    """
    num_pixels, total = len(pixels) // 3, np.uint64(0)
    works_on_planes = is_split or stays_split or sums_grey or mixes_colours(operations)
    for first in range(0, num_pixels, BLOCK):
        count = min(BLOCK, num_pixels - first)
        part = shaped(pixels, 3 * first, (3 * count,))
        if not works_on_planes:
            for k in range(len(operations)):
                _edit_values(operations[k], part, mean)
            continue
        colours, start, distance = block, 0, BLOCK
        if is_split or stays_split:
            colours, start, distance = planes, first, num_pixels
        red = shaped(colours, start, (count,))
        green = shaped(colours, start + distance, (count,))
        blue = shaped(colours, start + 2 * distance, (count,))
        if not is_split:
            split_planes(part, red, green, blue)
        for k in range(len(operations)):
            _edit_colours(operations[k], red, green, blue, mean)
        if sums_grey:
            total += sum_grey(red, green, blue, count)
        if not stays_split and (is_split or len(operations) > 0):
            join_planes(red, green, blue, part)
    return total


@kernel_function
def mixes_colours(operations):
    """Return whether one of some operations mixes the colours of a pixel."""
    count = 0
    for k in range(len(operations)):
        count += operations[k].code in (SATURATION, HUE, GRAYSCALE)
    return count > 0


@kernel_function
def _edit_colours(operation, red, green, blue, mean):
    """Apply an operation to some pixels."""
    code, count = operation.code, len(red)
    if code == SATURATION:
        blend_with_grey(red, green, blue, count, _F(operation.numbers[0]))
    elif code == HUE:
        turn_hue(red, green, blue, count, np.int32(operation.numbers[0]))
    elif code == GRAYSCALE:
        make_grey(red, green, blue, count)
    else:
        for values in (red, green, blue):
            _edit_values(operation, values, mean)


@kernel_function
def _edit_values(operation, values, mean):
    """Apply an operation that treats each value alone."""
    code, number, count = operation.code, operation.numbers[0], len(values)
    if code == BRIGHTNESS:
        blend_with(values, count, _F(0), _F(number))
    elif code == CONTRAST:
        blend_with(values, count, mean, _F(number))
    elif code == SOLARIZE:
        if number < 256:
            solarize(values, count, np.uint8(number))
    elif code == POSTERIZE:
        keep_bits(values, count, np.uint8(number))
    elif code == INVERT:
        invert(values, count)
