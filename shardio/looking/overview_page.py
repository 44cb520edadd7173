"""The page of ``shardio view``."""

from __future__ import annotations

from shardio.looking.histograms import describe_imbalance, take_most_common
from shardio.looking.overview import Overview
from shardio.looking.page import (
    Markup,
    bar_table,
    column_chart,
    element,
    figure,
    flow,
    make_page,
    scatter_plot,
    section,
    table,
    tiles,
)
from shardio.looking.sizes import format_bytes

MAX_CLASSES = 200
"""The maximum number of classes on the page, the most frequent first."""

MAX_SIZES = 12
"""The maximum number of image sizes in the table, the most frequent first."""

MAX_POINTS = 1000
"""The maximum number of image sizes in the plot."""

MAX_NAMED = 20
"""The maximum number of unreadable images that are named."""

NO_CLASS = "(no class)"


def make_overview_page(overview: Overview) -> bytes:
    """Return the page that shows what a source contains, an HTML file."""
    parts = [
        _make_tiles(overview),
        flow(_show_classes(overview), _show_file_sizes(overview), _show_sizes(overview), _show_facts(overview)),
        _show_thumbnails(overview),
    ]
    return make_page(f"shardio view {overview.name}", parts)


def _make_tiles(overview: Overview) -> Markup:
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
