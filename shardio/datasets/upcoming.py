"""Read ahead what a rank reads soon, according to the order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.ordered import Ordered
from shardio.datasets.transformed import Transformed
from shardio.order import Cursor, Split
from shardio.reading import read_nothing_ahead, read_stretches_ahead


def read_ahead(
    order: Ordered,
    dataset: Transformed,
    cursor: Cursor,
    split: Split,
    inner_indices: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which a rank's samples are read ahead if they are remote.

    Its value is a function to call with the number of samples that the rank is about to read.

    Args:
        order: The order.
        dataset: The dataset.
        cursor: Where the epoch begins.
        split: The rank's share.
        inner_indices: Maps the order's indices to those of samples in the dataset; None if they are the same.
    """
    if (samples := dataset.remote_samples()) is None:
        return read_nothing_ahead()
    upcoming = (indices for _, indices in order.steps(cursor, split))
    return read_stretches_ahead(
        samples, upcoming if inner_indices is None else map(inner_indices, upcoming), *_windows(order, split)
    )


def _windows(order: Ordered, split: Split) -> tuple[int | None, int | None]:
    """Return how many of a rank's samples lie in the rest of the first window, and in each further one, of all lanes.

    Without shuffling, there are none.
    """
    if not order.shuffle:
        return None, None
    length = order.lanes * order.window
    rest = length - split.start % length
    return -(-rest // split.world_size), -(-length // split.world_size)
