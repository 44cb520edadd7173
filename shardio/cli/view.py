"""``shardio view``, ``dups`` and ``augment``."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardio.cli.options import StorageOptionTexts, read_access, read_options
from shardio.cli.terminal import ProgressReporter, check_png_path, count, echo, printable, value_errors_as_usage_errors
from shardio.errors import SampleError
from shardio.storage import find_url
from shardio.values import format_bytes
from shardio.viewer import DEFAULT_THRESHOLD, MAX_THRESHOLD

if TYPE_CHECKING:
    from PIL import Image

    from shardio.datasets import MapDataset
    from shardio.viewer import DuplicateReport, Overview, Thumbnail


IMAGES_PER_ROW = 8
"""The number of images in a row of a PNG."""

MAX_PNG_IMAGES = 2000
"""The maximum number of images on a PNG: 250 rows."""

SHOWN_GROUPS, SHOWN_UNREADABLE = 100, 8
"""The maximum numbers of groups and of unreadable images to print."""

DRAWS = 8
"""The default number of columns of a sheet. If each epoch has several crops, there are as many epochs as fill these
columns, but at least 2."""


def check_page_path(path: str) -> str:
    """Return the path of a page or an image to write; raise a usage error unless it ends in .html or .png."""
    if not path.endswith((".html", ".png")):
        raise typer.BadParameter(f"{path!r} must end in .html or .png")
    return path


def view(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest, a tar, a pattern of tars, or a directory of images.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", callback=check_page_path, metavar="FILE", help="The file to write: sheet.html or sheet.png."
        ),
    ],
    limit: Annotated[int, typer.Option(min=1, max=20_000, help="Maximum number of images to show.")] = 200,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63 - 1, help="Choose the images at random with this seed (default: evenly spaced images)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Show what a dataset contains, as one HTML page or as a contact sheet.

    The page has images with their keys and classes, the number of samples of each class, the sizes of all image files,
    and the resolutions of up to 2,000 evenly spaced images. It contains its images, and needs no network.

    Example: shardio view TRAIN -o sheet.html
    """
    from shardio.storage import parse_location
    from shardio.viewer import look_at, make_overview_page, open_source

    if out.endswith(".png") and limit > MAX_PNG_IMAGES:
        raise typer.BadParameter(f"a PNG shows at most {MAX_PNG_IMAGES} images: write an .html", param_hint="--limit")
    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        location = parse_location(out, access)
        opened = open_source(source, access)
    with opened:
        if opened.contains(location):
            raise typer.BadParameter(
                f"{printable(out)} is one of the images and would be overwritten: choose another file",
                param_hint="--out",
            )
        overview = look_at(opened, num_thumbnails=limit, seed=seed)
    page = make_overview_page(overview) if out.endswith(".html") else _make_png(overview)
    with location.write_whole() as file:
        file.write(page)
    if as_json:
        echo(json.dumps({"path": str(location), **overview.dump()}, indent=1))
        return
    num_bad = sum(each.jpeg is None for each in overview.thumbnails)
    bad = f" ({num_bad} cannot be decoded)" if num_bad else ""
    echo(
        f"{out}: {count(len(overview.thumbnails), 'image')} of {overview.num_images}{bad}, "
        f"{count(overview.facts['samples'], 'sample')}, {format_bytes(len(page))}"
    )


def _make_png(overview: Overview) -> bytes:
    from shardio.cli.contact_sheet import SheetRow, make_sheet

    def make_row(thumbnails: Sequence[Thumbnail]) -> SheetRow:
        return SheetRow(
            names=[printable(_name(each)) for each in thumbnails], groups=[[_show(each)] for each in thumbnails]
        )

    found = overview.thumbnails
    if not found:
        raise typer.BadParameter("no sample has an image: write an .html", param_hint="--out")
    rows = [make_row(found[start : start + IMAGES_PER_ROW]) for start in range(0, len(found), IMAGES_PER_ROW)]
    file = io.BytesIO()
    title = printable(f"{overview.name}: {len(found)} of {count(overview.num_images, 'image')}")
    make_sheet(title, [""] * len(rows[0].groups), rows).save(file, "PNG")
    return file.getvalue()


def _name(thumbnail: Thumbnail) -> str:
    name = thumbnail.key.rpartition("/")[2]
    return name if thumbnail.label is None else f"{thumbnail.label}: {name}"


