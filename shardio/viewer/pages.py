"""The pages of ``shardio view`` and ``shardio dups``: one HTML file each, which needs no network.

Every text that comes from a dataset passes through :func:`escape`. The functions return HTML.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from itertools import combinations
from string import Template

import numpy as np

from shardio.values import format_bytes
from shardio.viewer.duplicates import Copy, DuplicateGroup, DuplicateReport
from shardio.viewer.overview import (
    Histogram,
    Overview,
    Thumbnail,
    describe_imbalance,
    make_thumbnails,
    take_most_common,
)
from shardio.viewer.sources import ImageSource

SCATTER_SIZE, SCATTER_MARGIN = (380, 260), 44
"""The width and height of a scatter plot, and the space for its labels, in SVG units: pixels on wide screens."""

Cell = str | int
"""A table's cell: text, which is escaped, or a number."""

MAX_CLASSES = 200
"""The maximum number of classes on the page, the most frequent first."""

MAX_SIZES = 12
"""The maximum number of image sizes in the table, the most frequent first."""

MAX_POINTS = 1000
"""The maximum number of image sizes in the plot."""

MAX_NAMED = 20
"""The maximum number of unreadable images to name."""

MAX_GROUPS = 200
"""The maximum number of groups on the page."""

MAX_COPIES = 12
"""The maximum number of images of a group on the page."""

NO_CLASS = "(no class)"

_Thumbnails = dict[tuple[int, int], Thumbnail]
"""Thumbnails by source and index."""


class Markup(str):
    """Finished HTML, which :func:`escape` does not change."""

    __slots__ = ()


def make_overview_page(overview: Overview) -> bytes:
    """Return the page that shows the contents of a source, an HTML file."""
    parts = [
        _make_overview_tiles(overview),
        flow(_show_classes(overview), _show_file_sizes(overview), _show_sizes(overview), _show_facts(overview)),
        _show_thumbnails(overview),
    ]
    return make_page(f"shardio view {overview.name}", parts)


def _make_overview_tiles(overview: Overview) -> Markup:
    facts = overview.facts
    num_bytes = facts.get("bytes", overview.num_image_bytes)
    found = [("samples", f"{facts['samples']:,}")]
    if "shards" in facts:
        found.append(("shards", f"{facts['shards']:,}"))
    found += [("size", format_bytes(num_bytes)), ("images", f"{overview.num_images:,}")]
    if overview.class_counts:
        found.append(("classes", f"{len([name for name in overview.class_counts if name]):,}"))
    if overview.num_images:
        found.append(("per image", format_bytes(overview.num_image_bytes / overview.num_images)))
    return tiles(found)


def _show_classes(overview: Overview) -> Markup:
    counts = overview.class_counts
    if not counts:
        return section("Classes", element("p", "The samples have no classes.", class_="soft"))
    common, num_others, others = take_most_common(counts, MAX_CLASSES)
    rows = [(name or NO_CLASS, count) for name, count in common]
    if num_others:
        rows.append((f"{num_others:,} other classes", others))
    text = describe_imbalance([count for name, count in counts.items() if name])
    return section("Classes", element("p", text, class_="soft"), bar_table(("class", "samples"), rows))


def _show_file_sizes(overview: Overview) -> Markup:
    note = element("p", f"All {overview.num_images:,} images, from a list of their sizes.", class_="soft")
    return section("File sizes", note, column_chart(overview.file_sizes, "images", format_bytes))


def _show_sizes(overview: Overview) -> Markup:
    headers = overview.headers
    which = "all" if headers.num_images == overview.num_images else "evenly spaced"
    parts = [
        element("p", f"From the headers of {headers.num_images:,} images ({which}), width × height.", class_="soft")
    ]
    if headers.unreadable:
        names = ", ".join(key for key, _ in headers.unreadable[:MAX_NAMED])
        more = ", …" if len(headers.unreadable) > MAX_NAMED else ""
        parts.append(element("p", f"{len(headers.unreadable):,} headers cannot be read: {names}{more}", class_="warn"))
    if headers.sizes:
        parts.append(
            scatter_plot(headers.sizes.most_common(MAX_POINTS), "widths and heights; the table has the numbers")
        )
        rows = [(f"{width}×{height}", count) for (height, width), count in headers.sizes.most_common(MAX_SIZES)]
        if (num_others := len(headers.sizes) - len(rows)) > 0:
            rows.append((f"{num_others:,} other sizes", headers.sizes.total() - sum(count for _, count in rows)))
        parts.append(bar_table(("pixels", "images"), rows))
    return section("Resolutions", *parts)


