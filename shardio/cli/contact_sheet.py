"""Contact sheets: rows of small images with captions, as one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

CELL = 160
"""The maximum side of an image on a sheet, in pixels."""

MIN_WIDTH = 72
"""The minimum width of a column in pixels. The captions fit into it."""

MARGIN, GAP, GROUP_GAP, ROW_GAP = 16, 4, 14, 10
"""The space in pixels around the sheet, between the images of a group, between groups, and between rows."""

TITLE_SIZE, TITLE_HEIGHT = 20, 34
CAPTION_SIZE, CAPTION_HEIGHT = 13, 20
"""The font sizes of title and captions, and the heights of their lines, in pixels."""

PAPER, INK, GREY = "white", "black", (96, 96, 96)


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRow:
    """A row of a contact sheet.

    Attributes:
        names: The captions below the first image of the first groups.
        groups: The images of each group. Each fits into a cell: see :func:`fit_cell`.
    """

    names: Sequence[str]
    groups: Sequence[Sequence[Image.Image]]


class _Column(NamedTuple):
    left: int
    width: int


def fit_cell(image: Image.Image) -> Image.Image:
    """Return an image that fits into a cell, with the same proportions.

    A small image is enlarged by a whole number without smoothing, so that each of its pixels stays visible. A large one
    is reduced by averaging.
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
        pen.text((group[0].left, MARGIN + TITLE_HEIGHT), caption, GREY, font)
    for row, top in zip(rows, tops, strict=True):
        height = _height_of(row)
        for group, images in zip(columns, row.groups, strict=False):
            for column, image in zip(group, images, strict=False):  # A row may have fewer images than another.
                x = column.left + (column.width - image.width) // 2
                sheet.paste(image, (x, top + (height - image.height) // 2))
        for name, group, images in zip(row.names, columns, row.groups, strict=False):
            name_top = top + (height + images[0].height) // 2 + GAP
            pen.text((group[0].left, name_top), _shorten(name, font, group[0].width), GREY, font)
    return sheet


def _place_columns(rows: Sequence[SheetRow]) -> list[list[_Column]]:
    """Return the columns of each group. A column is as wide as its widest image."""
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
    """Return a text that is at most ``width`` pixels wide. Keep its end, which distinguishes paths."""
    if font.getlength(text) <= width:
        return text
    start = next(start for start in range(1, len(text) + 1) if font.getlength(f"…{text[start:]}") <= width)
    return f"…{text[start:]}"
