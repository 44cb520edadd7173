"""Bilinear resizing in numpy: the definition that all decoders follow.

Its pixels are those of OpenCV's INTER_LINEAR on x86 (resize.cpp). OpenCV's code for other processors rounds
differently in some versions, so OpenCV resizes only where it is known to give the same pixels. The kernel has its own
code for the same definition.

Weights have 11 bits. Rows are resized across first and keep 7 bits more than a pixel has. Then two of them are mixed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.pixels import Pixels

_ONE = np.float32(1 << 11)
"""The sum of two weights (resize.cpp, INTER_RESIZE_COEF_SCALE)."""

_CHECKED = (
    ((37, 53), (20, 31)),
    ((61, 40), (33, 38)),
    ((50, 83), (45, 41)),
    ((48, 64), (15, 40)),
    ((23, 17), (61, 70)),
)
"""The sizes before and after resizing with which OpenCV is checked. Results of OpenCV for ARM differ where both sides
shrink."""


class Points(NamedTuple):
    """The points along one side at which an image is sampled, n of them.

    Attributes:
        first: int64 [n], the first of the two pixels that each point lies between. It may be outside the image.
        weights: int32 [2, n], the weights of both.
    """

    first: NDArray[np.int64]
    weights: NDArray[np.int32]

    @classmethod
    def place(cls, positions: NDArray[np.floating[Any]], length: int | None = None) -> Points:
        """Return the points at some positions.

        Args:
            positions: Float [n], in pixels from the centre of the first one.
            length: The number of pixels of the side, if the border's pixel gets all the weight beyond the border;
                None if both pixels are the border's there, which rounds differently.
        """
        exact = positions.astype(np.float32)
        first = np.floor(exact)
        part = exact - first
        if length is not None:
            part[(first < 0) | (first >= length - 1)] = 0
            first = first.clip(0, length - 1)
        weights = np.stack([np.float32(1) - part, part]) * _ONE
        return cls(first.astype(np.int64), np.rint(weights).astype(np.int32))


def resize_bilinear(image: Pixels, height: int, width: int) -> Pixels:
    """Resize an image, uint8 [rows, columns, 3], to uint8 [height, width, 3]."""
    num_rows, num_columns = image.shape[:2]
    rows, columns = _positions(num_rows, height), _positions(num_columns, width)
    return _mix(image, Points.place(rows), Points.place(columns, num_columns))


def sample(image: Pixels, corner: tuple[float, float], step: tuple[float, float], height: int, width: int) -> Pixels:
    """Sample an image bilinearly on a grid whose points may be between pixels.

    Args:
        image: uint8 [rows, columns, 3]. Beyond its border, the border's pixels are repeated.
        corner: The position of the first sample, down and across, in pixels from the centre of the first pixel.
        step: The distance between samples, down and across, in pixels.
        height: The number of samples down.
        width: The number of samples across.

    Returns:
        uint8 [height, width, 3].
    """
    rows = Points.place(corner[0] + step[0] * np.arange(height))
    return _mix(image, rows, Points.place(corner[1] + step[1] * np.arange(width), image.shape[1]))


@cache
def is_opencv_equal() -> bool:
    """Return whether OpenCV's pixels follow the definition in this process."""
    import cv2  # Not before an image needs it: see resizing.py.

    random = np.random.default_rng(0)
    for before, (height, width) in _CHECKED:
        image = random.integers(0, 256, (*before, 3), np.uint8)
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        if not np.array_equal(resized, resize_bilinear(image, height, width)):
            return False
    return True


def _mix(image: Pixels, rows: Points, columns: Points) -> Pixels:
    """Sample an image at n rows and m columns: each result, uint8 [n, m, 3], is a weighted mean of four pixels."""
    top, stop = (int(bound) for bound in np.clip([rows.first[0], rows.first[-1] + 2], 0, len(image)))
    image = image[min(top, len(image) - 1) : max(stop, 1)]  # Only these rows are needed.
    left, right = (image.take(np.clip(columns.first + i, 0, image.shape[1] - 1), axis=1) for i in range(2))
    near, far = np.repeat(columns.weights, 3, axis=1)  # All colours of a row are computed together.
    across = left.reshape(len(image), -1) * near + right.reshape(len(image), -1) * far >> 4
    upper, lower = (across.take(np.clip(rows.first - top + i, 0, len(image) - 1), axis=0) for i in range(2))
    near, far = rows.weights[:, :, np.newaxis]
    mixed = (upper * near >> 16) + (lower * far >> 16) + 2 >> 2
    pixels: Pixels = mixed.astype(np.uint8).reshape(len(rows.first), -1, 3)
    return pixels


def _positions(num_before: int, num_after: int) -> NDArray[np.floating[Any]]:
    """Return the positions of the centres of a resized side's pixels."""
    return (np.arange(num_after) + 0.5) * (1.0 / (num_after / num_before)) - 0.5
