"""Plan what to fetch of several datasets that are read as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from shardio.reading.read_ahead import RemoteSamples


class RemoteParts:
    """The samples of several datasets: see :class:`~shardio.reading.read_ahead.RemoteSamples`.

    Args:
        parts: What can be read ahead of each dataset; None for a local one.
        divide: A function that divides indices among the datasets: it yields the number of a dataset, and the indices
            of samples in it, in the same order.
    """

    def __init__(
        self,
        parts: Sequence[RemoteSamples | None],
        divide: Callable[[NDArray[np.int64]], Iterator[tuple[int, NDArray[np.int64]]]],
    ) -> None:
        self._parts, self._divide = parts, divide

    def choose_lengths(self, first: int | None, size: int | None) -> Iterator[int]:
        return map(min, zip(*(part.choose_lengths(first, size) for part in self._parts if part), strict=True))

    def plan(self, indices: NDArray[np.int64], num_before: int) -> list[Callable[[], object]]:
        divided = self._divide(indices)
        plans = [part.plan(inner, num_before) for number, inner in divided if (part := self._parts[number])]
        # In turn, because the samples of all datasets are mixed.
        return [fetch for fetch in chain.from_iterable(zip_longest(*plans)) if fetch is not None]
