"""``shardio view``."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.console import count, format_bytes, value_errors_as_usage_errors
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable

if TYPE_CHECKING:
    from PIL import Image

    from shardio.looking import Overview, Thumbnail

IMAGES_PER_ROW = 8
"""The number of images in a row of a PNG."""

MAX_PNG_IMAGES = 2000
"""The maximum number of images on a PNG: 250 rows."""


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
    from shardio.looking import look_at, make_overview_page, open_source
    from shardio.storage import parse_location

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
    """Return a contact sheet of the thumbnails, a PNG file."""
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
    """Return a thumbnail's class and the last part of its key."""
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
