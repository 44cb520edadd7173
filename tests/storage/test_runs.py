"""Which ranges of a local file are read together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings, strategies as st

from shardio.storage.local import LIMITS
from shardio.storage.store import read_runs

MAX_GAP, MAX_SMALL, MAX_RUN = LIMITS.max_gap, LIMITS.max_small, LIMITS.max_run
SIZE = 3 * MAX_RUN
CONTENT = np.random.default_rng(0).bytes(SIZE)


def read(ranges: list[tuple[int, int]]) -> tuple[list[bytes], list[int]]:
    """Return the contents of the ranges, and the sizes of the reads."""
    starts, stops = (np.array([each[side] for each in ranges], dtype=np.int64) for side in (0, 1))
    sizes = list[int]()

    def count_and_read(starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        sizes.extend(stop - start for start, stop in zip(starts, stops, strict=True))
        return [CONTENT[start:stop] for start, stop in zip(starts, stops, strict=True)]

    return read_runs(count_and_read, starts, stops, LIMITS), sizes


lengths = st.sampled_from([0, 1, 100, 1024, MAX_SMALL, MAX_SMALL + 1, 100_000])


@given(st.lists(st.tuples(st.integers(0, SIZE), lengths), max_size=60))
@settings(deadline=None)
def test_any_ranges_in_any_order_are_read(offsets: list[tuple[int, int]]) -> None:
    ranges = [(start, min(start + length, SIZE)) for start, length in offsets]
    assert read(ranges)[0] == [CONTENT[start:stop] for start, stop in ranges]


def test_neighbours_are_read_by_one_call() -> None:
    neighbours = [(i * 1536, i * 1536 + 1024) for i in range(512)]
    assert read(neighbours)[1] == [511 * 1536 + 1024]
    assert read(neighbours[::-1])[1] == [511 * 1536 + 1024]


def test_large_ranges_distant_ones_and_long_runs_are_read_apart() -> None:
    assert read([(0, MAX_SMALL + 1), (MAX_SMALL + 1, MAX_SMALL + 2)])[1] == [MAX_SMALL + 1, 1]
    assert read([(0, 10), (10 + MAX_GAP, 20 + MAX_GAP)])[1] == [20 + MAX_GAP]
    assert read([(0, 10), (11 + MAX_GAP, 21 + MAX_GAP)])[1] == [10, 10]
    sizes = read([(start, start + 1024) for start in range(0, SIZE, 1024)])[1]
    assert len(sizes) == 3
    assert max(sizes) <= MAX_RUN + MAX_SMALL
    assert sum(sizes) == SIZE
