"""Write HTML pages and their parts: tables, charts and plots.

A page is one file, which needs no network. Its style is in ``page.html``. All text passes through :func:`escape`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template

from shardio.values import count, format_number

PLOT_SIZE, PLOT_MARGIN = (380, 260), 50
"""The width and height of a plot, and the space for the labels of its y axis, in SVG units (pixels on wide screens)."""

MAX_POINTS = 500
"""The maximum number of points of a curve. A longer curve shows means of neighboring points."""

MAX_MARKED = 50
"""The maximum number of points of a curve that has a marker at each point."""

Points = Sequence[tuple[float, float]]


class Markup(str):
    """Finished HTML, which :func:`escape` does not change."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Return text as HTML. Markup is returned unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def escape_name(name: object) -> Markup:
    """Return a name as HTML that may break after a separator, or after 18 letters and digits.

    >>> escape_name("checkpoint_every")
    'checkpoint_<wbr>every'
    """
    return Markup("<wbr>".join(map(escape, re.findall(r"[^\W_]{1,18}[\W_]*|[\W_]+", str(name)))))


def join(parts: Iterable[str]) -> Markup:
    """Return the parts as lines, with text escaped."""
    return Markup("\n".join(map(escape, parts)))


def make_page(title: str, parts: Iterable[Markup]) -> bytes:
    """Return a page with a title, as a UTF-8 file. In names, bytes that are not UTF-8 are escaped."""
    template = Template(files("shardio").joinpath("page.html").read_text("utf-8"))
    page = template.substitute(title=escape(title), content=join(parts))
    return page.encode("utf-8", "backslashreplace")


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element. Attribute names lose a trailing underscore, and other underscores become hyphens.

    >>> element("p", "a < b", class_="soft")
    '<p class="soft">a &lt; b</p>'
    """
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{named}>{''.join(map(escape, content))}</{name}>")


def section(heading: str, *content: object) -> Markup:
    """Return a section with a heading."""
    return element("section", element("h2", heading), *content)


def tiles(facts: Iterable[tuple[str, str]]) -> Markup:
    """Return short facts, given as pairs of a name and a value, in large print."""
    items = [element("li", element("b", value), element("span", name)) for name, value in facts]
    return element("ul", *items, class_="tiles")


def counted(num_things: int, noun: str, plural: str | None = None) -> tuple[str, str]:
    """Return a count as a fact for :func:`tiles`."""
    number, _, noun = count(num_things, noun, plural).partition(" ")
    return noun, number


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a table. The first cell of each row is its header, and numbers are aligned to the right.

    A heading or a cell that is Markup must be a complete cell element.
    """
    rows = list(rows)
    styles = ["number" if all(isinstance(row[i], int) for row in rows) else None for i in range(len(headings))]
    head = [
        name if isinstance(name, Markup) else element("th", name, scope="col", class_=style)
        for name, style in zip(headings, styles, strict=True)
    ]
    body = list[Markup]()
    for first, *others in rows:
        head_cell = element("th", escape_name(first), scope="row", class_=styles[0])
        cells = [first if isinstance(first, Markup) else head_cell]
        for cell, style in zip(others, styles[1:], strict=True):
            text = f"{cell:,}" if isinstance(cell, int) else cell
            cells.append(text if isinstance(text, Markup) else element("td", text, class_=style))
        body.append(element("tr", *cells))
    made = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", made, class_="scroll", tabindex=0)


def bar_table(headings: tuple[str, str], counts: Sequence[tuple[str, int]]) -> Markup:
    """Return a table of names and counts with horizontal bars."""

    def make_bar(*content: str) -> Markup:
        return element("td", *content, class_="bar", aria_hidden="true")

    largest = max((count for _, count in counts), default=1)
    bars = [make_bar(element("i", style=f"width:{100 * count / largest:.2f}%")) for _, count in counts]
    rows = [(name, bar, count) for (name, count), bar in zip(counts, bars, strict=True)]
    return table([headings[0], make_bar(), headings[1]], rows)


