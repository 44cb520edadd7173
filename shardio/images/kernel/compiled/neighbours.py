"""Operations in which a pixel depends on others, with the results of Pillow."""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import copy_four, kernel_function, shaped
from shardio.images.kernel.compiled.scalars import clamp, truncate

_F, _I = np.float32, np.int32


@kernel_function
def sharpen(before, pixels, height, width, factor):
    """Blend pixels with a smoothed image, as ImageEnhance.Sharpness does. Those at the border stay as they are.

    Args:
        before: uint8 [3 height * width], the image.
        pixels: The same, for the result; it contains the image, too.
        height: The image's height.
        width: The image's width.
        factor: float32, the weight of the image.
    """
    row = 3 * width
    for y in range(1, height - 1 if width > 2 else 0):
        above, here, below = (
            shaped(before, (y - 1) * row, (row,)),
            shaped(before, y * row, (row,)),
            shaped(before, (y + 1) * row, (row,)),
        )
        out = shaped(pixels, y * row + 3, (row - 6,))
        for i in range(row - 6):
            # Pillow's sum of weights 1/13 and 5/13, rounded. 5042 / 2^16 is just above 1/13, for all such sums.
            value = _I(here[i + 3])
            total = _I(_I(_sum_three(above, i) + _sum_three(here, i)) + _sum_three(below, i))
            total = _I(total + _I(value * _I(4)))
            smooth = _F(_I(_I(_I(total + _I(6)) * _I(5042)) >> _I(16)))
            out[i] = clamp(truncate(smooth + factor * (_F(value) - smooth)))


@kernel_function
def _sum_three(row, i):
    """Return the sum of a colour of three adjacent pixels."""
    return _I(_I(_I(row[i]) + _I(row[i + 3])) + _I(row[i + 6]))


@kernel_function
def erase(pixels, height, width, numbers):
    """Make a part of an image one colour.

    Args:
        pixels: uint8 [3 height * width], the image.
        height: The image's height.
        width: The image's width.
        numbers: float64 [9]: top, left, height and width of the part, then red, green and blue.
    """
    top, left = max(np.int64(numbers[0]), 0), max(np.int64(numbers[1]), 0)
    stop = min(np.int64(numbers[0] + numbers[2]), height)
    count = min(np.int64(numbers[1] + numbers[3]), width) - left
    for y in range(top, stop if count > 0 else top):
        part = shaped(pixels, 3 * (y * width + left), (3 * count,))
        fill_pixels(part, np.uint8(numbers[4]), np.uint8(numbers[5]), np.uint8(numbers[6]))


