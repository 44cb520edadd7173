"""Collect the tiles that image crops need, for a device to decode. Tiles take far less memory than pixels.

A device decodes JPEGs that have a tile table. All other images are decoded here, and so are images whose pixels are
edited afterward; the chunk holds their pixels instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.crop_plan import PlannedCrop
from shardio.images.opening import JpegPicture
from shardio.images.pictures import DecoderName, Picture, Pixels
from shardio.images.rendering import (
    DecodeError,
    as_records,
    encode_turn,
    find_content,
    find_suitable,
    operations_of,
    render_crops,
)
from shardio.kernel import find_kernel
from shardio.kernel.functions import CHUNK_ALIGNMENT, count_chunk_bytes
from shardio.kernel.records import CHUNK_PADDING, LOCATION, LOOKUP_BITS, MAX_TILED_TABLES, TILED_IMAGE

MAX_GROUP = 1 << 15
"""The maximum number of images that a device decodes together: CUDA limits the size of a grid."""

NUM_LOOKUPS = MAX_TILED_TABLES << LOOKUP_BITS
"""The length of an image's part of BATCH.lookups."""


class TiledChunk(NamedTuple):
    """The tiles of some images in a batch.

    Attributes:
        num_images: n.
        sizes: The height and width of each crop, which are the same for all images.
        num_bytes: The number of bytes used.
        memory: uint8 [num_bytes or more], described in kernel/tiles.h; None if a buffer holds it.
    """

    num_images: int
    sizes: tuple[tuple[int, int], ...]
    num_bytes: int
    memory: NDArray[np.uint8] | None


def collect_tiles(
    crops: Sequence[PlannedCrop], memory: NDArray[np.uint8] | None = None
) -> tuple[TiledChunk, list[DecoderName]] | None:
    """Collect the tiles of images, and render the crops of images that a device cannot decode.

    Args:
        crops: The crops of n images, at least one for each image.
        memory: uint8 [...] to write to, aligned to CHUNK_ALIGNMENT bytes. If None or too small, new memory is used.

    Returns:
        The chunk, and the decoder of each image; None if the crops of the images differ in size, or if there is no
        kernel.

    Raises:
        DecodeError: If an image that is rendered here is truncated or damaged, or would be too large when resized.
    """
    pictures, kernel = crops[0].pictures, find_kernel()
    sizes = tuple(tuple(crop.plan.output_size[0].tolist()) for crop in crops)
    if kernel is None or any((crop.plan.output_size != size).any() for crop, size in zip(crops, sizes, strict=True)):
        return None
    num_needed = count_chunk_bytes(len(pictures), sizes)
    target = memory if memory is not None and len(memory) >= num_needed else _allocate(num_needed)
    is_for_device = np.logical_and.reduce([_find_tileable(crop, pictures) for crop in crops])
    contents = [
        find_content(picture) if suitable else b""
        for picture, suitable in zip(pictures, is_for_device.tolist(), strict=True)
    ]
    plans = np.stack([as_records(crop.plan) for crop in crops], axis=1).reshape(-1)
    turns = np.array([encode_turn(picture) for picture in pictures], np.uint8)
    is_tiled, num_bytes = kernel.collect(contents, plans, sizes, target, turns)
    names: list[DecoderName] = ["device"] * len(pictures)
    if others := np.flatnonzero(~is_tiled).tolist():
        num_bytes = _render_others(crops, others, sizes, target, num_bytes, names)
    num_bytes += CHUNK_PADDING
    return TiledChunk(len(pictures), sizes, num_bytes, None if target is memory else target), names


def _render_others(
    crops: Sequence[PlannedCrop],
    others: list[int],
    sizes: Sequence[tuple[int, int]],
    memory: NDArray[np.uint8],
    num_bytes: int,
    names: list[DecoderName],
) -> int:
    """Render crops of images without tiles into a chunk, after its used bytes. Return the new number of bytes used."""
    images = memory[: len(names) * TILED_IMAGE.itemsize].view(TILED_IMAGE)
    rows = list[list[Pixels]]([] for _ in crops)
    for index in others:
        images["pixels"][index] = num_bytes
        for row, (height, width) in zip(rows, sizes, strict=True):
            start, num_bytes = num_bytes, num_bytes + 3 * height * width
            row.append(memory[start:num_bytes].reshape(height, width, 3))
    rest = [PlannedCrop([crop.pictures[i] for i in others], crop.plan.take(np.array(others))) for crop in crops]
    try:
        rendered = render_crops(rest, rows)
    except DecodeError as error:
        raise DecodeError(others[error.row], str(error)) from error
    for index, name in zip(others, rendered[0].decoder_names, strict=True):
        names[index] = name
    return num_bytes


