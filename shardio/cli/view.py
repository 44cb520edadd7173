"""Implement ``shardio view`` and ``augment``, which create contact sheets: rows of small images with captions."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from shardio.cli.options import StorageOptionTexts, has_class_folders, make_transform, read_access, read_options
from shardio.cli.terminal import check_png_path, echo, printable, value_errors_as_usage_errors
from shardio.errors import SampleError
from shardio.files import write_whole
from shardio.images import IMAGE_FIELDS
from shardio.reading import FileReader, LabeledFile
from shardio.storage import StorageOptions, absolute_path, find_path, find_url, make_access, parse_location, walk_files
from shardio.values import count, format_bytes
from shardio.viewer import choose_evenly, holds_shards

if TYPE_CHECKING:
    from shardio.datasets import MapDataset
    from shardio.decoding import Decode
    from shardio.viewer import Overview, Thumbnail


IMAGES_PER_ROW = 8
"""The number of images in a row of a PNG."""

MAX_PNG_IMAGES = 2000
"""The maximum number of images in a PNG, which fill 250 rows."""

DRAWS = 8
"""The default number of columns of a sheet. If an image has several crops per epoch, the sheet shows as many epochs
as fit into these columns, but at least 2."""


CELL = 160
"""The maximum width and height of an image on a sheet, in pixels."""

MIN_WIDTH = 72
"""The minimum width of a column in pixels, chosen to fit the captions."""

MARGIN, GAP, GROUP_GAP, ROW_GAP = 16, 4, 14, 10
"""The space in pixels around the sheet, between the images of a group, between groups, and between rows."""

TITLE_SIZE, TITLE_HEIGHT = 20, 34
CAPTION_SIZE, CAPTION_HEIGHT = 13, 20
"""The font sizes of the title and the captions, and the heights of their lines, in pixels."""

PAPER, INK, GRAY = "white", "black", (96, 96, 96)

CHANNELS = (1, 3, 4)
"""The numbers of channels that can be shown: gray, RGB, and RGB with an alpha channel, which is ignored."""

Transform = Callable[[Any], Any]

of_transform, of_sheet = (partial(typer.Option, rich_help_panel=panel) for panel in ("Transform", "Sheet"))
"""Functions that create an option in a panel of ``--help``."""


def check_page_path(path: str) -> str:
    """Return the path of a page or an image to write; raise a usage error unless it ends in .html or .png."""
    if not path.endswith((".html", ".png")):
        raise typer.BadParameter(f"{path!r} must end in .html or .png")
    return path


def view(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A packed directory, a manifest, a tar, a pattern of tars, or a directory of images."
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

    The page shows images with their keys and classes, and the number of samples of each class. The page also shows the
    sizes of all image files, and the resolutions of up to 2,000 evenly spaced images. The page contains its images, and
    needs no network.

    Example: shardio view TRAIN -o sheet.html
    """
    from shardio.viewer import look_at, make_overview_page, open_source

    if out.endswith(".png") and limit > MAX_PNG_IMAGES:
        raise typer.BadParameter(
            f"a PNG shows at most {MAX_PNG_IMAGES} images: write an .html file", param_hint="--limit"
        )
    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        location = parse_location(out, access)
        opened = open_source(source, access)
    with opened:
        if opened.contains(location):
            raise _refuse_image(out)
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


def _refuse_image(out: str | Path) -> typer.BadParameter:
    error = f"{printable(out)} is one of the images and would be overwritten: choose another file"
    return typer.BadParameter(error, param_hint="--out")


def _make_png(overview: Overview) -> bytes:
    found = overview.thumbnails
    if not found:
        raise typer.BadParameter("no sample has an image: write an .html file", param_hint="--out")
    rows = list[SheetRow]()
    for start in range(0, len(found), IMAGES_PER_ROW):
        here = found[start : start + IMAGES_PER_ROW]
        names = [("" if each.label is None else f"{each.label}: ") + each.key.rpartition("/")[2] for each in here]
        rows.append(SheetRow(names=list(map(printable, names)), groups=[[_show_thumbnail(each)] for each in here]))
    file = io.BytesIO()
    title = printable(f"{overview.name}: {len(found)} of {count(overview.num_images, 'image')}")
    make_sheet(title, [""] * len(rows[0].groups), rows).save(file, "PNG")
    return file.getvalue()


