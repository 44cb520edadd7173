"""Gaps between numbered files: a sign that some are missing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_OF = re.compile(r"(.*?)([0-9]+)([-_]of[-_])([0-9]{1,6})(.*)")
"""The name of a file that says how many there are, such as ``train-00000-of-00041.parquet``."""


def find_gaps(names: Iterable[str]) -> list[str]:
    """Return the missing names between numbered files, whose names differ in one number.

    If at least half of the names are missing, the gaps are assumed to be intentional, and the list is empty. Names that
    say how many files there are (``x-0-of-3.tar``) are complete only with all of them.

    >>> find_gaps(["x-000.tar", "x-001.tar", "x-003.tar"])
    ['x-002.tar']
    >>> find_gaps(["x-0-of-3.tar"])
    ['x-1-of-3.tar', 'x-2-of-3.tar']
    """
    groups = defaultdict[tuple[object, ...], list[list[str]]](list)
    counted = defaultdict[tuple[str, ...], set[str]](set)
    for name in names:
        if (found := _OF.fullmatch(name)) is not None:
            start, number, *rest = found.groups()
            counted[(start, *rest)].add(number)
            continue
        parts = re.split(r"([0-9]+)", name)
        groups[(len(parts), *parts[::2])].append(parts)
    missing = list[str]()
    for (start, of, total, end), numbers in counted.items():
        width, present = len(min(numbers, key=len)), set(map(int, numbers))
        first = int(int(total) in present and 0 not in present)  # Some tools count from 1.
        wanted = (str(number).zfill(width) for number in range(first, first + int(total)))
        missing += [f"{start}{number}{of}{total}{end}" for number in wanted if number not in numbers]
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


def make_pattern(names: Sequence[str]) -> str:
    """Return the pattern in brace notation of sorted, numbered files; the first name if there is none.

    >>> make_pattern(["x-00.tar", "x-01.tar"])
    'x-{00..01}.tar'
    """
    first, last = (re.split(r"([0-9]+)", name) for name in (names[0], names[-1]))
    varying = [i for i, (before, after) in enumerate(zip(first, last, strict=False)) if before != after]
    if len(first) != len(last) or len(varying) != 1 or varying[0] % 2 == 0:
        return names[0]
    (i,) = varying
    if int(last[i]) - int(first[i]) + 1 != len(names):
        return names[0]
    return "".join([*first[:i], f"{{{first[i]}..{last[i]}}}", *first[i + 1 :]])
