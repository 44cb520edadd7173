"""Affine and perspective transforms, with the results of Pillow's ImagingGenericTransform.

Pillow finds where the middle of each pixel of the result is in the original, with 64 bits. It interpolates between the
middles of the nearest pixels there. Beyond the border, pixels are equal to those at the border.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.memory import kernel_function, pointer
from shardio.images.kernel.compiled.mixing import load_pixel, mix_exactly, mix_quickly, store_pixel
from shardio.images.kernel.compiled.neighbours import fill_pixels
from shardio.images.kernel.compiled.operation_records import BICUBIC, BILINEAR, NEAREST
from shardio.images.kernel.compiled.scalars import choose, truncate

_F, _I, _U = np.float32, np.int32, np.uint64

LENGTH = 64
"""The number of pixels whose places are computed at once."""

PLACES = np.dtype(
    [
        ("x", np.float64, LENGTH),  # The place in the original; later, the distance from the middle of a column.
        ("y", np.float64, LENGTH),
        ("column", np.int32, LENGTH),  # The last column whose middle is not after the place.
        ("row", np.int32, LENGTH),
        ("kind", np.int32, LENGTH),  # Whether the place and its neighbours are in the image.
        ("x_weights", np.float32, (4, LENGTH)),  # The weights of the neighbouring columns.
        ("y_weights", np.float32, (4, LENGTH)),
    ],
    align=True,
)
"""What some pixels of the result show."""

INNER, AT_BORDER, OUTSIDE = _I(0), _I(1), _I(2)
"""The kinds of places: in the image, with all neighbours; in the image; neither."""


@kernel_function
def moves_by_whole_pixels(numbers):
    """Return whether a matrix only moves an image by whole pixels, which needs no interpolation."""
    return (
        (numbers[0] == 1 and numbers[1] == 0 and numbers[3] == 0 and numbers[4] == 1)
        and (abs(numbers[2]) < 32768 and abs(numbers[5]) < 32768)
        and (numbers[2] == np.int64(numbers[2]) and numbers[5] == np.int64(numbers[5]))
    )


@kernel_function
def warp(before, pixels, height, width, numbers, is_perspective, memory):
    """Replace each pixel by that at its place times a matrix, as Image.transform does.

    Args:
        before: uint8 [3 height * width + 1], the image; its last byte can be anything.
        pixels: uint8 [3 height * width], for the result.
        height: The image's height.
        width: The image's width.
        numbers: float64 [12], the numbers of an AFFINE or a PERSPECTIVE.
        is_perspective: Whether they are those of a PERSPECTIVE.
        memory: Aligned memory for PLACES.
    """
    fill_pixels(pixels, np.uint8(numbers[6]), np.uint8(numbers[7]), np.uint8(numbers[8]))
    places = carray(pointer(memory.ctypes.data), 1, PLACES)[0]
    for y in range(height):
        for start in range(0, width, LENGTH):
            count, to = min(LENGTH, width - start), y * width + start
            _find_places(numbers, is_perspective, y, start, places)
            if numbers[9] == NEAREST:
                _find_neighbours(height, width, 0.0, _I(0), _I(0), places)
                _copy_nearest(before, width, places, count, pixels, to)
            elif numbers[9] == BILINEAR:
                _find_neighbours(height, width, 0.5, _I(0), _I(1), places)
                _weigh_linearly(places.x, places.x_weights)
                _weigh_linearly(places.y, places.y_weights)
                _mix_four(before, height, width, places, count, pixels, to)
            elif numbers[9] == BICUBIC:
                _find_neighbours(height, width, 0.5, _I(1), _I(2), places)
                _weigh_cubically(places.x, places.x_weights)
                _weigh_cubically(places.y, places.y_weights)
                _mix_sixteen(before, height, width, places, count, pixels, to)


@kernel_function
def _find_places(numbers, is_perspective, y, start, places):
    """Set the places in the original of some pixels of a row."""
    y_out = y + 0.5
    x_of_row, y_of_row, divisor_of_row = numbers[1] * y_out, numbers[4] * y_out, numbers[11] * y_out
    for i in range(LENGTH):
        x_out = np.float64(_I(start + i)) + 0.5
        places.x[i] = numbers[0] * x_out + x_of_row + numbers[2]
        places.y[i] = numbers[3] * x_out + y_of_row + numbers[5]
    if is_perspective:
        for i in range(LENGTH):
            divisor = numbers[10] * (np.float64(_I(start + i)) + 0.5) + divisor_of_row + 1
            places.x[i] /= divisor
            places.y[i] /= divisor


@kernel_function
def _find_neighbours(height, width, middle, num_before, num_after, places):
    """Find the pixels at places. Set everything but the weights.

    Args:
        height: The image's height.
        width: The image's width.
        middle: Where the middle of a pixel is, 0.5, or 0 to round places down.
        num_before: How many more columns and rows before the place matter.
        num_after: How many after it.
        places: The places. Those that are not numbers are outside.
    """
    bottom, right, last_row, last_column = np.float64(height), np.float64(width), _I(height - 1), _I(width - 1)
    for i in range(LENGTH):
        x, y = places.x[i], places.y[i]
        is_in_image = (x >= 0) & (x < right) & (y >= 0) & (y < bottom)
        column = choose(x < middle, _I(-1), truncate(x - middle))
        row = choose(y < middle, _I(-1), truncate(y - middle))
        places.x[i], places.y[i] = x - middle - np.float64(column), y - middle - np.float64(row)
        places.column[i], places.row[i] = column, row
        is_inner = (
            (column >= num_before)
            & (_I(column + num_after) <= last_column)
            & (row >= num_before)
            & (_I(row + num_after) <= last_row)
        )
        places.kind[i] = choose(is_in_image, choose(is_inner, INNER, AT_BORDER), OUTSIDE)


@kernel_function
def _weigh_linearly(distances, weights):
    """Set the weights of two neighbours, from the distances from the first one."""
    for i in range(LENGTH):
        weights[0, i], weights[1, i] = _F(1 - distances[i]), _F(distances[i])


@kernel_function
def _weigh_cubically(distances, weights):
    """Set the weights of four neighbours, from the distances from the second one."""
    for i in range(LENGTH):
        d = distances[i]
        weights[0, i], weights[1, i] = _F(d * (d * (2 - d) - 1)), _F(1 + d * d * (d - 2))
        weights[2, i], weights[3, i] = _F(d * (1 + d * (1 - d))), _F(d * d * (d - 1))


@kernel_function
def _copy_nearest(before, width, places, count, pixels, to):
    for i in range(count):
        if places.kind[i] != OUTSIDE:
            pixel = load_pixel(before, _U(3 * (places.row[i] * width + places.column[i])))
            store_pixel(pixel, pixels, _U(3 * (to + i)))


@kernel_function
def _mix_four(before, height, width, places, count, pixels, to):
    stride, x, y = _U(3 * width), places.x_weights, places.y_weights
    for i in range(count):
        if places.kind[i] == OUTSIDE:
            continue
        if places.kind[i] == AT_BORDER:
            columns, rows = _limit_two(places.column[i], width, 3), _limit_two(places.row[i], height, 3 * width)
        else:
            first = _U(3 * (places.row[i] * width + places.column[i]))
            columns, rows = (_U(0), _U(3)), (first, first + stride)
        pixel = mix_quickly(before, columns, rows, (x[0, i], x[1, i]), (y[0, i], y[1, i]))
        if pixel < 0:
            pixel = mix_exactly(before, columns, rows, places.x[i], places.y[i])
        store_pixel(pixel, pixels, _U(3 * (to + i)))


@kernel_function
def _mix_sixteen(before, height, width, places, count, pixels, to):
    stride, x, y = _U(3 * width), places.x_weights, places.y_weights
    for i in range(count):
        if places.kind[i] == OUTSIDE:
            continue
        if places.kind[i] == AT_BORDER:
            columns, rows = _limit_four(places.column[i], width, 3), _limit_four(places.row[i], height, 3 * width)
        else:
            first = _U(3 * ((places.row[i] - 1) * width + places.column[i] - 1))
            columns = (_U(0), _U(3), _U(6), _U(9))
            rows = (first, first + stride, first + _U(2) * stride, first + _U(3) * stride)
        x_weights, y_weights = (x[0, i], x[1, i], x[2, i], x[3, i]), (y[0, i], y[1, i], y[2, i], y[3, i])
        pixel = mix_quickly(before, columns, rows, x_weights, y_weights)
        if pixel < 0:
            pixel = mix_exactly(before, columns, rows, places.x[i], places.y[i])
        store_pixel(pixel, pixels, _U(3 * (to + i)))


@kernel_function
def _limit_two(index, count, stride):
    """Return where the row or column at an index and the next one begin."""
    return _limit(index, count, stride), _limit(index + 1, count, stride)


@kernel_function
def _limit_four(index, count, stride):
    """Return where the row or column before an index, that at the index, and the next two begin."""
    return (
        *(_limit(index - 1, count, stride), _limit(index, count, stride)),
        *(_limit(index + 1, count, stride), _limit(index + 2, count, stride)),
    )


@kernel_function
def _limit(index, count, stride):
    """Return where a row or column begins; beyond the border, that at the border."""
    return _U(min(max(np.int64(index), 0), count - 1) * stride)
