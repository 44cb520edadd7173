"""Several steps at once: computing the order of one position takes as long as that of several hundred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.order.epoch_order import EpochOrder
from shardio.order.split import Split

POSITIONS_AT_ONCE = 4096
"""The smallest number of positions whose order is computed at once, apart from the last ones."""


def iterate_steps(
    order: EpochOrder, split: Split, steps: Sequence[int]
) -> Iterator[tuple[list[NDArray[np.int64]], NDArray[np.int64]]]:
    """Yield the positions and the indices of several steps at a time.

    Args:
        order: The epoch's order.
        split: One rank's share of it.
        steps: The steps to yield.

    Yields:
        A list with the positions of each step, and the concatenated indices of all their samples, int64 [n].
    """
    steps_at_once = -(-POSITIONS_AT_ONCE // split.batch_size)
    for first in range(0, len(steps), steps_at_once):
        positions = [split.batch(step) for step in steps[first : first + steps_at_once]]
        yield positions, order.samples_at(np.concatenate(positions))
