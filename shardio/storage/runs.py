"""Read many small ranges of a local file with few reads: neighbouring ranges are read together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

MAX_GAP = 4096
"""The largest gap, in bytes, to read along with its neighbours. Reading it costs as much as another call."""

MAX_SMALL = 16 * 1024
"""The largest range, in bytes, to read with others. Copying a larger one from a run costs more than a separate call."""

MAX_RUN = 2**20
"""The approximate limit of a run, in bytes. A longer run would leave the processor's caches before it is split."""


def read_runs(read: Callable[[int, int], bytes], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
    """Read many ranges of a file, neighbouring ranges together.

    Args:
        read: A function that returns the bytes [start, stop).
        starts: int64 [n], where the ranges start, in any order.
        stops: int64 [n], where they stop.

    Returns:
        The n contents.
    """
    if len(starts) == 0:
        return []
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    firsts = _find_runs(starts, stops)
    # Plain integers from here on: numpy's cost ten times as much per use.
    run_starts = starts[firsts].tolist()
    run_stops = np.maximum.reduceat(stops, firsts).tolist()
    lasts = [*firsts[1:].tolist(), len(starts)]
    run_start = np.repeat(starts[firsts], np.diff(firsts, append=len(starts)))
    begins, ends = (starts - run_start).tolist(), (stops - run_start).tolist()
    found: list[bytes] = []
    for first, last, start, stop in zip(firsts.tolist(), lasts, run_starts, run_stops, strict=True):
        content = read(start, stop)
        if last - first == 1:
            found.append(content)
        else:
            found += [content[begin:end] for begin, end in zip(begins[first:last], ends[first:last], strict=True)]
    if (order[1:] > order[:-1]).all():
        return found
    contents = [b""] * len(found)
    for i, content in zip(order.tolist(), found, strict=True):
        contents[i] = content
    return contents


def _find_runs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the first range of each run; ranges are sorted by their starts."""
    is_small = stops - starts <= MAX_SMALL
    is_first = np.ones(len(starts), dtype=np.bool_)
    is_first[1:] = (starts[1:] - stops[:-1] > MAX_GAP) | ~is_small[1:] | ~is_small[:-1]
    firsts = np.flatnonzero(is_first)
    run_start = np.repeat(starts[firsts], np.diff(firsts, append=len(starts)))
    stretch = (starts - run_start) // MAX_RUN
    is_first[1:] |= stretch[1:] != stretch[:-1]
    return np.flatnonzero(is_first)
