"""The overview of a source's contents: counts, histograms and thumbnails, as values and as a page.

A page is one HTML file, which needs no network. Every text that comes from a dataset passes through :func:`escape`.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import find_format, open_image
from shardio.images.formats import errors_of_pillow
from shardio.order import make_rng_key, permute
from shardio.values import format_bytes
from shardio.viewer.sources import (
    FieldUse,
    ImageColumns,
    ImageSource,
    Unreadable,
    choose_evenly,
    map_images,
    read_resized,
)

MAX_BINS = 24
"""The maximum number of bins."""

BINS_PER_OCTAVE = (4.0, 2.0, 1.0, 0.5, 0.25)
"""The possible numbers of bins per doubling of the value, largest first."""

MAX_HEADERS = 2000
"""The maximum number of images whose headers are read. In a larger source, these images are evenly spaced."""

THUMBNAIL_SIDE = 256
"""The maximum side of a thumbnail in pixels. Pages show thumbnails at half size or less, for high-density screens."""

THUMBNAIL_QUALITY = 80

MAX_CLASSES = 200
"""The maximum number of classes on the page, the most frequent first."""

MAX_SIZES = 12
"""The maximum number of image sizes in the table, the most frequent first."""

MAX_POINTS = 1000
"""The maximum number of image sizes in the plot."""

MAX_NAMED = 20
"""The maximum number of unreadable images to name."""

NO_CLASS = "(no class)"

SCATTER_SIZE, SCATTER_MARGIN = (380, 260), 44
"""The width and height of a scatter plot, and the space for its labels, in SVG units: pixels on wide screens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram: the number of values in each bin.

    Attributes:
        edges: The b + 1 bounds of the bins, ascending. A bin includes its lower bound, and the last bin includes both
            bounds.
        counts: The number of values in each of the b bins.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def dump(self) -> dict[str, Any]:
        """Return the histogram as values for JSON."""
        return {"edges": list(self.edges), "counts": list(self.counts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """A sample's image at a small size.

    Attributes:
        key: The sample's key, or its path below the source.
        label: The name of the sample's label; None if the sample has no label.
        size: Height and width of the image in pixels; None if the image cannot be decoded.
        jpeg: The small image as a JPEG; None if the image cannot be decoded.
        reason: The reason why the image cannot be decoded, or "".
    """

    key: str
    label: str | None
    size: tuple[int, int] | None
    jpeg: bytes | None
    reason: str = ""

    @property
    def url(self) -> str:
        """The small image as a data URI."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg or b'').decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The headers of some images.

    Attributes:
        num_images: The number of images that were examined.
        sizes: The number of these images with each height and width in pixels.
        formats: The number of these images with each format.
        unreadable: The keys of the images whose headers cannot be read, and the reasons.
    """

    num_images: int
    sizes: Counter[tuple[int, int]]
    formats: Counter[str]
    unreadable: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The contents of a source.

    Attributes:
        name: The name of the source.
        facts: Facts about the whole source.
        num_images: The number of samples with an image.
        num_image_bytes: The total size of all images in bytes.
        fields: The statistics of its fields or, in a directory, of its files by suffix.
        class_counts: The number of samples with each label; "" stands for samples without a label, if other samples
            have labels.
        file_sizes: The histogram of the sizes of all images in bytes.
        headers: The headers of some images.
        thumbnails: Some images.
    """

    name: str
    facts: dict[str, Any]
    num_images: int
    num_image_bytes: int
    fields: tuple[FieldUse, ...]
    class_counts: Counter[str]
    file_sizes: Histogram
    headers: Headers
    thumbnails: tuple[Thumbnail, ...]

    def dump(self) -> dict[str, Any]:
        """Return everything except the thumbnails as values for JSON."""
        headers = self.headers
        return {
            "source": self.name,
            **self.facts,
            "images": self.num_images,
            "image_bytes": self.num_image_bytes,
            "fields": {use.name: {"samples": use.num_samples, "bytes": use.num_bytes} for use in self.fields},
            "classes": dict(self.class_counts.most_common()),
            "file_sizes": self.file_sizes.dump(),
            "headers": {
                "images": headers.num_images,
                "sizes": {f"{width}×{height}": count for (height, width), count in headers.sizes.most_common()},
                "formats": dict(headers.formats.most_common()),
                "unreadable": dict(headers.unreadable),
            },
            "thumbnails": len(self.thumbnails),
            "undecodable": {each.key: each.reason for each in self.thumbnails if each.jpeg is None},
        }


def look_at(source: ImageSource, *, num_thumbnails: int, seed: int | None = None) -> Overview:
    """Return an overview of a source. The time and memory for images do not depend on the source's size.

    Args:
        source: The source.
        num_thumbnails: The maximum number of thumbnails.
        seed: The seed of a random choice of thumbnails, which keep the order of the source; None for evenly spaced
            thumbnails.

    Raises:
        FormatError: If a file of the dataset is invalid.
    """
    columns = source.list_images()
    indices = columns.find_images()
    sizes = columns.sizes[indices]
    chosen = choose_evenly(indices, num_thumbnails) if seed is None else _choose_randomly(indices, num_thumbnails, seed)
    return Overview(
        name=source.name,
        facts=source.describe(),
        num_images=len(indices),
        num_image_bytes=int(sizes.sum()),
        fields=columns.fields,
        class_counts=_count_classes(columns),
        file_sizes=make_log_histogram(sizes),
        headers=_read_headers(source, choose_evenly(indices, MAX_HEADERS)),
        thumbnails=tuple(make_thumbnails(source, columns, chosen)),
    )


def make_thumbnails(
    source: ImageSource, columns: ImageColumns | None, indices: NDArray[np.int64], side: int = THUMBNAIL_SIDE
) -> list[Thumbnail]:
    """Return thumbnails with sides of at most ``side`` pixels. Without columns, the thumbnails have no labels."""
    thumbnails = list[Thumbnail]()
    for chunk, results in map_images(source, indices, lambda content: _shrink(content, side)):
        for index, key, result in zip(chunk.tolist(), source.keys(chunk), results, strict=True):
            label = columns.label_of(index) if columns else None
            if isinstance(result, Unreadable):
                thumbnails.append(Thumbnail(key=key, label=label, size=None, jpeg=None, reason=result.reason))
            else:
                size, jpeg = result
                thumbnails.append(Thumbnail(key=key, label=label, size=size, jpeg=jpeg))
    return thumbnails


def _shrink(content: bytes, side: int) -> tuple[tuple[int, int], bytes]:
    from PIL import Image

    picture = open_image(content)
    height, width = picture.size
    scale = min(side / max(height, width), 1)
    small = Image.fromarray(read_resized(picture, max(1, round(height * scale)), max(1, round(width * scale))))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=THUMBNAIL_QUALITY)
    return picture.size, file.getvalue()


def _choose_randomly(indices: NDArray[np.int64], num_chosen: int, seed: int) -> NDArray[np.int64]:
    size = np.array([len(indices)])
    rows = permute(np.arange(min(num_chosen, len(indices))), size, make_rng_key(seed, "view"))
    return indices[np.sort(rows)]


def _count_classes(columns: ImageColumns) -> Counter[str]:
    counts = Counter[str]()
    of_label = np.bincount(columns.label_ids[columns.label_ids >= 0], minlength=len(columns.label_names))
    for name, count in zip(columns.label_names, of_label.tolist(), strict=True):
        counts[name] += count
    num_others = int(np.count_nonzero(columns.label_ids < 0))
    if counts and num_others:
        counts[""] += num_others
    return counts


def _read_headers(source: ImageSource, indices: NDArray[np.int64]) -> Headers:
    sizes, formats, unreadable = Counter[tuple[int, int]](), Counter[str](), list[tuple[str, str]]()
    for chunk, results in map_images(source, indices, _read_header):
        for index, result in zip(chunk.tolist(), results, strict=True):
            if isinstance(result, Unreadable):
                unreadable.append((source.keys(np.array([index]))[0], result.reason))
            else:
                size, name = result
                sizes[size] += 1
                formats[name] += 1
    return Headers(num_images=len(indices), sizes=sizes, formats=formats, unreadable=tuple(unreadable))


def _read_header(content: bytes) -> tuple[tuple[int, int], str]:
    name = find_format(content)
    if name == "TIFF":  # Opening a TIFF would decode it.
        from PIL import Image

        with errors_of_pillow(), Image.open(io.BytesIO(content)) as image:
            return (image.height, image.width), name
    return open_image(content).size, name or "unknown"


def make_log_histogram(values: NDArray[np.int64]) -> Histogram:
    """Return a histogram of positive integers whose bins are equally wide on a logarithmic scale.

    The bounds are powers of two, rounded up to integers. The exponents are consecutive multiples of 1/4, 1/2, 1, 2 or
    4. Values below 1 count as 1.

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
    """Return the most frequent names with their counts, the number of other names, and the sum of their counts."""
    common = counts.most_common(num_kept)
    return common, len(counts) - len(common), counts.total() - sum(count for _, count in common)


def describe_imbalance(counts: Sequence[int]) -> str:
    """Return a description of the balance of classes, given their counts."""
    smallest, largest = min(counts), max(counts)
    if smallest == largest:
        return f"{smallest} each"
    ratio = f"the largest has {largest / smallest:.3g} times as many as the smallest"
    return f"{smallest} to {largest} each, median {np.median(counts):g}; {ratio}"


def make_overview_page(overview: Overview) -> bytes:
    """Return an HTML page that shows the contents of a source."""
    parts = [
        _make_overview_tiles(overview),
        element(
            "div",
            _show_classes(overview),
            _show_file_sizes(overview),
            _show_sizes(overview),
            _show_facts(overview),
            class_="flow",
        ),
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
    note = element("p", f"The sizes of the files of all {overview.num_images:,} images.", class_="soft")
    return section("File sizes", note, column_chart(overview.file_sizes, "images", format_bytes))


def _show_sizes(overview: Overview) -> Markup:
    headers = overview.headers
    which = "all" if headers.num_images == overview.num_images else "evenly spaced"
    parts = [
        element("p", f"Width × height, from the headers of {headers.num_images:,} images ({which}).", class_="soft")
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


class Markup(str):
    """Finished HTML, which :func:`escape` does not change."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Return text as HTML. Markup is returned unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def join(parts: Iterable[str]) -> Markup:
    """Return the parts as lines, with text escaped."""
    return Markup("\n".join(map(escape, parts)))


def make_page(title: str, parts: Iterable[Markup]) -> bytes:
    """Return a page with a title, as a UTF-8 file. Bytes of names that are not UTF-8 are shown escaped."""
    template = Template(files("shardio.viewer").joinpath("page.html").read_text("utf-8"))
    page = template.substitute(title=escape(title), heading=escape(title), content=join(parts))
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
    """Return short facts in large print, given as pairs of a name and a value."""
    items = [element("li", element("b", value), element("span", name)) for name, value in facts]
    return element("ul", *items, class_="tiles")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a table. The first cell of each row is its header, and numbers are aligned to the right.

    A heading or another cell that is Markup must be a complete cell element.
    """
    rows = list(rows)
    styles = ["number" if all(isinstance(row[i], int) for row in rows) else None for i in range(len(headings))]
    head = [
        name if isinstance(name, Markup) else element("th", name, scope="col", class_=style)
        for name, style in zip(headings, styles, strict=True)
    ]
    body = list[Markup]()
    for first, *others in rows:
        cells = [element("th", first, scope="row", class_=styles[0])]
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


def column_chart(histogram: Histogram, noun: str, form: Callable[[float], str]) -> Markup:
    """Return a histogram as vertical bars, with a collapsible table of its numbers.

    Args:
        histogram: The histogram.
        noun: The plural noun for the counted items.
        form: A function that returns a bound of a bin as text.
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
    """Return a plot of (height, width) pairs. The area of a circle shows the number of equal pairs."""
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
    """Return a thumbnail, its label in bold, and further lines. A placeholder replaces an undecodable image."""
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
    """Return the smallest end, at least a given positive value, that gives an axis five round tick marks.

    >>> _round_up(500), _round_up(1030), _round_up(7)
    (600, 1200, 8)
    """
    unit = 10 ** (len(str(value)) - 1)
    ends: list[int] = [round(unit * factor) for factor in (1.2, 1.6, 2, 3, 4, 6, 8, 10, 12)]
    return next(end for end in ends if value <= end and end % 4 == 0)
