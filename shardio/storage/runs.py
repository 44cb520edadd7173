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
    order = starts.argsort(kind="stable")
    starts, stops = starts[order], stops[order]
    firsts = _find_runs(starts, stops)
    # Plain integers from here on: numpy's cost ten times as much per use.
    begins, ends = starts.tolist(), stops.tolist()
    found: list[bytes] = []
    for first, last in zip(firsts, [*firsts[1:], len(begins)], strict=True):
        start = begins[first]
        if last - first == 1:
            found.append(read(start, ends[first]))
        else:
            content = read(start, max(ends[first:last]))
            found += [content[begins[i] - start : ends[i] - start] for i in range(first, last)]
    if (order[1:] > order[:-1]).all():
        return found
    contents = [b""] * len(found)
    for i, content in zip(order.tolist(), found, strict=True):
        contents[i] = content
    return contents


def _find_runs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[int]:
    """Return the index of the first range of each run; ranges are sorted by their starts."""
    is_small = stops - starts <= MAX_SMALL
    is_first = np.empty(len(starts), np.bool_)
    is_first[0] = True
    is_first[1:] = (starts[1:] - stops[:-1] > MAX_GAP) | ~(is_small[1:] & is_small[:-1])
    firsts = is_first.nonzero()[0]
    if len(firsts) < len(starts) and stops[-1] - starts[0] > MAX_RUN:  # There may be long runs.
        lengths = np.diff(firsts, append=len(starts))
        stretch = (starts - np.repeat(starts[firsts], lengths)) // MAX_RUN
        is_first[1:] |= stretch[1:] != stretch[:-1]
        firsts = is_first.nonzero()[0]
    found: list[int] = firsts.tolist()
    return found