def _show(thumbnail: Thumbnail) -> Image.Image:
    """Return a thumbnail as an image that fits into a cell, or a placeholder."""
    from PIL import Image, ImageDraw

    from shardio.cli.contact_sheet import CELL, GREY, fit_cell

    if thumbnail.jpeg is not None:
        return fit_cell(Image.open(io.BytesIO(thumbnail.jpeg)))
    placeholder = Image.new("RGB", (CELL, CELL // 2), (235, 235, 235))
    ImageDraw.Draw(placeholder).text((CELL // 2, CELL // 4), "cannot be decoded", GREY, anchor="mm")
    return placeholder


def check_html_path(path: str | None) -> str | None:
    """Return the path of a page to write; raise a usage error unless it ends in .html."""
    if path is not None and not path.endswith(".html"):
        raise typer.BadParameter(f"{path!r} must end in .html")
    return path


def dups(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Packed directories, manifests, tars, patterns of tars, or directories of images, such as TRAIN VAL.",
        ),
    ],
    near: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_THRESHOLD,
            metavar="BITS",
            help="Also find images that look alike: their 64-bit perceptual hashes differ in at most BITS bits. 8 also "
            "finds most copies with cropped margins.",
        ),
    ] = DEFAULT_THRESHOLD,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Find only images with the same bytes. Decode no image; of shards, read only the indexes."
        ),
    ] = False,
    between: Annotated[
        bool, typer.Option("--between", help="Report only groups that have images of several sources.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=check_html_path, metavar="FILE.html", help="Also write a page with the images."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Find images that occur several times in a dataset, or in several, such as training and validation data.

    A group is a set of samples with the same image, or with images that look alike. Samples of a group with different
    classes are pointed out. Whether images look alike depends on their brightness alone, not on their colours: check
    the groups on the page before you remove anything.

    The exit code is 0 if there are no duplicates, and 1 if there are any, or if the command fails.

    Example: shardio dups TRAIN VAL --between -o leaks.html
    """
    from shardio.storage import parse_location
    from shardio.viewer import find_duplicates, make_duplicates_page, open_source

    if between and len(names) < 2:
        raise typer.BadParameter("needs several sources, such as TRAIN VAL", param_hint="--between")
    access = read_access(storage_option)
    with ExitStack() as stack, value_errors_as_usage_errors():
        page_location = None if out is None else parse_location(out, access)
        resolved = [parse_location(name, access).resolve() for name in names]
        if len(set(resolved)) < len(resolved):
            raise ValueError("a source is named twice, so all its images would be duplicates: name it once")
        sources = [stack.enter_context(open_source(name, access)) for name in names]
        opened = stack.pop_all()
    with opened:
        with ProgressReporter("hashing", "images") as reporter:
            report = find_duplicates(
                sources,
                threshold=None if exact else near,
                is_between=between,
                start=reporter.start,
                advance=reporter.advance,
            )
        if page_location is not None:
            page = make_duplicates_page(report, sources)
            with page_location.write_whole() as file:
                file.write(page)
    if as_json:
        echo(json.dumps(_dump(report, names, is_between=between), indent=1))
    else:
        _print_groups(report, names)
        _print_counts(report, names, is_between=between)
        if out is not None:
            echo(f"wrote {out}", err=True)
    if report.groups:
        raise typer.Exit(1)


def _print_groups(report: DuplicateReport, names: Sequence[str]) -> None:
    from shardio.viewer import describe_labels

    if report.groups:
        echo("group\tdiffers in\tsource\tkey\tclass\tshard\toffset")
    for number, group in enumerate(report.groups[:SHOWN_GROUPS], 1):
        for copy in group.copies:
            differs = (
                "" if copy is group.copies[0] else "same bytes" if copy.distance is None else f"{copy.distance} bits"
            )
            offset = "" if copy.place.offset is None else copy.place.offset
            cells = (number, differs, names[copy.source_index], copy.key, copy.label or "", copy.place.shard, offset)
            echo("\t".join(printable(cell) for cell in cells))
        if warning := describe_labels(group):
            echo(f"{number}\t{printable(warning)}")
    if (num_others := len(report.groups) - SHOWN_GROUPS) > 0:
        echo(f"and {count(num_others, 'more group')}: --json prints all of them")


def _print_counts(report: DuplicateReport, names: Sequence[str], *, is_between: bool) -> None:
    for number, name in enumerate(names):
        num_groups, num_extra = report.count_within(number)
        if not is_between:
            extra = count(num_extra, "extra copy", "extra copies")
            images = count(report.num_images[number], "image")
            echo(f"within {printable(name)}: {count(num_groups, 'group')}, {extra} among {images}")
    for first, second in combinations(range(len(names)), 2):
        num_groups, in_first, in_second = report.count_between(first, second)
        echo(
            f"between {printable(names[first])} and {printable(names[second])}: {count(num_groups, 'group')}, "
            f"{count(in_first, 'sample')} of the first and {in_second} of the second"
        )
    if num_conflicts := sum(len(group.labels) > 1 for group in report.groups):
        echo(f"with different classes: {count(num_conflicts, 'group')}")
    if report.num_even:
        echo(f"{count(report.num_even, 'image')} with hardly any contrast: compared only by their bytes", err=True)
    for each in report.unreadable[:SHOWN_UNREADABLE]:
        echo(f"cannot be decoded: {printable(f'{each.key} in {names[each.source_index]}: {each.reason}')}", err=True)
    if (num_others := len(report.unreadable) - SHOWN_UNREADABLE) > 0:
        echo(f"and {count(num_others, 'more image')} that cannot be decoded: --json names all of them", err=True)


def _dump(report: DuplicateReport, names: Sequence[str], *, is_between: bool) -> dict[str, Any]:
    within = {} if is_between else {name: report.count_within(number) for number, name in enumerate(names)}
    return {
        "images": dict(zip(names, report.num_images, strict=True)),
        "within": {name: {"groups": groups, "extra_copies": extra} for name, (groups, extra) in within.items()},
        "between": [
            {"sources": [names[first], names[second]], "groups": groups, "samples": samples}
            for first, second in combinations(range(len(names)), 2)
            for groups, *samples in [report.count_between(first, second)]
        ],
        "different_classes": sum(len(group.labels) > 1 for group in report.groups),
        "groups": [
            {
                "same_bytes": group.is_exact,
                "classes": group.labels,
                "samples": [
                    {
                        "source": names[copy.source_index],
                        "key": copy.key,
                        "class": copy.label,
                        "shard": copy.place.shard or None,
                        "offset": copy.place.offset,
                        "bits": copy.distance,
                    }
                    for copy in group.copies
                ],
            }
            for group in report.groups
        ],
        "undecodable": [
            {"source": names[each.source_index], "key": each.key, "reason": each.reason} for each in report.unreadable
        ],
        "even": report.num_even,
    }


def augment(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Class folders of images, any other directory of images, one image, or a packed dataset.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", callback=check_png_path, metavar="FILE.png", help="The file to write.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A recipe of shardio.transforms.recipes, such as trivial_augment."),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Your own transform, as package.module:name or path/to/file.py:name. A class, or a function that "
            "needs no arguments, is called to make it.",
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Size of the images in pixels, for recipes and for your own functions that have a parameter size "
            "(default: that of the recipe or function).",
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, max=64, help="Number of images, evenly spaced in SOURCE.")] = 6,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Number of epochs to show (default: 8, or fewer for several crops per epoch)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the run.")] = 0,
    decode: Annotated[
        Literal["array", "pil"], typer.Option(help="What your transform takes: arrays or Pillow images.")
    ] = "array",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Show what a recipe or a transform makes of images, as a contact sheet.

    Each row shows an image, and what a training run with this seed gets in its first epochs. Images that cannot be read
    are named instead.

    Example: shardio augment IMAGES -o sheet.png --recipe trivial_augment
    """
    from shardio.cli.augmented import choose_evenly, make_row, open_images
    from shardio.cli.contact_sheet import SheetRow, make_sheet
    from shardio.cli.options import make_transform
    from shardio.files import write_whole
    from shardio.transforms import count_crops

    options = read_options(storage_option)
    with value_errors_as_usage_errors():
        made = make_transform(recipe, transform, size)
        try:
            dataset = open_images(source, made, decode, options)
        except TypeError as error:  # The transform does not accept the images that --decode chooses.
            raise ValueError(str(error)) from error
    _check_out(out, dataset)
    num_epochs = max(2, DRAWS // (count_crops(made) or 1)) if draws is None else draws
    rows, failure = list[SheetRow](), None
    for index in choose_evenly(len(dataset), images):
        try:
            rows.append(make_row(dataset, index, num_epochs, seed))
        except SampleError as error:  # noqa: PERF203  # Making a row takes much longer.
            failure = error
            echo(f"not shown: {error}", err=True)
    if not rows and failure is not None:
        raise failure
    title = printable(f"{recipe or transform}, seed {seed}")
    sheet = make_sheet(title, ["original", *[f"epoch {epoch}" for epoch in range(num_epochs)]], rows)
    with write_whole(out) as file:
        sheet.save(file, "PNG")
    if as_json:
        echo(json.dumps({"path": os.fspath(out), "images": len(rows), "draws": num_epochs, "size": list(sheet.size)}))
    else:
        size_text = f"{sheet.width}×{sheet.height} pixels"
        echo(f"{out}: {count(len(rows), 'image')}, {count(num_epochs, 'draw')}, {size_text}")


def _check_out(out: Path, dataset: MapDataset) -> None:
    """Raise a usage error if the sheet has no directory, or would replace one of the images."""
    if not out.parent.is_dir():
        raise typer.BadParameter(
            f"the directory {printable(out.parent)} does not exist: create it first", param_hint="--out"
        )
    paths = (path for path, _ in getattr(dataset, "samples", ()))  # Packed datasets have none.
    if out.exists() and any(path.endswith(out.name) and not find_url(path) and out.samefile(path) for path in paths):
        raise typer.BadParameter(
            f"{printable(out)} is one of the images and would be overwritten: choose another file", param_hint="--out"
        )
