"""Read many ranges of a file with few reads: neighbouring ranges are read together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Which ranges are read together.

    Attributes:
        max_gap: The largest gap, in bytes, to read along with its neighbours.
        max_small: The largest range, in bytes, to read with others.
        max_run: The approximate limit of a run, in bytes.
    """

    max_gap: int
    max_small: int
    max_run: int


def read_runs(
    read: Callable[[Sequence[int], Sequence[int]], list[bytes]],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    limits: RunLimits,
) -> list[bytes]:
    """Read many ranges of a file, neighbouring ranges together.

    Args:
        read: A function that returns the bytes [start, stop) for each start and stop.
        starts: int64 [n], where the ranges start, in any order.
        stops: int64 [n], where they stop.
        limits: Which ranges are neighbours.

    Returns:
        The n contents.
    """
    if len(starts) == 0:
        return []
    order = starts.argsort(kind="stable")
    starts, stops = starts[order], stops[order]
    firsts = _find_runs(starts, stops, limits)
    # Plain integers from here on: numpy's cost ten times as much per use.
    begins, ends = starts.tolist(), stops.tolist()
    bounds = list(zip(firsts, [*firsts[1:], len(begins)], strict=True))
    run_starts = [begins[first] for first in firsts]
    runs = read(run_starts, [ends[first] if last - first == 1 else max(ends[first:last]) for first, last in bounds])
    found: list[bytes] = []
    for (first, last), start, content in zip(bounds, run_starts, runs, strict=True):
        if last - first == 1:
            found.append(content)
        else:
            found += [content[begins[i] - start : ends[i] - start] for i in range(first, last)]
    if (order[1:] > order[:-1]).all():
        return found
    contents = [b""] * len(found)
    for i, content in zip(order.tolist(), found, strict=True):
        contents[i] = content
    return contents


def _find_runs(starts: NDArray[np.int64], stops: NDArray[np.int64], limits: RunLimits) -> list[int]:
    """Return the index of the first range of each run; ranges are sorted by their starts."""
    is_small = stops - starts <= limits.max_small
    is_first = np.empty(len(starts), np.bool_)
    is_first[0] = True
    is_first[1:] = (starts[1:] - stops[:-1] > limits.max_gap) | ~(is_small[1:] & is_small[:-1])
    firsts = is_first.nonzero()[0]
    if len(firsts) < len(starts) and stops[-1] - starts[0] > limits.max_run:  # There may be long runs.
        lengths = np.diff(firsts, append=len(starts))
        stretch = (starts - np.repeat(starts[firsts], lengths)) // limits.max_run
        is_first[1:] |= stretch[1:] != stretch[:-1]
        firsts = is_first.nonzero()[0]
    found: list[int] = firsts.tolist()
    return found
