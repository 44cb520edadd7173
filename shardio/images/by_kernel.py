"""Which images of a chunk the kernel draws, and what it is told of them; which it leaves to others, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.images.drawing import MAX_RESIZED_PIXELS, SCALES
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.head import read_head, why_irregular
from shardio.images.jpeg.regions import MIN_SCALED_SIDE
from shardio.images.jpeg.standard import EOI, JPEG_START, marker_bytes
from shardio.images.kernel import find_kernel
from shardio.images.kernel.records import LUMA_FACTORS, MAX_BYTES, PLAN
from shardio.images.pictures import JpegPicture, Picture
from shardio.images.pixels import Pixels
from shardio.images.plans import CropPlan

_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in LUMA_FACTORS)


def why_not_by_kernel(content: bytes) -> str | None:
    """Return why the kernel draws no part of an image, or None if it is made for it.

    Only the file's head and its end are looked at. Of what is damaged the kernel draws nothing either, nor of heads so
    rare that they are not asked for here, as JFIF 2. That a crop is for others whatever its file is is not known here:
    see :func:`_is_for_opencv`; ``antialias``, an EXIF orientation that is applied, regions above a million pixels. The
    answers are few and short, so that they can be counted.

    Args:
        content: The image's file.
    """
    if not content.startswith(JPEG_START):
        return "no JPEG"
    try:
        head = read_head(content)
    except ValueError:
        return "unusual head"
    if (why := why_irregular(head)) is not None:
        return why
    if len(head.factors) > 1 and head.factors not in _FACTORS:
        return "unusual sampling factors"
    if not content.endswith(marker_bytes(EOI)):
        return "no EOI at the end"
    if len(content) - head.scan_start > MAX_BYTES and not has_tiles(content):
        return f"more than {MAX_BYTES >> 20} MiB and not tiled"
    return None


def draw_by_kernel(images: Sequence[Picture], plans: CropPlan, rows: Pixels | Sequence[Pixels]) -> NDArray[np.bool_]:
    """Draw those of some images that the kernel is made for, if there is one.

    Args:
        images: n pictures.
        plans: What to make of each.
        rows: What to write to.

    Returns:
        bool [n], whether each was drawn.
    """
    is_drawn = np.zeros(len(images), np.bool_)
    kernel = None if plans.antialias else find_kernel()
    if kernel is None:
        return is_drawn
    is_left = _is_for_opencv(plans)
    contents = [
        b"" if is_other or not isinstance(image, JpegPicture) or not image.is_upright else image.content
        for image, is_other in zip(images, is_left.tolist(), strict=True)
    ]
    if not any(contents):
        return is_drawn
    records = as_records(plans)
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        # How much of an untouched file must be read: those that take equally long are decoded side by side.
        bottom = (plans.box[:, 0] + plans.box[:, 2]) / [image.size[0] for image in images]
        order = np.argsort(bottom * [len(content) for content in contents])
        return kernel.decode(contents, records, order, rows)
    for number, (content, row) in enumerate(zip(contents, rows, strict=True)):
        if content and row.flags.c_contiguous:
            is_drawn[number] = kernel.decode([content], records[[number]], np.zeros(1, np.int64), row[np.newaxis])[0]
    return is_drawn


def _is_for_opencv(plans: CropPlan) -> NDArray[np.bool_]:
    """Return which images the kernel must not draw, whatever their files are, bool [n].

    Those are drawn from a smaller inverse DCT, or refused (:func:`shardio.images.drawing.prepare`); or half as high and
    half as wide, exactly, for which OpenCV's INTER_LINEAR has a rule of its own (resize.cpp: it is INTER_AREA then).
    """
    box, size = plans.box[:, 2:], plans.size
    is_scaled = (box.min(axis=1) >= MIN_SCALED_SIDE) & (box >= min(SCALES) * size).all(axis=1)
    is_for_opencv: NDArray[np.bool_] = (
        is_scaled | (box == 2 * size).all(axis=1) | (size.prod(axis=1) > MAX_RESIZED_PIXELS)
    )
    return is_for_opencv


def as_records(plans: CropPlan) -> NDArray[np.void]:
    """Return plans as the kernel reads them, PLAN [n]."""
    records = np.empty(len(plans.box), PLAN)
    records["top"], records["left"], records["height"], records["width"] = plans.box.T
    records["new_height"], records["new_width"] = plans.size.T
    records["window_top"], records["window_left"] = plans.window[:, :2].T
    records["is_flipped"] = plans.flip
    return records
