"""``shardio augment``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardio.cli.console import check_png_path, count, value_errors_as_usage_errors
from shardio.cli.storage_options import StorageOptionTexts, read_options
from shardio.cli.terminal import echo, printable
from shardio.errors import SampleError
from shardio.storage import find_url

if TYPE_CHECKING:
    from shardio.datasets import MapDataset

DRAWS = 8
"""The default number of columns. If each epoch has several crops, it has as few epochs as fill them, at least 2."""


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
    from shardio.cli.recipes import make_transform
    from shardio.transforms import count_crops
    from shardio.whole_writes import write_whole

    options = read_options(storage_option)
    with value_errors_as_usage_errors():
        made = make_transform(recipe, transform, size)
        try:
            dataset = open_images(source, made, decode, options)
        except TypeError as error:  # The transform does not take what --decode gives it.
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