def line_plot(title: str, curves: Mapping[str, Points], x_name: str) -> Markup:
    """Return a plot of curves with their legend. Values that are not finite are left out.

    Args:
        title: The title for screen readers.
        curves: The points (x, y) of each curve, sorted by x; both axes start at 0. There are three styles for curves.
        x_name: The name of the x-axis, which shows a count.
    """

    def form(y: float) -> str:
        return format_number(float(f"{y:.4g}"))

    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    shown = [(style, name, points) for style, (name, points) in enumerate(finite.items()) if points]
    if not shown:
        return element("p", "no values", class_="soft")
    x_end, y_end = (max(point[axis] for _, _, points in shown for point in points) for axis in (0, 1))
    grid, place = make_grid(x_end, y_end, x_name)
    parts, texts = [grid], list[str]()
    for style, name, points in shown:
        path = [place(*point) for point in _thin(points)]
        line = " ".join(f"{x},{y}" for x, y in path)
        marks = [element("path", d=f"M{path[0][0]},{path[0][1]} L{line}")]  # A round cap makes a single point visible.
        if len(points) <= MAX_MARKED:
            hints = [element("title", f"{name}, {x_name} {x:,}: {form(y)}") for x, y in points]
            marks += [element("circle", hint, cx=x, cy=y, r=2.5) for hint, (x, y) in zip(hints, path, strict=True)]
        parts.append(element("g", *marks, class_=f"curve-{style}"))
        (first, start), (last, stop) = points[0], points[-1]
        low, high = (form(bound([y for _, y in points])) for bound in (min, max))
        texts.append(
            f"{name}: {form(start)} at {x_name} {first:,}, {form(stop)} at {x_name} {last:,}, from {low} to {high}"
        )
    legend = [element("li", name, class_=f"curve-{style}") for style, name, _ in shown]
    return join([element("ul", *legend, class_="legend"), make_plot(title, "; ".join(texts), parts)])


def make_plot(title: str, description: str, parts: Iterable[Markup]) -> Markup:
    """Return a plot that consists of SVG elements, with a title and a description for screen readers."""
    texts = element("title", title), element("desc", description)
    return element("svg", *texts, *parts, viewBox=f"0 0 {PLOT_SIZE[0]} {PLOT_SIZE[1]}", role="img")


def make_grid(
    x_end: float, y_end: float, x_name: str, y_name: str = ""
) -> tuple[Markup, Callable[[float, float], tuple[float, float]]]:
    """Return grid lines with labels, and a function that maps x and y to the plot's coordinates.

    The axes begin at 0 and end at the given values. x is an integer.
    """
    top, right, bottom = 22, PLOT_SIZE[0] - 16, PLOT_SIZE[1] - 34
    x_end, y_end = (end if end > 0 else 1 for end in (x_end, y_end))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x / x_end * (right - PLOT_MARGIN), y / y_end * (bottom - top)
        return round(PLOT_MARGIN + across, 1), round(bottom - up, 1)

    parts = [element("text", y_name, x=4, y=12), element("text", x_name, x=right, y=bottom + 30, text_anchor="end")]
    for value in choose_ticks(x_end, 4, min_step=1):
        x, _ = place(value, 0)
        parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom))
        parts.append(element("text", format_number(value), x=x, y=bottom + 15, text_anchor="middle"))
    for value in choose_ticks(y_end, 8):
        _, y = place(0, value)
        parts.append(element("line", x1=PLOT_MARGIN, x2=right, y1=y, y2=y))
        parts.append(element("text", format_number(value), x=PLOT_MARGIN - 6, y=y + 4, text_anchor="end"))
    return join(parts), place


def choose_ticks(end: float, max_steps: int, min_step: float = 0) -> list[float]:
    """Return the multiples of a round number from 0 up to a positive end.

    >>> choose_ticks(8, 4), choose_ticks(1040, 8)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0])
    """
    unit = 10.0 ** math.floor(math.log10(end))
    step = max(min_step, unit * next(factor for factor in (0.2, 0.5, 1, 2, 5) if end <= max_steps * factor * unit))
    return [step * number for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def _thin(points: Points) -> Points:
    """Return at most ``MAX_POINTS`` points: the means of equal numbers of neighboring points."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
