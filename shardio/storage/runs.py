"""Many small pieces of a file by few reads: neighbours are read together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.sample import ByteRange
from shardio.storage.local import LocalFile

MAX_GAP = 4096
"""Bytes between two pieces that are read along with them: as much as the next call would cost."""

MAX_SMALL = 16 * 1024
"""Bytes of a piece that is read together with others: copying a larger one out costs more than a call of its own."""

MAX_RUN = 2**20
"""Bytes of a run, about: more would not stay in the processor's caches until it is taken apart."""


def read_pieces(file: LocalFile, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
    """Read pieces of a file.

    Args:
        file: The file.
        starts: int64 [n], where the pieces begin, in any order.
        stops: int64 [n], where they end.

    Returns:
        The n contents.

    Raises:
        OSError: If the file cannot be read.
        EOFError: If it ends before a piece does.
    """
    if len(starts) == 0:
        return []
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    firsts = _find_runs(starts, stops)
    # Plain integers from here on: a number of numpy's costs ten times as much each time that it is used.
    run_starts = starts[firsts].tolist()
    run_stops = np.maximum.reduceat(stops, firsts).tolist()
    lasts = [*firsts[1:].tolist(), len(starts)]
    run_start = np.repeat(starts[firsts], np.diff(firsts, append=len(starts)))
    begins, ends = (starts - run_start).tolist(), (stops - run_start).tolist()
    found: list[bytes] = []
    for first, last, start, stop in zip(firsts.tolist(), lasts, run_starts, run_stops, strict=True):
        content = file.read(ByteRange(start=start, stop=stop))
        if last - first == 1:
            found.append(content)
        else:
            found += [content[begin:end] for begin, end in zip(begins[first:last], ends[first:last], strict=True)]
    if (order[1:] > order[:-1]).all():
        return found
    pieces = [b""] * len(found)
    for place, content in zip(order.tolist(), found, strict=True):
        pieces[place] = content
    return pieces


def _find_runs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the first piece of each run; pieces are sorted by where they begin."""
    is_small = stops - starts <= MAX_SMALL
    is_first = np.ones(len(starts), dtype=np.bool_)
    is_first[1:] = (starts[1:] - stops[:-1] > MAX_GAP) | ~is_small[1:] | ~is_small[:-1]
    firsts = np.flatnonzero(is_first)
    run_start = np.repeat(starts[firsts], np.diff(firsts, append=len(starts)))
    stretch = (starts - run_start) // MAX_RUN
    is_first[1:] |= stretch[1:] != stretch[:-1]
    return np.flatnonzero(is_first)
