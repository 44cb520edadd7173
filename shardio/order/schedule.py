"""The schedule of a mixture, which maps positions to sources by arithmetic.

Each source has a weight, and the weights add up to 1. After any number n of positions, a source of weight w has been
picked floor(n * w) or ceil(n * w) times. So item j of a source (j = 0, 1, …) has a window of positions, from
floor(j / w) to ceil((j + 1) / w) - 1. This is the condition of P-fair schedules (Baruah, Cohen, Plaxton and Varvel,
"Proportionate progress", 1996). Such a schedule is usually computed from its beginning. Here, it is cut into blocks
that are computed independently, so the source at any position can be found directly:

- At the beginning of a block, :func:`_round_counts` decides which sources are rounded up. The decision is a function of
  the position alone.
- In a block, among the items whose windows have begun, the one with the earliest deadline comes first.

A block has a complete schedule because of Hall's theorem. Consider the positions from x to y in a block. The items
whose windows lie between x and y fit if the block neither begins at x nor ends at y, because the number of these items
is at most the sum of floor(y * w) - ceil(x * w). For intervals at the beginning or at the end of a block, the rounding
ensures that the items fit: see :func:`_round_counts`. A block is long enough that every source is picked in it.

With a seed, neighboring positions of a block are then swapped at random as far as the windows allow, so the
sources do not alternate regularly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.order.epoch_order import derive_rng_key, make_rng_key, random_words

MAX_TOTAL = 2**31
"""The maximum sum of the integers that stand for weights. Its products with positions in a block fit in int64."""

MIN_SHARE = 2**-20
"""The minimum weight, as a share of the sum of all weights. A block must be long enough to contain every source."""

MIN_BLOCK = 1024
"""The minimum number of positions in a block."""

NUM_SWEEPS = 8
"""The number of times that neighboring positions may be swapped. In each sweep, a position has one neighbor."""

Ints = NDArray[np.int64]


def count_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Return integers in proportion to the weights, with a sum of at most 2**31.

    A float stands for the decimal number that Python prints. Proportions that need larger integers are rounded, so they
    change by less than 1e-9 of the sum.

    Raises:
        ValueError: If a weight is negative, infinite or not a number, if it is positive but less than about a millionth
            of the sum, or if no weight is positive.
    """
    for weight in weights:
        if not 0 <= weight < float("inf"):
            raise ValueError(f"a weight must be a number that is at least 0, got {weight!r}")
    exact = [Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise ValueError("all weights are 0: give at least one source a positive weight")
    if tiny := next((weight for weight in exact if 0 < weight < total * Fraction(MIN_SHARE)), None):
        raise ValueError(
            f"the weight {float(tiny):.3g} is less than a millionth of the sum of all weights ({float(total):.3g}): "
            "increase it, or use 0"
        )
    scale = lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    if sum(counts) // gcd(*counts) > MAX_TOTAL:
        counts = [int(weight * MAX_TOTAL / total) for weight in exact]
    divisor = gcd(*counts)
    return tuple(count // divisor for count in counts)


def _round_counts(position: int, weights: Sequence[int], total: int) -> list[int]:
    """Return the number of picks from each source before a position at which a block begins.

    Let f be the fraction by which a source's share exceeds an integer. The sum of all f is an integer h, so h sources
    are rounded up. The sources that are not rounded up must still fit after the position, in order of their deadlines:
    for every k, at least floor(sum of f) of the k sources with the earliest deadlines are rounded up. The sources that
    are rounded up must have fit before the position: for every k, at most ceil(sum of f) of the k sources whose windows
    began last are rounded up. Both conditions can be satisfied at once, because two nested families of sets form a
    totally unimodular matrix. The greedy choice rounds up a source only when the first condition requires it, and takes
    the source whose window began first.
    """
    shares = [divmod(position * weight, total) for weight in weights]
    counts = [count for count, _ in shares]
    pending = [source for source, (_, rest) in enumerate(shares) if rest]
    pending.sort(key=lambda source: -((shares[source][1] - total) // weights[source]))  # By deadline.
    candidates, rest = list[tuple[int, int]](), 0
    for source in pending:
        rest += shares[source][1]
        heappush(candidates, (shares[source][1] // -weights[source], source))  # The earliest window comes first.
        if rest >= total:
            rest -= total
            counts[heappop(candidates)[1]] += 1
    return counts


class Block(NamedTuple):
    """A block of a schedule.

    Attributes:
        sources: int64 [positions], the source of each position.
        items: int64 [positions], the number of earlier picks from the same source, counted from the schedule's start.
    """

    sources: Ints
    items: Ints


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with constant weights.

    Attributes:
        weights: The sources' weights, as integers. A source with weight 0 is never picked.
        seed: The seed of the swaps; None for no swaps.
    """

    weights: tuple[int, ...]
    seed: int | None = None
    _total: int = field(init=False)
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        total, smallest = sum(self.weights), min(filter(None, self.weights))
        object.__setattr__(self, "_total", total)
        object.__setattr__(self, "_length", max(MIN_BLOCK, -(-total // smallest)))

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of each position, and the number of earlier picks from that source; int64 [n] each."""
        sources, items = np.empty_like(positions), np.empty_like(positions)
        numbers, offsets = np.divmod(positions, self._length)
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            block = _make_block(self, number)
            sources[rows], items[rows] = block.sources[offsets[rows]], block.items[offsets[rows]]
        return sources, items

    def count(self, position: int) -> list[int]:
        """Return the number of picks from each source before a position."""
        number, offset = divmod(position, self._length)
        counts = _round_counts(number * self._length, self.weights, self._total)
        if offset:
            picked = np.bincount(_make_block(self, number).sources[:offset], minlength=len(counts))
            counts = [count + more for count, more in zip(counts, picked.tolist(), strict=True)]
        return counts

    def window(self, source: int, item: int) -> tuple[int, int]:
        """Return the first and the last position that an item of a source may have."""
        weight = self.weights[source]
        return item * self._total // weight, -(-(item + 1) * self._total // weight) - 1

    def find(self, source: int, item: int) -> int:
        """Return the position of an item of a source."""
        first, last = self.window(source, item)
        positions = np.arange(first, last + 1)
        sources, items = self.locate(positions)
        return int(positions[np.argmax((sources == source) & (items == item))])

    def make_block(self, number: int) -> Block:
        """Compute a block."""
        length, start = self._length, number * self._length
        counts = np.array(_round_counts(start, self.weights, self._total))
        stops = np.array(_round_counts(start + length, self.weights, self._total))
        weights = np.array(self.weights, np.int64)
        sources = np.repeat(np.arange(len(weights)), stops - counts)
        items = np.arange(length) - np.repeat(np.cumsum(stops - counts) - stops, stops - counts)
        # Count items and positions from the block's start, because products with the total must fit in int64.
        floors, rests = np.array([divmod(start * weight, self._total) for weight in self.weights]).T
        scaled = (items - floors[sources]) * self._total - rests[sources]
        weight_of = weights[sources]
        begins = np.maximum(scaled // weight_of, 0)
        deadlines = np.minimum(-(-(scaled + self._total) // weight_of), length)

        order = np.argsort(begins, kind="stable")
        rows = order[_schedule_earliest(begins[order], deadlines[order])]
        if self.seed is not None:
            _swap_neighbors(rows, sources, begins, deadlines, make_rng_key(self.seed, "mixture", number))
        return Block(sources[rows], items[rows])


@lru_cache(maxsize=64)
def _make_block(schedule: Schedule, number: int) -> Block:
    return schedule.make_block(number)


def _schedule_earliest(begins: Ints, deadlines: Ints) -> Ints:
    """Return the item at each position, int64: of the items allowed there, the one with the earliest deadline.

    Args:
        begins: int64 [items], the first position of each item, in ascending order.
        deadlines: int64 [items], the position before which each item must come.
    """
    num_items = len(begins)
    keys = (deadlines * num_items + np.arange(num_items)).tolist()
    ready, scheduled, start = list[int](), list[int](), 0
    for stop in np.searchsorted(begins, np.arange(num_items), side="right").tolist():
        for key in keys[start:stop]:
            heappush(ready, key)
        start = stop
        scheduled.append(heappop(ready))
    return np.array(scheduled) % num_items


def _swap_neighbors(rows: Ints, sources: Ints, begins: Ints, deadlines: Ints, rng_key: NDArray[np.uint64]) -> None:
    """Swap neighboring items of a block at random, in place, as far as their windows allow.

    Args:
        rows: int64 [positions], the item at each position.
        sources: int64 [items], the source of each item. Items of one source keep their order.
        begins: int64 [items], the first position of each item.
        deadlines: int64 [items], the position before which each item must come.
        rng_key: uint64 [1].
    """
    for sweep in range(NUM_SWEEPS):
        left = np.arange(sweep % 2, len(rows) - 1, 2)
        words = random_words(derive_rng_key(rng_key, np.array([sweep], np.uint64)), left.astype(np.uint64))
        one, other = rows[left], rows[left + 1]
        can_swap = (begins[other] <= left) & (deadlines[one] > left + 1) & (sources[one] != sources[other])
        left = left[can_swap & (words >> np.uint64(63)).astype(bool)]
        rows[left], rows[left + 1] = rows[left + 1], rows[left]