def _show_facts(overview: Overview) -> Markup:
    facts, headers = overview.facts, overview.headers
    in_shards = "shards" in facts
    uses = [(use.name, use.num_samples, format_bytes(use.num_bytes)) for use in overview.fields]
    formats = ", ".join(f"{count:,} × {name}" for name, count in headers.formats.most_common())
    rows = [("image formats", f"{formats or 'none'} (of {headers.num_images:,} images)")]
    if in_shards:
        packed = ", ".join(f"{name} {value}" for name, value in facts["pack"].items())
        rows += [("packed", packed or "unknown: there is no manifest"), ("digest", facts["digest"])]
    return section(
        "Contents",
        table(["field" if in_shards else "suffix", "samples" if in_shards else "files", "size"], uses),
        table(["property", "value"], rows),
    )


def _show_thumbnails(overview: Overview) -> Markup:
    found = overview.thumbnails
    num_bad = sum(each.jpeg is None for each in found)
    parts = [
        element("p", f"{len(found):,} of {overview.num_images:,} images. EXIF orientations are ignored.", class_="soft")
    ]
    if num_bad:
        parts.append(element("p", f"{num_bad:,} of them cannot be decoded.", class_="warn"))
    labels = sorted({each.label for each in found if each.label is not None})
    if len(labels) > 1:
        options = [element("option", name, value=name) for name in labels]
        shown = element("output", str(len(found)), id="shown")
        select = element("select", element("option", "all", value=""), *options, id="class")
        parts.append(element("p", element("label", "Class ", select), Markup(shown + " shown")))
    figures = [figure(each, each.label, each.key) for each in found]
    return section("Images", *parts, element("div", *figures, class_="grid"))


def make_duplicates_page(report: DuplicateReport, sources: Sequence[ImageSource]) -> bytes:
    """Return the page that shows the images of each group side by side, an HTML file."""
    shown = report.groups[:MAX_GROUPS]
    thumbnails = _make_thumbnails(shown, sources)
    names = [source.name for source in sources]
    short = _shorten(names)
    parts = [_make_duplicate_tiles(report), _show_counts(report, short)]
    if len(shown) < len(report.groups):
        parts.append(element("p", f"The first {len(shown):,} of {len(report.groups):,} groups.", class_="soft"))
    parts.append(panels(*[_show_group(number, group, short, thumbnails) for number, group in enumerate(shown, 1)]))
    return make_page(f"shardio dups {' '.join(names)}", parts)


def describe_group(group: DuplicateGroup) -> str:
    """Return a description of the similarity of a group's images."""
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
    """Return a description of a sample's difference from the first of its group."""
    return "same bytes" if copy.distance is None else f"{copy.distance} bits"


def _shorten(names: Sequence[str]) -> list[str]:
    """Return the last parts of paths if all of these differ, else the paths."""
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    return last if len(set(last)) == len(names) else list(names)


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


def _make_duplicate_tiles(report: DuplicateReport) -> Markup:
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


def escape(text: object) -> Markup:
    """Return text as HTML. Markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def join(parts: Iterable[str]) -> Markup:
    """Return parts one after the other, with text escaped."""
    return Markup("\n".join(map(escape, parts)))


def make_page(title: str, parts: Iterable[Markup]) -> bytes:
    """Return a page with a title, as a UTF-8 file. Bytes of names that are not UTF-8 are shown escaped."""
    template = Template(files("shardio.viewer").joinpath("page.html").read_text("utf-8"))
    page = template.substitute(title=escape(title), heading=escape(title), content=join(parts))
    return page.encode("utf-8", "backslashreplace")


def element(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element. A trailing underscore in an attribute's name is dropped, others become hyphens.

    >>> element("p", "a < b", class_="soft")
    '<p class="soft">a &lt; b</p>'
    """
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{named}>{''.join(map(escape, content))}</{name}>")


def section(heading: str, *content: str) -> Markup:
    """Return a section with a heading."""
    return element("section", element("h2", heading), *content)


def panels(*sections: Markup) -> Markup:
    """Return sections in rows, next to each other if the screen is wide enough."""
    return element("div", *sections, class_="panels")


def flow(*sections: Markup) -> Markup:
    """Return sections of different heights in columns, if the screen is wide enough."""
    return element("div", *sections, class_="flow")


def tiles(facts: Iterable[tuple[str, str]]) -> Markup:
    """Return short facts in large print, given as pairs of a name and a value."""
    items = [element("li", element("b", value), element("span", name)) for name, value in facts]
    return element("ul", *items, class_="tiles")


