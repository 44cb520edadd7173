"""The overview of a source's contents: counts, histograms and thumbnails, as values and as a page."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import find_format, open_image
from shardio.images.formats import errors_of_pillow
from shardio.order import make_rng_key, permute
from shardio.pages import (
    Markup,
    bar_table,
    counted,
    element,
    escape,
    join,
    make_grid,
    make_page,
    make_plot,
    section,
    table,
    tiles,
)
from shardio.shards import describe_pack
from shardio.values import count, format_bytes
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
"""The longest side of a thumbnail in pixels. Pages show thumbnails at half size or less, for high-density screens."""

THUMBNAIL_QUALITY = 80

MAX_CLASSES = 200
"""The maximum number of classes on the page, which shows the most frequent ones first."""

MAX_SIZES = 12
"""The maximum number of image sizes in the table, which shows the most frequent ones first."""

MAX_POINTS = 1000
"""The maximum number of image sizes in the plot."""

MAX_NAMED = 20
"""The maximum number of unreadable images to name."""

NO_CLASS = "(no class)"

_CHOOSE_CLASS = Markup("""
const choice = document.getElementById("class");
choice.addEventListener("change", () => {
  let shown = 0;
  for (const figure of document.querySelectorAll("figure")) {
    figure.hidden = choice.value !== "" && figure.dataset.class !== choice.value;
    shown += !figure.hidden;
  }
  document.getElementById("shown").textContent = shown;
});
""")


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
        size: The height and width of the image in pixels; None if the image cannot be decoded.
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
    for name, num_samples in zip(columns.label_names, of_label.tolist(), strict=True):
        counts[name] += num_samples
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
    """Return a histogram of positive integers, with bins of equal width on a logarithmic scale.

    The bounds are powers of two, rounded up to integers. The exponents are consecutive multiples of 1/4, 1/2, 1, 2 or
    4. Values below 1 are counted as 1.

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
    """Return the most frequent names with their counts, the number of other names, and the sum of the other counts."""
    common = counts.most_common(num_kept)
    return common, len(counts) - len(common), counts.total() - sum(count for _, count in common)


def describe_imbalance(counts: Sequence[int]) -> str:
    """Return a description of the balance of classes, given their counts."""
    smallest, largest = min(counts), max(counts)
    if smallest == largest:
        return f"{smallest} each"
    ratio = f"the largest is {largest / smallest:.3g} times as large as the smallest"
    return f"{smallest} to {largest} each, median {np.median(counts):g}; {ratio}"


def make_overview_page(overview: Overview) -> bytes:
    """Return an HTML page that shows the contents of a source."""
    sections = [show(overview) for show in (_show_classes, _show_file_sizes, _show_sizes, _show_facts)]
    parts = [_make_overview_tiles(overview), element("div", *sections, class_="flow"), _show_thumbnails(overview)]
    return make_page(f"shardio view {overview.name}", parts)


def _make_overview_tiles(overview: Overview) -> Markup:
    facts = overview.facts
    num_bytes = facts.get("bytes", overview.num_image_bytes)
    found = [counted(facts["samples"], "sample")]
    if "shards" in facts:
        found.append(counted(facts["shards"], "shard"))
    found += [("size", format_bytes(num_bytes)), counted(overview.num_images, "image")]
    if overview.class_counts:
        found.append(counted(len([name for name in overview.class_counts if name]), "class", "classes"))
    if overview.num_images:
        found.append(("per image", format_bytes(overview.num_image_bytes / overview.num_images)))
    return tiles(found)


def _show_classes(overview: Overview) -> Markup:
    counts = overview.class_counts
    if not counts:
        return section("Classes", element("p", "The samples have no classes.", class_="soft"))
    common, num_others, others = take_most_common(counts, MAX_CLASSES)
    rows = [(name or NO_CLASS, num_samples) for name, num_samples in common]
    if num_others:
        rows.append((count(num_others, "other class", "other classes"), others))
    text = describe_imbalance([num_samples for name, num_samples in counts.items() if name])
    return section("Classes", element("p", text, class_="soft"), bar_table(("class", "samples"), rows))


def _show_file_sizes(overview: Overview) -> Markup:
    note = element("p", f"The file sizes of {count(overview.num_images, 'image')}.", class_="soft")
    return section("File sizes", note, column_chart(overview.file_sizes, "image", format_bytes))


def _show_sizes(overview: Overview) -> Markup:
    headers = overview.headers
    which = "all" if headers.num_images == overview.num_images else "evenly spaced"
    images = count(headers.num_images, "image")
    parts = [element("p", f"Width × height, from the headers of {images} ({which}).", class_="soft")]
    if headers.unreadable:
        names = ", ".join(key for key, _ in headers.unreadable[:MAX_NAMED])
        more = ", …" if len(headers.unreadable) > MAX_NAMED else ""
        unreadable = count(len(headers.unreadable), "header")
        parts.append(element("p", f"{unreadable} cannot be read: {names}{more}", class_="warn"))
    if headers.sizes:
        parts.append(scatter_plot(headers.sizes.most_common(MAX_POINTS)))
        rows = [(f"{width}×{height}", number) for (height, width), number in headers.sizes.most_common(MAX_SIZES)]
        if (num_others := len(headers.sizes) - len(rows)) > 0:
            others = headers.sizes.total() - sum(number for _, number in rows)
            rows.append((count(num_others, "other size"), others))
        parts.append(bar_table(("pixels", "images"), rows))
    return section("Resolutions", *parts)


