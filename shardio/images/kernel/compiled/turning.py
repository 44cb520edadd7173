"""Turn stored pixels upright, as an image's EXIF orientation says."""

from __future__ import annotations

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.records import MIRRORED, TRANSPOSED, UPSIDE_DOWN
from shardio.images.kernel.compiled.vectors import LENGTH


@kernel_function
def find_stored_box(box, turn, height, width):
    """Convert a box of the upright picture to one of the stored picture, whose size is ``height`` × ``width``.

    Boxes are top, left, height and width.
    """
    box_top, box_left, box_height, box_width = box
    if turn & TRANSPOSED:
        box_top, box_left, box_height, box_width = box_left, box_top, box_width, box_height
    top = height - box_top - box_height if turn & UPSIDE_DOWN else box_top
    left = width - box_left - box_width if turn & MIRRORED else box_left
    return top, left, box_height, box_width


@kernel_function
def turn_pixels(pixels, start, row_length, height, width, turn, turned):
    """Copy the pixels of a box to another array, in the order of the upright picture.

    Args:
        pixels: uint32 [...], the stored picture.
        start: The index of the box's first pixel.
        row_length: The distance from one row to the next.
        height: The height of the box in the upright picture.
        width: Its width there.
        turn: How to turn it.
        turned: uint32 [...], for rows of ``width`` pixels.
    """
    num_rows, num_columns = (width, height) if turn & TRANSPOSED else (height, width)  # Of the stored box.
    down, across = row_length, 1
    if turn & UPSIDE_DOWN:
        start, down = start + (num_rows - 1) * row_length, -row_length
    if turn & MIRRORED:
        start, across = start + num_columns - 1, -1
    if turn & TRANSPOSED:
        down, across = across, down
    for first in range(0, width, LENGTH):  # Stored pixels that share a cache line are copied soon after one another.
        for row in range(height):
            for column in range(first, min(first + LENGTH, width)):
                turned[row * width + column] = pixels[start + row * down + column * across]
