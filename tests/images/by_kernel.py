"""Parts of images as the kernel renders them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.images import CropPlan, Picture, PlannedCrop, Rows
from shardio.images.jpeg import Box
from shardio.images.kernel import find_kernel
from shardio.images.kernel.compiled.records import PLAN
from shardio.images.rendering import render_by_kernel
from tests.images.pictures import Array


def render_parts(content: bytes, boxes: Sequence[Box]) -> tuple[list[Array], NDArray[np.bool_]]:
    """Return parts of a JPEG, not resized, and whether the kernel rendered each."""
    kernel = find_kernel()
    assert kernel is not None, "conftest.py compiles it"
    plans = np.zeros(len(boxes), PLAN)
    plans["top"], plans["left"], plans["height"], plans["width"] = np.array(boxes).T
    plans["new_height"], plans["new_width"] = plans["height"], plans["width"]
    rows = np.zeros((len(boxes), plans["height"].max(), plans["width"].max(), 3), np.uint8)
    is_rendered = kernel.decode([content] * len(boxes), plans, np.arange(len(boxes)), rows)
    return [row[: box.height, : box.width] for row, box in zip(rows, boxes, strict=True)], is_rendered


def render_chunk_by_kernel(pictures: Sequence[Picture], plan: CropPlan, rows: Rows) -> NDArray[np.bool_]:
    """Render one crop of each of n images. Return whether the kernel rendered it, bool [n]."""
    return render_by_kernel([PlannedCrop(pictures, plan)], [rows])[:, 0]
