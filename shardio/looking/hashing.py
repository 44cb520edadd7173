"""The hashes of a source's images: of their bytes, and of what they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.interruptions import let_through
from shardio.looking.images import ImageColumns
from shardio.looking.perceptual import hash_pictures, reduce_picture
from shardio.looking.small_images import map_images
from shardio.looking.source import ImageSource, Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHashes:
    """The hashes of the images of n samples. A hash is known where the array with its name and ``has_`` is set.

    Attributes:
        content: The xxh3-64 of each image's bytes, uint64 [n].
        perceptual: The perceptual hash of each image, uint64 [n].
        has_content: bool [n].
        has_perceptual: bool [n].
        unreadable: The images that cannot be read or decoded: the samples' indices, and why.
        even: The indices of the samples whose images have too little contrast for a perceptual hash.
    """

    content: NDArray[np.uint64]
    perceptual: NDArray[np.uint64]
    has_content: NDArray[np.bool_]
    has_perceptual: NDArray[np.bool_]
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    even: list[int] = field(default_factory=list)


def hash_images(
    source: ImageSource,
    columns: ImageColumns,
    indices: NDArray[np.int64],
    *,
    is_perceptual: bool,
    advance: Callable[[int], object],
) -> ImageHashes:
    """Hash the images of some samples.

    Args:
        source: Where the images are.
        columns: Its columns. If they have hashes of the bytes, these are used.
        indices: The samples whose images to read.
        is_perceptual: Whether to decode the images.
        advance: Called with the number of images that were read since the last call.
    """
    num_samples = len(columns.sizes)
    content, has_content = np.zeros(num_samples, np.uint64), np.zeros(num_samples, np.bool_)
    if columns.content_hashes is not None:
        content[:], has_content[:] = columns.content_hashes, columns.sizes >= 0
    hashes = ImageHashes(
        content=content,
        perceptual=np.zeros(num_samples, np.uint64),
        has_content=has_content,
        has_perceptual=np.zeros(num_samples, np.bool_),
    )
    for chunk, results in map_images(source, indices, _reduce_image if is_perceptual else _hash_bytes):
        _add(hashes, chunk.tolist(), results)
        advance(len(chunk))
    return hashes


_Reduced = tuple[int, NDArray[np.float32] | Unreadable | None]
"""The hash of an image's bytes; and the reduced picture, or why there is none. None if none is needed."""


def _hash_bytes(content: bytes) -> _Reduced:
    return xxhash.xxh3_64_intdigest(content), None


def _reduce_image(content: bytes) -> _Reduced:
    """Hash an image's bytes and reduce the picture. The bytes of a damaged image are compared all the same."""
    picture: NDArray[np.float32] | Unreadable
    try:
        picture = reduce_picture(content)
    except ValueError as error:
        let_through(error)
        picture = Unreadable(reason=str(error))
    return xxhash.xxh3_64_intdigest(content), picture


def _add(hashes: ImageHashes, indices: list[int], results: list[_Reduced | Unreadable]) -> None:
    """Add the results of some images."""
    rows, pictures = list[int](), list[NDArray[np.float32]]()
    for index, result in zip(indices, results, strict=True):
        picture: NDArray[np.float32] | Unreadable | None
        if isinstance(result, Unreadable):
            picture = result
        else:
            hashes.content[index], picture = result
            hashes.has_content[index] = True
        if isinstance(picture, Unreadable):
            hashes.unreadable.append((index, picture.reason))
        elif picture is not None:
            rows.append(index)
            pictures.append(picture)
    if rows:
        hashes.perceptual[rows], has_contrast = hash_pictures(np.stack(pictures))
        hashes.has_perceptual[rows] = has_contrast
        hashes.even.extend(np.array(rows)[~has_contrast].tolist())
