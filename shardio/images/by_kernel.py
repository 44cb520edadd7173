"""JPEG decoding by the kernel: which images it renders, which it skips and why, and its form of crop plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.images.by_libjpeg import JpegPicture
from shardio.images.crop_plan import CropPlan, PlannedCrop, Rows
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.head import read_head, why_irregular
from shardio.images.jpeg.standard import EOI, JPEG_START, marker_bytes
from shardio.images.kernel import find_kernel
from shardio.images.kernel.compiled.records import LUMA_FACTORS, MAX_BYTES, MIRRORED, PLAN, TRANSPOSED, UPSIDE_DOWN
from shardio.images.kernel.functions import RESAMPLINGS
from shardio.images.orientation import UPRIGHT
from shardio.images.pictures import Picture, sizes_of
from shardio.images.rendering import MAX_RESIZED_PIXELS, is_too_large_to_average

_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in LUMA_FACTORS)


def why_not_by_kernel(content: bytes) -> str | None:
    """Return why the kernel cannot render an image, or None if it can.

    This checks only the file's head and its end. It does not detect damaged files and very rare heads, such as JFIF 2,
    which the kernel skips, too. The kernel also skips some crops of any file: regions above a million pixels, and those
    of :func:`_is_for_libraries`. There are few different answers, all short, so that they can be counted.

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


def render_by_kernel(crops: Sequence[PlannedCrop], rows: Sequence[Rows]) -> NDArray[np.bool_]:
    """Render those crops that the kernel can render, if a kernel is available.

    Args:
        crops: The crops of n images, at least one of each. All crops of an image that show the same picture are
            rendered together.
        rows: The destinations for each of these.

    Returns:
        bool [n, crops], whether each was rendered.
    """
    pictures = crops[0].pictures
    is_rendered = np.zeros((len(pictures), len(crops)), np.bool_)
    kernel = find_kernel() if len(pictures) else None
    if kernel is None:
        return is_rendered
    is_for_kernel = np.stack(
        [_find_suitable(crop, pictures, given) for crop, given in zip(crops, rows, strict=True)], 1
    )
    if len(crops) == 1:
        is_for_kernel[:, 0] &= ~_is_for_libjpeg(crops[0])
    is_used: list[bool] = np.asarray(is_for_kernel.any(axis=1)).tolist()
    contents = [
        picture.content if used and isinstance(picture, JpegPicture) else b""
        for picture, used in zip(pictures, is_used, strict=True)
    ]
    if not any(is_used):
        return is_rendered
    records = np.stack([as_records(crop.plan) for crop in crops], axis=1)
    records["height"][~is_for_kernel] = 0
    # Sorted by how much of an untiled file must be read, so that images decoded side by side take equally long.
    bottom = np.max([crop.plan.box[:, 0] + crop.plan.box[:, 2] for crop in crops], axis=0)
    order = np.argsort(bottom / [picture.size[0] for picture in pictures] * [len(content) for content in contents])
    turns = np.array([_encode_turn(picture) for picture in pictures])
    flat = rows[0] if len(rows) == 1 else [pixels for of_image in zip(*rows, strict=True) for pixels in of_image]
    is_done = kernel.decode(contents, records.reshape(-1), order, flat, turns)
    return is_for_kernel & is_done[:, np.newaxis]


def _find_suitable(crop: PlannedCrop, pictures: Sequence[Picture], rows: Rows) -> NDArray[np.bool_]:
    """Return which images of a crop the kernel may render together with the first crop's pictures, bool [n]."""
    is_suitable = ~_is_for_libraries(crop.plan)
    is_suitable &= [
        isinstance(picture, JpegPicture) and picture is first
        for picture, first in zip(crop.pictures, pictures, strict=True)
    ]
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        return is_suitable
    is_suitable &= [pixels.flags.c_contiguous for pixels in rows]
    return is_suitable


def _is_for_libjpeg(crop: PlannedCrop) -> NDArray[np.bool_]:
    """Return which images are decoded faster by libjpeg-turbo: whole ones that are neither tiled nor resized, bool [n].

    The kernel saves time on what a crop leaves out, and on resizing what is still in the processor's caches.
    """
    sizes = sizes_of(crop.pictures)
    is_whole: NDArray[np.bool_] = (
        (crop.plan.size == sizes) & (crop.plan.box[:, 2:] == sizes) & (crop.plan.output_size == sizes)
    ).all(axis=1)
    for row in np.flatnonzero(is_whole).tolist():
        picture = crop.pictures[row]
        is_whole[row] = isinstance(picture, JpegPicture) and not has_tiles(picture.content)
    return is_whole


def _is_for_libraries(plan: CropPlan) -> NDArray[np.bool_]:
    """Return which images the kernel must leave to the libraries, whatever their files are, bool [n].

    :func:`shardio.images.rendering.prepare_render` renders some from a smaller inverse DCT, and refuses others.
    """
    is_huge = plan.size.prod(axis=1) > MAX_RESIZED_PIXELS
    return np.asarray(is_huge | plan.is_halved & is_too_large_to_average(plan.box[:, 2:].prod(axis=1)))


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
    averaged = RESAMPLINGS["antialiased bilinear"]
    records["resampling"] = np.where(plan.is_halved, averaged, RESAMPLINGS[plan.resampling])
    return records
