"""The page of ``shardio dups``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from shardio.looking.duplicates import Copy, DuplicateGroup, DuplicateReport
from shardio.looking.overview import Thumbnail, make_thumbnails
from shardio.looking.page import Markup, element, figure, join, make_page, panels, section, table, tiles
from shardio.looking.source import ImageSource

MAX_GROUPS = 200
"""The maximum number of groups on the page."""

MAX_COPIES = 12
"""The maximum number of images of a group on the page."""


def make_duplicates_page(report: DuplicateReport, sources: Sequence[ImageSource]) -> bytes:
    """Return the page that shows the images of each group side by side, an HTML file."""
    shown = report.groups[:MAX_GROUPS]
    thumbnails = _make_thumbnails(shown, sources)
    names = [source.name for source in sources]
    short = _shorten(names)
    parts = [_make_tiles(report), _show_counts(report, short)]
    if len(shown) < len(report.groups):
        parts.append(element("p", f"The first {len(shown):,} of {len(report.groups):,} groups.", class_="soft"))
    parts.append(panels(*[_show_group(number, group, short, thumbnails) for number, group in enumerate(shown, 1)]))
    return make_page(f"shardio dups {' '.join(names)}", parts)


def describe_group(group: DuplicateGroup) -> str:
    """Return how alike the images of a group are, as text."""
    if group.is_exact:
        return "same bytes"
    most = max(copy.distance or 0 for copy in group.copies)
    return f"look alike, up to {most} bits differ" if most else "look the same"


def describe_labels(group: DuplicateGroup) -> str:
    """Return a warning if a group's samples have different labels, else ""."""
    if len(group.labels) < 2:
        return ""
    return f"{'same image' if group.is_exact else 'alike images'}, different classes: {', '.join(group.labels)}"


def describe_distance(copy: Copy) -> str:
    """Return how much a sample differs from the first of its group, as text."""
    return "same bytes" if copy.distance is None else f"{copy.distance} bits"


def _shorten(names: Sequence[str]) -> list[str]:
    """Return the last parts of paths if these differ, else the paths."""
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    return last if len(set(last)) == len(names) else list(names)


_Thumbnails = dict[tuple[int, int], Thumbnail]
"""Thumbnails by source and index."""


def _make_thumbnails(groups: Sequence[DuplicateGroup], sources: Sequence[ImageSource]) -> _Thumbnails:
    indices = defaultdict[int, set[int]](set)
    for group in groups:
        for copy in group.copies[:MAX_COPIES]:
            indices[copy.source_index].add(copy.index)
    found = _Thumbnails()
    for source_index, wanted in indices.items():
        source = sources[source_index]
        ordered = np.array(sorted(wanted))
        for index, thumbnail in zip(ordered.tolist(), make_thumbnails(source, None, ordered), strict=True):
            found[source_index, index] = thumbnail
    return found


def _make_tiles(report: DuplicateReport) -> Markup:
    num_conflicts = sum(len(group.labels) > 1 for group in report.groups)
    facts = [
        ("images", f"{sum(report.num_images):,}"),
        ("groups", f"{len(report.groups):,}"),
        ("of them with the same bytes", f"{sum(group.is_exact for group in report.groups):,}"),
        ("of them with different classes", f"{num_conflicts:,}"),
    ]
    if report.unreadable:
        facts.append(("unreadable", f"{len(report.unreadable):,}"))
    return tiles(facts)


def _show_counts(report: DuplicateReport, names: Sequence[str]) -> Markup:
    within = [(name, *report.count_within(number)) for number, name in enumerate(names)]
    parts = [table(["within", "groups", "extra copies"], within)]
    if len(names) > 1:
        between = [
            (f"{names[first]} and {names[second]}", *report.count_between(first, second))
            for first, second in combinations(range(len(names)), 2)
        ]
        parts.append(table(["between", "groups", "samples of the first", "samples of the second"], between))
    return section("Counts", *parts)


def _show_group(number: int, group: DuplicateGroup, names: Sequence[str], thumbnails: _Thumbnails) -> Markup:
    figures = list[Markup]()
    for copy in group.copies[:MAX_COPIES]:
        lines = [copy.key]
        if len(names) > 1:
            lines.append(names[copy.source_index])
        if copy.place.shard:
            lines.append(f"{copy.place.shard}, byte {copy.place.offset}")
        lines.append(describe_distance(copy) if copy is not group.copies[0] else "first")
        figures.append(figure(thumbnails[copy.source_index, copy.index], copy.label, *lines))
    warning = describe_labels(group)
    parts = list[Markup]()
    if warning:
        parts.append(element("p", warning, class_="warn"))
    if (num_others := len(group.copies) - MAX_COPIES) > 0:
        parts.append(element("p", f"and {num_others:,} more", class_="soft"))
    return section(f"Group {number}: {describe_group(group)}", *parts, element("div", join(figures), class_="grid"))
