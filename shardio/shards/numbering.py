"""Gaps between numbered files: a sign that some are missing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable


def find_gaps(names: Iterable[str]) -> list[str]:
    """Return the missing names between numbered files, whose names differ in one number.

    If at least half of the names are missing, the gaps are assumed to be intentional, and the list is empty.

    >>> find_gaps(["x-000.tar", "x-001.tar", "x-003.tar"])
    ['x-002.tar']
    """
    groups = defaultdict[tuple[object, ...], list[list[str]]](list)
    for name in names:
        parts = re.split(r"([0-9]+)", name)
        groups[(len(parts), *parts[::2])].append(parts)
    missing = list[str]()
    for group in groups.values():
        varying = [i for i in range(1, len(group[0]), 2) if len({parts[i] for parts in group}) > 1]
        if len(varying) == 1:
            missing += _find_gaps_at(varying[0], group)
    return missing


def _find_gaps_at(i: int, names: list[list[str]]) -> list[str]:
    """Return the missing names where part ``i`` of each name is its number."""
    present = {int(parts[i]) for parts in names}
    first, last = min(present), max(present)
    if last - first + 1 - len(present) >= len(present):
        return []
    example, width = names[0], min(len(parts[i]) for parts in names)
    return [
        "".join([*example[:i], str(number).zfill(width), *example[i + 1 :]])
        for number in range(first, last)
        if number not in present
    ]
