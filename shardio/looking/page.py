"""The parts of a page: one HTML file that contains its images, loads nothing, and needs no network.

Every text that comes from a dataset passes through :func:`escape`. The functions return HTML.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from string import Template

from shardio.looking.histograms import Histogram
from shardio.looking.overview import Thumbnail

SCATTER_SIZE, SCATTER_MARGIN = (380, 260), 44
"""The width and height of a scatter plot, and the space for its labels, in SVG units: pixels on wide screens."""

Cell = str | int
"""A table's cell: text, which is escaped, or a number."""


class Markup(str):
    """Finished HTML, which :func:`escape` does not change."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Return text as HTML. Markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def join(parts: Iterable[str]) -> Markup:
    """Return parts one after the other, with text escaped."""
    return Markup("\n".join(map(escape, parts)))


def make_page(title: str, parts: Iterable[Markup]) -> bytes:
    """Return a page with a title, as a UTF-8 file. Bytes of names that are not UTF-8 are shown escaped."""
    template = Template(files("shardio.looking").joinpath("page.html").read_text("utf-8"))
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
    """Return sections in rows, next to each other where the screen is wide enough."""
    return element("div", *sections, class_="panels")


def flow(*sections: Markup) -> Markup:
    """Return sections of different heights in columns, where the screen is wide enough."""
    return element("div", *sections, class_="flow")


def tiles(facts: Iterable[tuple[str, str]]) -> Markup:
    """Return short facts in large print: what each is, and its value."""
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
        noun: What is counted, in the plural.
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
    """Return a plot of (height, width) pairs. The area of a circle shows how often the pair occurs."""
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
    """Return the end of an axis with 5 round marks, the next one that is not below a positive value.

    >>> _round_up(500), _round_up(1030), _round_up(7)
    (600, 1200, 8)
    """
    unit = 10 ** (len(str(value)) - 1)
    ends: list[int] = [round(unit * factor) for factor in (1.2, 1.6, 2, 3, 4, 6, 8, 10, 12)]
    return next(end for end in ends if value <= end and end % 4 == 0)
