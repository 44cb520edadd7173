"""Decode images small, in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.images import Picture, Pixels, use_one_thread
from shardio.images.jpeg.regions import Box
from shardio.interruptions import let_through
from shardio.looking.source import ImageSource, Unreadable
from shardio.processors import count_processors

Result = TypeVar("Result")

IMAGES_PER_TASK = 16
"""The number of images that a thread reads at a time."""

SCALES = (8, 4, 2)
"""The factors by which JPEGs can be decoded smaller."""


def read_small(picture: Picture, min_side: int) -> tuple[Pixels, int]:
    """Decode a picture. A JPEG is decoded as small as possible, with both sides at least ``min_side`` pixels.

    Returns:
        The pixels, uint8 [height, width, 3], valid until the same thread decodes the next picture; and by how much they
        are smaller: 1, 2, 4 or 8. The last ones may reach beyond the picture.

    Raises:
        ValueError: If the image is damaged.
    """
    height, width = picture.size
    scales = SCALES if picture.can_scale else ()
    scale = next((scale for scale in scales if min(height, width) >= scale * min_side), 1)
    return picture.read(Box(0, 0, -(-height // scale), -(-width // scale)), scale), scale


def map_images(
    source: ImageSource, indices: NDArray[np.int64], use: Callable[[bytes], Result]
) -> Iterator[tuple[NDArray[np.int64], list[Result | Unreadable]]]:
    """Call a function with the image files of some samples, in threads. Few images are in memory at a time.

    Args:
        source: Where the images are.
        indices: The samples' indices.
        use: The function. A ValueError means that the image cannot be decoded.

    Yields:
        The indices of some samples, and their results, in order.
    """
    use_one_thread()
    num_threads = count_processors()
    with ThreadPoolExecutor(num_threads) as threads:
        pending = deque[tuple[NDArray[np.int64], Future[list[Result | Unreadable]]]]()
        try:
            for start in range(0, len(indices), IMAGES_PER_TASK):
                chunk = indices[start : start + IMAGES_PER_TASK]
                pending.append((chunk, threads.submit(_use_images, source, chunk, use)))
                if len(pending) > 2 * num_threads:
                    done, future = pending.popleft()
                    yield done, future.result()
            for done, future in pending:
                yield done, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _use_images(
    source: ImageSource, indices: NDArray[np.int64], use: Callable[[bytes], Result]
) -> list[Result | Unreadable]:
    return [content if isinstance(content, Unreadable) else _try_use(content, use) for content in source.read(indices)]


def _try_use(content: bytes, use: Callable[[bytes], Result]) -> Result | Unreadable:
    try:
        return use(content)
    except ValueError as error:
        let_through(error)
        return Unreadable(reason=str(error) or type(error).__name__)