def table(headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    """Return a table. The first cell of each row is its header, and numbers are aligned to the right."""
    rows = list(rows)
    numeric = [all(isinstance(row[column], int) for row in rows) for column in range(len(headings))]
    styles = ["number" if is_number else None for is_number in numeric]
    head = [element("th", name, scope="col", class_=style) for name, style in zip(headings, styles, strict=True)]
    body = list[Markup]()
    for row in rows:
        cells = [element("th", str(row[0]) if not isinstance(row[0], str) else row[0], scope="row", class_=styles[0])]
        for cell, style in zip(row[1:], styles[1:], strict=True):
            cells.append(element("td", f"{cell:,}" if isinstance(cell, int) else cell, class_=style))
        body.append(element("tr", *cells))
    made = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", made, class_="scroll", tabindex=0)


def bar_table(headings: tuple[str, str], counts: Sequence[tuple[str, int]]) -> Markup:
    """Return a table of names and counts with horizontal bars."""
    largest = max((count for _, count in counts), default=1)
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", element("i", style=f"width:{100 * count / largest:.2f}%"), class_="bar", aria_hidden="true"),
            element("td", f"{count:,}", class_="number"),
        )
        for name, count in counts
    ]
    head = element(
        "tr",
        element("th", headings[0], scope="col"),
        element("td", class_="bar", aria_hidden="true"),
        element("th", headings[1], scope="col", class_="number"),
    )
    made = element("table", element("thead", head), element("tbody", *rows))
    return element("div", made, class_="scroll", tabindex=0)


def column_chart(histogram: Histogram, noun: str, form: Callable[[float], str]) -> Markup:
    """Return a histogram as vertical bars, with a table of its numbers to open.

    Args:
        histogram: The histogram.
        noun: The name of the counted things, in the plural.
        form: Returns a bound of a bin as text.
    """
    if not histogram.counts:
        return element("p", f"no {noun}", class_="soft")
    spans = [f"{form(low)} to {form(high)}" for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
    largest = max(histogram.counts)
    bars = [
        element("i", style=f"height:{100 * count / largest:.2f}%", title=f"{span}: {count:,} {noun}")
        for span, count in zip(spans, histogram.counts, strict=True)
    ]
    ends = [element("span", form(histogram.edges[end])) for end in (0, -1)]
    label = f"{noun} by size, from {form(histogram.edges[0])} to {form(histogram.edges[-1])}; the numbers follow"
    return join(
        [
            element("div", *bars, class_="columns", role="img", aria_label=label),
            element("div", *ends, class_="ends"),
            element(
                "details",
                element("summary", "Numbers"),
                table(["size", noun], list(zip(spans, histogram.counts, strict=True))),
            ),
        ]
    )


def scatter_plot(points: Sequence[tuple[tuple[int, int], int]], label: str) -> Markup:
    """Return a plot of (height, width) pairs. The area of a circle shows the number of such pairs."""
    (width, height), margin = SCATTER_SIZE, SCATTER_MARGIN
    end = _round_up(max((max(size) for size, _ in points), default=1))
    most = max((count for _, count in points), default=1)

    def place(x: float, y: float) -> tuple[float, float]:
        return margin + x / end * (width - margin - 16), height - 28 - y / end * (height - 50)

    parts = list[Markup]()
    for step in range(5):
        value = end * step / 4
        (x, bottom), (left, y) = place(value, 0), place(0, value)
        parts.append(element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=22, y2=f"{bottom:.1f}"))
        parts.append(element("line", x1=f"{left:.1f}", x2=width - 16, y1=f"{y:.1f}", y2=f"{y:.1f}"))
        parts.append(element("text", f"{value:g}", x=f"{x:.1f}", y=height - 12, text_anchor="middle"))
        parts.append(element("text", f"{value:g}", x=margin - 6, y=f"{y + 4:.1f}", text_anchor="end"))
    parts.append(element("text", "height", x=4, y=11))
    parts.append(element("text", "width", x=width - 16, y=height - 1, text_anchor="end"))
    for (rows, columns), count in points:
        x, y = place(columns, rows)
        hint = element("title", f"{columns}×{rows}: {count:,}")
        radius = max(2.5, 11 * (count / most) ** 0.5)
        parts.append(element("circle", hint, cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{radius:.1f}"))
    return element("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


def figure(thumbnail: Thumbnail, label: str | None, *lines: str) -> Markup:
    """Return a thumbnail, its label in bold, and further lines. An image that cannot be decoded has a placeholder."""
    if thumbnail.jpeg is None:
        inner = element(
            "p", element("span", "cannot be decoded", class_="warn"), Markup("<br>"), thumbnail.reason[:120]
        )
    else:
        size = thumbnail.size or (0, 0)
        text = f"image of sample {thumbnail.key}"
        inner = Markup(
            f'<img src="{thumbnail.url}" alt="{escape(text)}" title="{size[1]}×{size[0]} pixels" loading="lazy">'
        )
    bold = [] if label is None else [element("b", label)]
    caption = element("figcaption", *bold, *[element("span", line) for line in lines])
    return element("figure", element("div", inner, class_="frame"), caption, data_class=label or "")


def _round_up(value: int) -> int:
    """Return the end of an axis with 5 round marks, the next such end that is not below a positive value.

    >>> _round_up(500), _round_up(1030), _round_up(7)
    (600, 1200, 8)
    """
    unit = 10 ** (len(str(value)) - 1)
    ends: list[int] = [round(unit * factor) for factor in (1.2, 1.6, 2, 3, 4, 6, 8, 10, 12)]
    return next(end for end in ends if value <= end and end % 4 == 0)