def _show_facts(overview: Overview) -> Markup:
    facts, headers = overview.facts, overview.headers
    in_shards = "shards" in facts
    uses = [(use.name, use.num_samples, format_bytes(use.num_bytes)) for use in overview.fields]
    formats = ", ".join(f"{number:,} × {name}" for name, number in headers.formats.most_common())
    rows = [("image formats", f"{formats or 'none'} (of {count(headers.num_images, 'image')})")]
    if in_shards:
        rows += [("packed", describe_pack(facts["pack"])), ("digest", facts["digest"])]
    return section(
        "Contents",
        table(["field" if in_shards else "suffix", "samples" if in_shards else "files", "size"], uses),
        table(["property", "value"], rows),
    )


def _show_thumbnails(overview: Overview) -> Markup:
    found = overview.thumbnails
    num_bad = sum(each.jpeg is None for each in found)
    of_all = f"{len(found):,} of {count(overview.num_images, 'image')}"
    parts = [element("p", f"{of_all}. EXIF orientations are ignored.", class_="soft")]
    if num_bad:
        parts.append(element("p", f"{num_bad:,} of them cannot be decoded.", class_="warn"))
    labels = sorted({each.label for each in found if each.label is not None})
    if len(labels) > 1:
        options = [element("option", name, value=name) for name in labels]
        shown = element("output", str(len(found)), id="shown")
        select = element("select", element("option", "all", value=""), *options, id="class")
        parts.append(element("p", element("label", "Class ", select), Markup(shown + " shown")))
    figures = [figure(each, each.label, each.key) for each in found]
    script = [element("script", _CHOOSE_CLASS)] if len(labels) > 1 else []
    return section("Images", *parts, element("div", *figures, class_="grid"), *script)


def column_chart(histogram: Histogram, noun: str, form: Callable[[float], str]) -> Markup:
    """Return a histogram as vertical bars, with a collapsible table of its values.

    Args:
        histogram: The histogram.
        noun: The noun for the counted items.
        form: A function that returns a bound of a bin as text.
    """
    if not histogram.counts:
        return element("p", f"no {noun}s", class_="soft")
    spans = [f"{form(low)} to {form(high)}" for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
    largest = max(histogram.counts)
    bars = [
        element("i", style=f"height:{100 * number / largest:.2f}%", title=f"{span}: {count(number, noun)}")
        for span, number in zip(spans, histogram.counts, strict=True)
    ]
    ends = [element("span", form(histogram.edges[end])) for end in (0, -1)]
    label = f"{noun}s by size, from {form(histogram.edges[0])} to {form(histogram.edges[-1])}; the numbers follow"
    return join(
        [
            element("div", *bars, class_="columns", role="img", aria_label=label),
            element("div", *ends, class_="ends"),
            element(
                "details",
                element("summary", "Numbers"),
                table(["size", f"{noun}s"], list(zip(spans, histogram.counts, strict=True))),
            ),
        ]
    )


def scatter_plot(points: Sequence[tuple[tuple[int, int], int]]) -> Markup:
    """Return a plot of (height, width) pairs. The area of a circle shows the number of equal pairs."""
    end = max(max(size) for size, _ in points)
    most = max(num_equal for _, num_equal in points)
    grid, place = make_grid(end, end, "width", "height")
    circles = list[Markup]()
    for (height, width), num_equal in points:
        x, y = place(width, height)
        hint = element("title", f"{width}×{height}: {num_equal:,}")
        circles.append(element("circle", hint, cx=x, cy=y, r=f"{max(2.5, 11 * (num_equal / most) ** 0.5):.1f}"))
    return make_plot("Resolutions", "Widths and heights in pixels. The table gives the counts.", [grid, *circles])


def figure(thumbnail: Thumbnail, label: str | None, *lines: str) -> Markup:
    """Return a thumbnail, its label in bold, and more lines. A placeholder replaces an undecodable image."""
    if thumbnail.jpeg is None:
        warning = element("span", "cannot be decoded", class_="warn")
        inner = element("p", warning, Markup("<br>"), thumbnail.reason[:120])
    else:
        height, width = thumbnail.size or (0, 0)
        alt = escape(f"image of sample {thumbnail.key}")
        inner = Markup(f'<img src="{thumbnail.url}" alt="{alt}" title="{width}×{height} pixels" loading="lazy">')
    bold = [] if label is None else [element("b", label)]
    caption = element("figcaption", *bold, *[element("span", line) for line in lines])
    return element("figure", element("div", inner, class_="frame"), caption, data_class=label or "")
