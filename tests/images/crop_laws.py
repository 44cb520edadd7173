"""The law that a decoded part of an image equals the same part of a full decode."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardio.images import CropPlan, Picture, PlannedCrop, Resampling, Rows, open_image
from shardio.images.jpeg import Box
from shardio.images.pictures import Orientation
from shardio.images.rendering import render_by_kernel
from shardio.kernel import find_kernel
from shardio.kernel.functions import Content
from shardio.kernel.records import PLAN
from tests.images.jpeg_files import segments_of
from tests.images.jpeg_writer import segment
from tests.images.pictures import Array


def render_parts(content: Content, boxes: Sequence[Box]) -> tuple[list[Array], NDArray[np.bool_]]:
    """Return unresized parts of an image, and whether the kernel rendered each."""
    kernel = find_kernel()
    assert kernel is not None, "conftest.py compiles it"
    plans = np.zeros(len(boxes), PLAN)
    plans["top"], plans["left"], plans["height"], plans["width"] = np.array(boxes).T
    plans["new_height"], plans["new_width"] = plans["height"], plans["width"]
    rows = np.zeros((len(boxes), plans["height"].max(), plans["width"].max(), 3), np.uint8)
    is_rendered = kernel.decode([content] * len(boxes), plans, np.arange(len(boxes)), rows)
    return [row[: box.height, : box.width] for row, box in zip(rows, boxes, strict=True)], is_rendered


def render_chunk_by_kernel(pictures: Sequence[Picture], plan: CropPlan, rows: Rows) -> NDArray[np.bool_]:
    """Render one crop of each of n images. Return whether the kernel rendered each crop, bool [n]."""
    return render_by_kernel([PlannedCrop(pictures, plan)], [rows])[:, 0]


def part(pixels: Array, box: Box) -> Array:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def some_boxes(height: int, width: int, number: int) -> list[Box]:
    """Return about ``number`` parts of a picture, evenly spaced among all parts."""
    tall, wide = (list(itertools.combinations(range(side + 1), 2)) for side in (height, width))
    every = 1 + len(tall) * len(wide) // number
    return [_between(*stretches) for stretches in itertools.islice(itertools.product(tall, wide), 0, None, every)]


def _between(rows: tuple[int, int], columns: tuple[int, int]) -> Box:
    return Box(rows[0], columns[0], rows[1] - rows[0], columns[1] - columns[0])


def random_boxes(height: int, width: int, number: int, random: np.random.Generator) -> list[Box]:
    """Return small and large parts of a picture, many of which touch its borders."""

    def draw(side: int) -> tuple[int, int]:
        length = int(random.integers(1, (min(4, side) if random.random() < 0.5 else side) + 1))
        start = [0, side - length, int(random.integers(0, side - length + 1))][random.integers(3)]
        return start, start + length

    return [_between(draw(height), draw(width)) for _ in range(number)]


@cache
def edge_boxes(height: int, width: int, unit: int = 8) -> list[Box]:
    """Return parts whose borders are within one pixel of the borders of units and of the picture."""
    near = [
        sorted({place + by for place in [*range(0, side + 1, unit), side] for by in (-1, 0, 1)} & {*range(side + 1)})
        for side in (height, width)
    ]
    tall, wide = (list(itertools.combinations(places, 2)) for places in near)
    return [_between(*stretches) for stretches in itertools.product(tall, wide)]


def assert_parts(
    content: bytes, expected: Array, boxes: Iterable[Box], *, orientation: Orientation = "ignore", name: str = ""
) -> None:
    """Check that parts of a file equal the same parts of the expected image, with the kernel and without it."""
    picture = open_image(content, orientation=orientation)
    assert picture.size == expected.shape[:2], name
    boxes = list(boxes)
    if orientation == "ignore":
        assert_parts_by_kernel(content, expected, boxes, name=name)
    for box in boxes:
        if not np.array_equal(picture.read(box), part(expected, box)):
            raise AssertionError(f"{name}: {box} of {picture.size} has different pixels")


def assert_parts_by_kernel(content: bytes, expected: Array, boxes: Sequence[Box], *, name: str = "") -> int:
    """Check the parts of a JPEG that the kernel renders. Return their number."""
    num_drawn = 0
    for start in range(0, len(boxes), 64):
        some = boxes[start : start + 64]
        for box, pixels, is_drawn in zip(some, *render_parts(content, some), strict=True):
            if is_drawn and not np.array_equal(pixels, part(expected, box)):
                raise AssertionError(f"{name}: the kernel renders {box} of {expected.shape[:2]} with different pixels")
            num_drawn += int(is_drawn)
    return num_drawn


def draw_plan(
    sizes: Sequence[tuple[int, int]], window: tuple[int, int], resampling: Resampling, random: np.random.Generator
) -> CropPlan:
    """Draw a part of each picture, its new size, and a window that may extend beyond the part or show nothing of it."""
    boxes = np.array([random_boxes(*size, 1, random)[0] for size in sizes])
    is_resized, is_shifted, is_flipped = random.random((3, len(sizes))) < [[0.7], [0.6], [0.5]]
    new_sizes = np.where(is_resized[:, np.newaxis], random.integers(1, 120, (len(sizes), 2)), boxes[:, 2:])
    corners = random.integers(-20, np.maximum(new_sizes, 1)) * is_shifted[:, np.newaxis]
    windows = np.concatenate([corners, np.full_like(corners, window)], axis=1)
    return CropPlan(box=boxes, size=new_sizes, window=windows, flip=is_flipped, resampling=resampling)


def shows_picture(plan: CropPlan) -> NDArray[np.bool_]:
    """Return which windows of a plan show a part of their picture."""
    corner, size = plan.window[:, :2], plan.window[:, 2:]
    return np.asarray(((corner < plan.size) & (corner + size > 0)).all(axis=1))


def tile_by_hand(content: bytes) -> bytes:
    """Add a tile table to a JPEG that has restart intervals, by searching for the restart markers."""
    spans = list(segments_of(content))
    frame = next(start for marker, start, _ in spans if marker in (0xC0, 0xC1))
    interval = next(content[start + 4 : end] for marker, start, end in spans if marker == 0xDD)
    scan = content[spans[-1][2] : -2]
    lengths = [len(data) for data in re.split(rb"\xff[\xd0-\xd7]", scan)]
    table = content[frame + 5 : frame + 9] + interval + b"\2" + struct.pack(f">I{len(lengths)}H", len(scan), *lengths)
    start = spans[-1][1]
    return content[:start] + table_segment(table) + content[start:]


def table_segment(part: bytes, number: int = 0, num_parts: int = 1) -> bytes:
    return segment(0xE9, b"shardio\0" + bytes([1, number, num_parts]) + part)