class TiledLayout(NamedTuple):
    """The memory and the threads that a device needs to decode some images.

    Attributes:
        locations: LOCATION [n].
        lengths: The number of bytes of each array that the stages share.
        most: The maximum number of threads for an image in each stage except the last.
    """

    locations: NDArray[np.void]
    lengths: dict[str, int]
    most: list[int]


COUNTED = ["num_blocks", "num_rows", "num_columns", "num_tiles", "num_samples", "num_weights", "upright"]
"""The fields of a TILED_IMAGE that :func:`lay_out` needs."""

_ARRAYS = {"coefficients": ("block", 128), "samples": ("sample", 1), "colors": ("color", 4), "weights": ("weight", 8)}
"""The arrays of a BATCH whose parts differ in length: for each, its LOCATION field, and an element's size in bytes."""

_LOOKUP_BYTES = 2 * NUM_LOOKUPS
"""The number of bytes of an image's part of BATCH.lookups."""


def locate(chunks: Sequence[tuple[int, int, int]]) -> NDArray[np.void]:
    """Return the places of images in chunks on a device, LOCATION [n].

    Args:
        chunks: The address of each chunk on the device, its size in bytes, and the number of its images.
    """
    addresses, lengths, counts = zip(*chunks, strict=True)
    locations = np.zeros(sum(counts), LOCATION)
    locations["chunk"], locations["num_bytes"] = np.repeat(addresses, counts), np.repeat(lengths, counts)
    locations["index"] = np.concatenate([np.arange(count) for count in counts])
    return locations


def lay_out(images: NDArray[np.void], locations: NDArray[np.void], sizes: Sequence[tuple[int, int]]) -> TiledLayout:
    """Lay out the memory in which a device decodes some images.

    Args:
        images: The fields COUNTED of TILED_IMAGE [n].
        locations: LOCATION [n], as :func:`locate` returns them.
        sizes: The height and width of each crop.
    """
    locations, lengths, counts = locations.copy(), {"lookups": _LOOKUP_BYTES * len(images)}, _count_elements(images)
    for array, (place, num_bytes) in _ARRAYS.items():
        stops = np.cumsum(counts[place])
        locations[place], lengths[array] = stops - counts[place], num_bytes * int(stops[-1])
    most = [int(each.max()) for each in (images["num_tiles"], counts["block"], counts["color"])]
    return TiledLayout(locations, lengths, [NUM_LOOKUPS, sum(map(sum, sizes)), *most])


def divide_images(images: NDArray[np.void], max_bytes: int) -> list[slice]:
    """Divide images into groups: each has arrays of at most ``max_bytes``, or a single image.

    Args:
        images: The fields COUNTED of TILED_IMAGE [n].
        max_bytes: The maximum size of a group's arrays in bytes.
    """
    counts = _count_elements(images)
    stops = np.cumsum(_LOOKUP_BYTES + sum(num_bytes * counts[place] for place, num_bytes in _ARRAYS.values()))
    groups, start = list[slice](), 0
    while start < len(images):
        before = int(stops[start - 1]) if start else 0
        stop = max(int(np.searchsorted(stops, before + max_bytes, side="right")), start + 1)
        groups.append(slice(start, min(stop, start + MAX_GROUP)))
        start = groups[-1].stop
    return groups


def _count_elements(images: NDArray[np.void]) -> dict[str, NDArray[np.int64]]:
    """Return the length of each image's part of each array, int64 [n], keyed by the fields of a LOCATION."""
    return {
        "block": images["num_blocks"].astype(np.int64) * images["num_rows"] * images["num_columns"],
        "sample": images["num_samples"],
        "color": images["upright"][:, 2] * images["upright"][:, 3],
        "weight": images["num_weights"],
    }


def _find_tileable(crop: PlannedCrop, pictures: Sequence[Picture]) -> NDArray[np.bool_]:
    """Return whether a device can render each image's crop, bool [n]."""
    is_tileable = find_suitable(crop, pictures)
    is_tileable &= [isinstance(each, JpegPicture) and each.kept is None for each in crop.pictures]
    if (operations := operations_of(crop.plan)) is not None:
        is_tileable &= ~operations["code"].any(axis=1)
    return is_tileable


def _allocate(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(num_bytes + CHUNK_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % CHUNK_ALIGNMENT
    return memory[start : start + num_bytes]
