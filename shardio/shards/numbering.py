"""Gaps in the numbers of files: a sign that some are missing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def find_gaps(paths: Iterable[Path]) -> list[str]:
    """Return the names that are missing between files whose names differ in one number.

    Where more names are missing than there are, the numbers are not taken for a count.

    >>> find_gaps([Path("x-000.tar"), Path("x-001.tar"), Path("x-003.tar")])
    ['x-002.tar']
    """
    groups = defaultdict[tuple[object, ...], list[list[str]]](list)
    for path in paths:
        parts = re.split(r"([0-9]+)", path.name)
        groups[(path.parent, len(parts), *parts[::2])].append(parts)
    missing = list[str]()
    for names in groups.values():
        varying = [place for place in range(1, len(names[0]), 2) if len({parts[place] for parts in names}) > 1]
        if len(varying) == 1:
            missing += _find_gaps_at(varying[0], names)
    return missing


def _find_gaps_at(place: int, names: list[list[str]]) -> list[str]:
    present = {int(parts[place]) for parts in names}
    first, last = min(present), max(present)
    if last - first + 1 - len(present) >= len(present):
        return []
    example, width = names[0], min(len(parts[place]) for parts in names)
    return [
        "".join([*example[:place], str(number).zfill(width), *example[place + 1 :]])
        for number in range(first, last)
        if number not in present
    ]