@kernel_function
def flip_vertically(pixels, height, width):
    """Turn an image upside down."""
    for y in range(height // 2):
        upper = shaped(pixels, 3 * y * width, (3 * width,))
        lower = shaped(pixels, 3 * (height - 1 - y) * width, (3 * width,))
        for i in range(3 * width):
            upper[i], lower[i] = lower[i], upper[i]


@kernel_function
def transform_affinely(before, pixels, height, width, numbers, sources):
    """Replace each pixel by that at its place times a matrix, as Image.transform does without interpolation.

    Args:
        before: uint8 [3 height * width], the image; one more byte can be read after it.
        pixels: uint8 [3 height * width], for the result.
        height: The image's height. Pillow's result is certain only below 2^15.
        width: The same.
        numbers: float64 [...]: the matrix, and red, green and blue of pixels outside the image.
        sources: int32 [...], for temporary numbers.
    """
    fill_pixels(pixels, np.uint8(numbers[6]), np.uint8(numbers[7]), np.uint8(numbers[8]))
    if numbers[1] == 0 and numbers[3] == 0:
        _scale(before, pixels, height, width, numbers)
    elif (
        _is_within(numbers, 0, 0)
        and _is_within(numbers, width, height)
        and (_is_within(numbers, 0, height) and _is_within(numbers, width, 0))
        and max(height, width) < 32768
    ):
        _transform_by_integers(before, pixels, height, width, numbers, sources)
    else:
        _transform_by_floats(before, pixels, height, width, numbers)


@kernel_function
def _is_within(numbers, x, y):
    return (
        abs(x * numbers[0] + y * numbers[1] + numbers[2]) < 32768
        and abs(x * numbers[3] + y * numbers[4] + numbers[5]) < 32768
    )


@kernel_function
def fill_pixels(pixels, red, green, blue):
    """Make all pixels one colour."""
    if red == green == blue:
        for i in range(len(pixels)):
            pixels[i] = red
    else:
        for i in range(len(pixels) // 3):
            pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2] = red, green, blue


@kernel_function
def _scale(before, pixels, height, width, numbers):
    y_in = numbers[5] + numbers[4] * 0.5
    start, stop, first, is_moved = _find_columns(width, numbers)
    for y in range(height):
        row = _place(y_in)
        if 0 <= row < height:
            if is_moved:
                _copy_pixels(before, row * width + first, pixels, y * width + start, stop - start)
            else:
                x_in = numbers[2] + numbers[0] * 0.5
                for x in range(stop):
                    column = _place(x_in)
                    if 0 <= column < width:
                        _copy_pixel(before, row * width + column, pixels, y * width + x)
                    x_in += numbers[0]
        y_in += numbers[4]


@kernel_function
def _find_columns(width, numbers):
    """Return the first and last columns that show the image, what the first one shows, and whether all are moved alike.

    The end is one more than the last column.
    """
    start, stop, first, is_moved = width, np.int64(0), np.int64(0), True
    x_in = numbers[2] + numbers[0] * 0.5
    for x in range(width):
        column = _place(x_in)
        if 0 <= column < width:
            if start == width:
                start, first = x, column
            is_moved = is_moved and column == first + x - start
            stop = x + 1
        x_in += numbers[0]
    return start, stop, first, is_moved


@kernel_function
def _transform_by_integers(before, pixels, height, width, numbers, sources):
    step_x, step_y = _fixed(numbers[0]), _fixed(numbers[3])
    row_x = _fixed(numbers[2] + numbers[0] * 0.5 + numbers[1] * 0.5)
    row_y = _fixed(numbers[5] + numbers[3] * 0.5 + numbers[4] * 0.5)
    for y in range(height):
        start, stop = np.int64(0), width  # The columns that show the image are adjacent.
        while start < stop and not _shows(row_x + start * step_x, row_y + start * step_y, height, width):
            start += 1
        while start < stop and not _shows(row_x + (stop - 1) * step_x, row_y + (stop - 1) * step_y, height, width):
            stop -= 1
        x_in, y_in = row_x + start * step_x, row_y + start * step_y
        if step_x == 1 << 16 and step_y == 0 and start < stop:
            source = (y_in >> 16) * width + (x_in >> 16)
            _copy_pixels(before, source, pixels, y * width + start, stop - start)
        else:
            for first in range(start, stop, len(sources)):
                count = min(len(sources), stop - first)
                x_in, y_in = row_x + first * step_x, row_y + first * step_y
                _find_sources(x_in, y_in, step_x, step_y, width, sources, count)
                # Four bytes at once; the next pixel overwrites the fourth.
                for i in range(count - 1):
                    copy_four(before, np.uint64(3 * sources[i]), pixels, np.uint64(3 * (y * width + first + i)))
                _copy_pixel(before, sources[count - 1], pixels, y * width + first + count - 1)
        row_x += _fixed(numbers[1])
        row_y += _fixed(numbers[4])


@kernel_function
def _find_sources(x_in, y_in, step_x, step_y, width, sources, count):
    """Set the indices of the pixels at places along a line, in 1/2^16 pixels. All places are in the image."""
    for i in range(count):
        x, y = _I(x_in + _I(_I(i) * _I(step_x))), _I(y_in + _I(_I(i) * _I(step_y)))
        sources[i] = _I(_I(_I(y >> _I(16)) * _I(width)) + _I(x >> _I(16)))


@kernel_function
def _shows(x_in, y_in, height, width):
    """Return whether a place, in 1/2^16 pixels, is in the image."""
    return 0 <= x_in >> 16 < width and 0 <= y_in >> 16 < height


@kernel_function
def _copy_pixels(before, source, pixels, to, count):
    """Copy adjacent pixels."""
    ours, theirs = shaped(pixels, 3 * to, (3 * count,)), shaped(before, 3 * source, (3 * count,))
    for i in range(3 * count):
        ours[i] = theirs[i]


@kernel_function
def _transform_by_floats(before, pixels, height, width, numbers):
    row_x = numbers[2] + numbers[1] * 0.5 + numbers[0] * 0.5
    row_y = numbers[5] + numbers[4] * 0.5 + numbers[3] * 0.5
    for y in range(height):
        x_in, y_in = row_x, row_y
        for x in range(width):
            column, row = _place(x_in), _place(y_in)
            if 0 <= column < width and 0 <= row < height:
                _copy_pixel(before, row * width + column, pixels, y * width + x)
            x_in += numbers[0]
            y_in += numbers[3]
        row_x += numbers[1]
        row_y += numbers[4]


@kernel_function
def _fixed(number):
    """Return a number as an integer with 16 bits after the point."""
    return np.int64(np.floor(number * 65536.0 + 0.5))


@kernel_function
def _place(number):
    """Return the pixel at a coordinate; -1 if it is before the first one."""
    return np.int64(-1) if number < 0 else np.int64(min(number, 2.0**40))


@kernel_function
def _copy_pixel(before, source, pixels, to):
    for colour in range(3):
        pixels[3 * to + colour] = before[3 * source + colour]