def _show_thumbnail(thumbnail: Thumbnail) -> Image.Image:
    if thumbnail.jpeg is not None:
        return fit_cell(Image.open(io.BytesIO(thumbnail.jpeg)))
    placeholder = Image.new("RGB", (CELL, CELL // 2), (235, 235, 235))
    ImageDraw.Draw(placeholder).text((CELL // 2, CELL // 4), "cannot be decoded", GRAY, anchor="mm")
    return placeholder


def augment(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Class folders of images, any other directory of images, one image, or a packed dataset.",
        ),
    ],
    out: Annotated[
        Path, of_sheet("--out", "-o", callback=check_png_path, metavar="FILE.png", help="The file to write.")
    ],
    recipe: Annotated[
        str | None,
        of_transform(metavar="NAME", help="A recipe from shardio.transforms.recipes, such as trivial_augment."),
    ] = None,
    transform: Annotated[
        str | None,
        of_transform(
            metavar="MODULE:NAME",
            help="Your own transform, as package.module:name or path/to/file.py:name. A class, or a function that "
            "needs no arguments, is called to create the transform.",
        ),
    ] = None,
    size: Annotated[
        int | None,
        of_transform(
            min=1,
            max=4096,
            help="Size of the images in pixels, for recipes and for your own functions with a parameter named size "
            "(default: the default of the recipe or function).",
        ),
    ] = None,
    images: Annotated[int, of_sheet(min=1, max=64, help="Number of images, evenly spaced in SOURCE.")] = 6,
    draws: Annotated[
        int | None,
        of_sheet(min=1, max=64, help="Number of epochs to show (default: 8, or fewer for several crops per epoch)."),
    ] = None,
    seed: Annotated[int, of_sheet(min=0, max=2**63 - 1, help="Seed of the run.")] = 0,
    decode: Annotated[
        Literal["array", "pil"], of_transform(help="Type of the images for your transform: arrays or Pillow images.")
    ] = "array",
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Show the results of a recipe or a transform as a contact sheet.

    Each row shows an image, and its versions in the first epochs of a training run with this seed. The command lists
    images that cannot be read.

    Example: shardio augment IMAGES -o sheet.png --recipe trivial_augment
    """
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
    for index in choose_evenly(np.arange(len(dataset)), images).tolist():
        try:
            rows.append(make_row(dataset, index, num_epochs, seed))
        except SampleError as error:  # noqa: PERF203  # The cost of `try` is negligible.
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
    if not out.parent.is_dir():
        error = f"the directory {printable(out.parent)} does not exist: create it first"
        raise typer.BadParameter(error, param_hint="--out")
    paths = (path for path, _ in getattr(dataset, "samples", ()))  # Packed datasets lack this attribute.
    if out.exists() and any(path.endswith(out.name) and not find_url(path) and out.samefile(path) for path in paths):
        raise _refuse_image(out)


def open_images(
    source: str, transform: Transform, decode: Decode, storage_options: StorageOptions | None = None
) -> MapDataset:
    """Open a source as a dataset whose samples begin with an image.

    Args:
        source: Class folders, any other directory of images, an image file, or a packed dataset.
        transform: The transform of the images.
        decode: The type of the images that the transform receives: arrays or Pillow images.
        storage_options: Settings for the store of a remote source.

    Raises:
        FileNotFoundError: If the source does not exist, or holds no images.
        FormatError: If the source is not a dataset.
        TypeError: If the transform does not accept images of that type.
    """
    from shardio.datasets import ImageFolder, MapDataset, ShardMapDataset
    from shardio.decoding import FieldDecoder

    class ImageFiles(MapDataset):
        """Image files without labels, in any folders below a root. All paths are absolute."""

        def __init__(self, root: Path, paths: Sequence[Path]) -> None:
            decoder = FieldDecoder(fields=("image",), transform=transform, decode=decode)
            super().__init__(decoder, FileReader(parse_location(root), IMAGE_FIELDS[0]))
            self.samples = [(str(path), 0) for path in paths]

        def locate(self, indices: NDArray[np.int64]) -> list[LabeledFile]:
            return [self.samples[index] for index in indices.tolist()]

        def __len__(self) -> int:
            return len(self.samples)

    open_packed = partial(ShardMapDataset, fields=("image",), transform=transform, decode=decode)
    access = make_access(storage_options)
    if find_path(parse_location(source, access)) is None:
        if has_class_folders(source, access):
            return ImageFolder(source, transform, decode=decode, storage_options=storage_options)
        return open_packed(source, storage_options=storage_options)
    path = absolute_path(Path(source))
    if path.is_file() and _is_image(path):
        return ImageFiles(path.parent, [path])
    if not path.is_dir() or holds_shards(parse_location(path)):
        return open_packed(path)
    if has_class_folders(path):
        try:
            return ImageFolder(path, transform, decode=decode)
        except FileNotFoundError:
            pass  # Not every folder is a class: some folders hold no images.
    paths = list(filter(_is_image, walk_files(path)))
    if not paths:
        raise FileNotFoundError(f"{path} holds neither images ({', '.join(IMAGE_FIELDS)}) nor shards")
    return ImageFiles(path, paths)


def make_row(dataset: MapDataset, index: int, num_epochs: int, seed: int) -> SheetRow:
    """Return the row of one sample: the original image, and its versions in the first epochs.

    Values that are not uint8, such as normalized ones, are stretched to 0..255. One range applies to the whole row, to
    keep differences between epochs visible.

    Args:
        dataset: A dataset from :func:`open_images`.
        index: The sample's index.
        num_epochs: The number of epochs.
        seed: The seed of the run.

    Raises:
        SampleError: If the image cannot be read or decoded.
        typer.BadParameter: If the transform does not return images, or returns NaN.
    """
    untransformed = copy(dataset)
    untransformed.transform = None
    original = _as_array(untransformed[index][0])
    name = printable(_name(dataset, index))
    results = list[list[NDArray[Any]]]()
    for epoch in range(num_epochs):
        dataset.set_epoch(epoch, seed)
        result = dataset[index][0]
        results.append([_as_array(image) for image in (result if isinstance(result, tuple | list) else [result])])
    others = [array for arrays in results for array in arrays if array.dtype != np.uint8]
    low, high = (min(map(np.min, others)), max(map(np.max, others))) if others else (0, 255)
    if not all(np.isfinite(array).all() for array in others):
        raise typer.BadParameter(f"the transform returned NaN or infinite values for {name}", param_hint="--transform")
    groups = [[_show(array, low, high) for array in arrays] for arrays in results]
    return SheetRow(
        names=[f"{name} (stretched)" if others else name], groups=[[fit_cell(Image.fromarray(original))], *groups]
    )


def _is_image(path: Path) -> bool:
    return path.suffix[1:].lower() in IMAGE_FIELDS


def _name(dataset: MapDataset, index: int) -> str:
    key, where = dataset.describe(index)
    return Path(key).relative_to(where).as_posix() if isinstance(dataset.reader, FileReader) else key


def _as_array(image: Any) -> NDArray[Any]:
    """Return an image as an array [height, width] or [height, width, 3]."""
    import torch  # The dataset has already imported torch.

    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    is_tensor = isinstance(image, torch.Tensor)
    if is_tensor and image.is_floating_point():
        image = image.float()  # NumPy has no bfloat16.
    array = image.numpy(force=True) if is_tensor else np.asarray(image)
    if array.size and array.dtype.kind in "biuf":
        if array.ndim == 2:
            return array
        # Tensors are usually [channels, height, width], and arrays are usually [height, width, channels].
        for axis in (0, 2) if is_tensor else (2, 0):
            if array.ndim == 3 and array.shape[axis] in CHANNELS:
                array = np.moveaxis(array, axis, 2)
                return array[..., 0] if array.shape[2] == 1 else array[..., :3]
    got = f"{array.dtype} {list(array.shape)}" if array.ndim else type(image).__name__
    raise typer.BadParameter(
        f"must return an image with 1, 3 or 4 channels, or a tuple of images, but returned {got}",
        param_hint="--transform",
    )


def _show(array: NDArray[Any], low: float, high: float) -> Image.Image:
    if array.dtype != np.uint8:
        span = float(high) - float(low) or 1.0
        array = np.rint((array.astype(np.float64) - float(low)) * (255 / span)).astype(np.uint8)
    return fit_cell(Image.fromarray(np.ascontiguousarray(array)).convert("RGB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRow:
    """A row of a contact sheet.

    Attributes:
        names: The captions below the first image of each group, for as many groups as there are captions.
        groups: The images of each group. Each image fits into a cell: see :func:`fit_cell`.
    """

    names: Sequence[str]
    groups: Sequence[Sequence[Image.Image]]


class _Column(NamedTuple):
    left: int
    width: int


def fit_cell(image: Image.Image) -> Image.Image:
    """Return an image resized to fit into a cell, with its proportions unchanged.

    A small image is enlarged by an integer factor without smoothing, to keep each pixel visible. A large image is
    reduced with smoothing.
    """
    factor = CELL // max(image.size)
    if factor:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    scale = CELL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)


def make_sheet(title: str, captions: Sequence[str], rows: Sequence[SheetRow]) -> Image.Image:
    """Return a contact sheet, an RGB image.

    Args:
        title: The first line.
        captions: The captions above the groups.
        rows: The rows, with at most ``len(captions)`` groups each.
    """
    columns = _place_columns(rows)
    tops, bottom = _place_rows(rows)
    right = columns[-1][-1].left + columns[-1][-1].width
    sheet = Image.new("RGB", (right + MARGIN, bottom + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    title_font, font = ImageFont.load_default(TITLE_SIZE), ImageFont.load_default(CAPTION_SIZE)
    pen.text((MARGIN, MARGIN), _shorten(title, title_font, right - MARGIN), INK, title_font)
    for caption, group in zip(captions, columns, strict=True):
        pen.text((group[0].left, MARGIN + TITLE_HEIGHT), caption, GRAY, font)
    for row, top in zip(rows, tops, strict=True):
        height = _height_of(row)
        for group, images in zip(columns, row.groups, strict=False):
            for column, image in zip(group, images, strict=False):  # A row may have too few images for all columns.
                x = column.left + (column.width - image.width) // 2
                sheet.paste(image, (x, top + (height - image.height) // 2))
        for name, group, images in zip(row.names, columns, row.groups, strict=False):
            name_top = top + (height + images[0].height) // 2 + GAP
            pen.text((group[0].left, name_top), _shorten(name, font, group[0].width), GRAY, font)
    return sheet


def _place_columns(rows: Sequence[SheetRow]) -> list[list[_Column]]:
    groups, left = list[list[_Column]](), MARGIN
    num_named = max(len(row.names) for row in rows)
    for number, group in enumerate(zip_longest(*[row.groups for row in rows], fillvalue=())):
        columns = list[_Column]()
        for images in zip_longest(*group):
            narrowest = CELL if number < num_named else MIN_WIDTH
            width = max(narrowest, *[image.width for image in images if image is not None])
            columns.append(_Column(left, width))
            left += width + GAP
        left += GROUP_GAP - GAP
        groups.append(columns)
    return groups


def _place_rows(rows: Sequence[SheetRow]) -> tuple[list[int], int]:
    tops, top = list[int](), MARGIN + TITLE_HEIGHT + CAPTION_HEIGHT
    for row in rows:
        tops.append(top)
        top += _height_of(row) + CAPTION_HEIGHT + ROW_GAP
    return tops, top - ROW_GAP


def _height_of(row: SheetRow) -> int:
    return max(image.height for group in row.groups for image in group)


def _shorten(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    start = next(start for start in range(1, len(text) + 1) if font.getlength(f"…{text[start:]}") <= width)
    return f"…{text[start:]}"
