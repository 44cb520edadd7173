"""JPEG decoding by the kernel: which images it renders, which it skips and why, and its form of crop plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.images.by_libjpeg import JpegPicture
from shardio.images.crop_plan import CropPlan
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.head import read_head, why_irregular
from shardio.images.jpeg.regions import MIN_SCALED_SIDE
from shardio.images.jpeg.standard import EOI, JPEG_START, marker_bytes
from shardio.images.kernel import find_kernel
from shardio.images.kernel.compiled.records import LUMA_FACTORS, MAX_BYTES, MIRRORED, PLAN, TRANSPOSED, UPSIDE_DOWN
from shardio.images.kernel.functions import RESAMPLINGS
from shardio.images.orientation import UPRIGHT
from shardio.images.pictures import Picture
from shardio.images.pixels import Pixels
from shardio.images.rendering import MAX_RESIZED_PIXELS, SCALES

_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in LUMA_FACTORS)


def why_not_by_kernel(content: bytes) -> str | None:
    """Return why the kernel cannot render an image, or None if it can.

    This checks only the file's head and its end. It does not detect damaged files and very rare heads, such as JFIF 2,
    which the kernel skips, too. The kernel also skips some crops of any file: regions above a million pixels, and those
    of :func:`_is_for_opencv`. There are few different answers, all short, so that they can be counted.

    Args:
        content: The image's file.
    """
    if not content.startswith(JPEG_START):
        return "not a JPEG"
    try:
        head = read_head(content)
    except ValueError:
        return "unusual head"
    if (why := why_irregular(head)) is not None:
        return why
    if len(head.factors) > 1 and head.factors not in _FACTORS:
        return "unusual sampling factors"
    if not content.endswith(marker_bytes(EOI)):
        return "no end-of-image marker"
    if len(content) - head.scan_start > MAX_BYTES and not has_tiles(content):
        return f"more than {MAX_BYTES >> 20} MiB and not tiled"
    return None


def render_by_kernel(pictures: Sequence[Picture], plan: CropPlan, rows: Pixels | Sequence[Pixels]) -> NDArray[np.bool_]:
    """Render the images that the kernel can render, if a kernel is available.

    Args:
        pictures: n pictures.
        plan: Their crop plan.
        rows: The destination: uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays.

    Returns:
        bool [n], whether each picture was rendered.
    """
    is_rendered = np.zeros(len(pictures), np.bool_)
    kernel = find_kernel()
    if kernel is None:
        return is_rendered
    contents = [
        picture.content if isinstance(picture, JpegPicture) and not is_for_opencv else b""
        for picture, is_for_opencv in zip(pictures, _is_for_opencv(plan).tolist(), strict=True)
    ]
    for row, (content, pixels) in enumerate(zip(contents, rows, strict=True)):
        if content and not pixels.flags.c_contiguous:
            contents[row] = b""
    jpegs = [row for row, content in enumerate(contents) if content]
    if not jpegs or (len(jpegs) == 1 and _is_for_libjpeg(contents[jpegs[0]], plan.take(np.array(jpegs)))):
        return is_rendered
    # Sorted by how much of an untiled file must be read, so that images decoded side by side take equally long.
    bottom = (plan.box[:, 0] + plan.box[:, 2]) / [picture.size[0] for picture in pictures]
    order = np.argsort(bottom * [len(content) for content in contents])
    turns = np.array([_encode_turn(picture) for picture in pictures])
    return kernel.decode(contents, as_records(plan), order, rows, turns)


def _is_for_libjpeg(content: bytes, plan: CropPlan) -> bool:
    """Return whether libjpeg-turbo decodes a lone image faster: a scan is one stream, but the kernel decodes three."""
    return bool((plan.size == plan.box[:, 2:]).all()) and not has_tiles(content)


def _is_for_opencv(plan: CropPlan) -> NDArray[np.bool_]:
    """Return which images the kernel must leave to OpenCV, whatever their files are, bool [n].

    :func:`shardio.images.rendering.prepare_render` renders some from a smaller inverse DCT, and refuses others. Where
    both sides are halved exactly, OpenCV replaces INTER_LINEAR by INTER_AREA (resize.cpp).
    """
    box, size = plan.box[:, 2:], plan.size
    is_for_opencv = size.prod(axis=1) > MAX_RESIZED_PIXELS
    if plan.resampling == "bilinear":
        is_for_opencv |= (box.min(axis=1) >= MIN_SCALED_SIDE) & (box >= min(SCALES) * size).all(axis=1)
        is_for_opencv |= (box == 2 * size).all(axis=1)
    return np.asarray(is_for_opencv)


def _encode_turn(picture: Picture) -> int:
    """Return how to turn a picture in the kernel's form, IMAGE.turn."""
    if not isinstance(picture, JpegPicture) or picture.turn == UPRIGHT:
        return 0
    is_upside_down, is_mirrored, is_transposed = picture.turn
    return UPSIDE_DOWN * is_upside_down + MIRRORED * is_mirrored + TRANSPOSED * is_transposed


def as_records(plan: CropPlan) -> NDArray[np.void]:
    """Return a plan in the kernel's form, PLAN [n]."""
    records = np.empty(len(plan.box), PLAN)
    records["top"], records["left"], records["height"], records["width"] = plan.box.T
    records["new_height"], records["new_width"] = plan.size.T
    records["window_top"], records["window_left"] = plan.window[:, :2].T
    records["is_flipped"] = plan.flip
    records["resampling"] = RESAMPLINGS[plan.resampling]
    return records
