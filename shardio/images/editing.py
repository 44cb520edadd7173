"""Apply operations to the pixels of rendered images, by the compiled functions or, without these, by Pillow.

Both give the same pixels. :mod:`shardio.images.kernel.compiled.operation_records` lists the operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.images.kernel import find_functions
from shardio.images.kernel.compiled.operation_records import OPERATION
from shardio.images.pixels import Pixels

Operations = NDArray[np.void]
"""OPERATION [n, k]: the operations on n images, in order."""


def make_operations(num_images: int, code: int, *numbers: object) -> Operations:
    """Return one operation for each image, OPERATION [n, 1].

    Args:
        num_images: n.
        code: The operation's code.
        numbers: Its numbers: for each, one for all images, or an array [n].
    """
    operations = np.zeros((num_images, 1), OPERATION)
    operations["code"] = code
    for index, number in enumerate(numbers):
        operations["numbers"][:, 0, index] = number
    return operations


def edit_images(rows: Pixels | Sequence[Pixels], operations: Operations) -> None:
    """Apply operations to images in place.

    Args:
        rows: The images: uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays.
        operations: OPERATION [n, k].
    """
    if not operations["code"].any():
        return
    edited = [np.ascontiguousarray(pixels) for pixels in rows]  # Most are contiguous, so they are not copied.
    functions = find_functions()
    if functions is not None:
        functions.edit_images(edited, np.ascontiguousarray(operations))
    else:
        from shardio.images.editing_by_pillow import edit_by_pillow

        edited = [edit_by_pillow(row, own) for row, own in zip(edited, operations, strict=True)]
    for pixels, row in zip(rows, edited, strict=True):
        if row is not pixels and not np.may_share_memory(row, pixels):
            np.copyto(pixels, row)
