"""Histograms of sizes, in bins with round bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BINS = 24
"""The maximum number of bins."""

BINS_PER_OCTAVE = (4.0, 2.0, 1.0, 0.5, 0.25)
"""How many bins a doubling may have, the most detailed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The numbers of values in bins.

    Attributes:
        edges: The b + 1 bounds of the bins, ascending. A bin includes its lower bound, and the last one both bounds.
        counts: The numbers of values, b of them.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def dump(self) -> dict[str, Any]:
        """Return the histogram as values for JSON."""
        return {"edges": list(self.edges), "counts": list(self.counts)}


def make_log_histogram(values: NDArray[np.int64]) -> Histogram:
    """Return a histogram of positive integers whose bins are equally wide on a logarithmic scale.

    The bounds are powers of two with simple exponents, rounded up. Smaller values than 1 count as 1.

    >>> make_log_histogram(np.array([1, 2, 3, 8, 1000]))
    Histogram(edges=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), counts=(1, 2, 0, 1, 0, 0, 0, 0, 0, 1))
    """
    if not len(values):
        return Histogram(edges=(), counts=())
    values = np.maximum(values, 1)
    low, high = math.log2(values.min()), math.log2(values.max())
    for per_octave in BINS_PER_OCTAVE:
        first, last = math.floor(low * per_octave), math.floor(high * per_octave) + 1
        edges = np.unique(np.ceil(2 ** (np.arange(first, last + 1) / per_octave)).astype(np.int64))
        if last - first <= MAX_BINS and len(edges) == last + 1 - first:
            break
    counts, _ = np.histogram(values, edges)
    return Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def take_most_common(counts: Counter[str], num_kept: int) -> tuple[list[tuple[str, int]], int, int]:
    """Return the most frequent things with their counts, how many others there are, and the sum of their counts."""
    common = counts.most_common(num_kept)
    return common, len(counts) - len(common), counts.total() - sum(count for _, count in common)


def describe_imbalance(counts: Sequence[int]) -> str:
    """Return how unevenly things are distributed over classes, as text."""
    smallest, largest = min(counts), max(counts)
    if smallest == largest:
        return f"{smallest} each"
    ratio = f"the largest has {largest / smallest:.3g} times as many as the smallest"
    return f"{smallest} to {largest} each, median {np.median(counts):g}; {ratio}"
