"""Read ahead what a rank reads soon, according to the order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.ordered import Ordered
from shardio.order import Cursor, Split
from shardio.reading import start_reading_ahead
from shardio.shards import ShardTable


def read_ahead(
    order: Ordered,
    table: ShardTable,
    fields: Sequence[str],
    cursor: Cursor,
    split: Split,
    inner_indices: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which a rank's remote shards are read ahead.

    Its value is a function to call with the number of samples that the rank is about to read.

    Args:
        order: The order.
        table: The shards.
        fields: The names of the fields that are read.
        cursor: Where the epoch begins.
        split: The rank's share.
        inner_indices: Maps the order's indices to those of samples in the shards; None if they are the same.
    """
    upcoming = (indices for _, indices in order.steps(cursor, split))
    return start_reading_ahead(
        table, fields, upcoming if inner_indices is None else map(inner_indices, upcoming), *_stretches(order, split)
    )


def _stretches(order: Ordered, split: Split) -> tuple[int | None, int | None]:
    """Return how many of a rank's samples lie in the rest of the first stretch, and in each further one.

    A stretch is one window in each lane. Without shuffling, there are none.
    """
    if not order.shuffle:
        return None, None
    length = order.lanes * order.window
    rest = length - split.start % length
    return -(-rest // split.world_size), -(-length // split.world_size)
