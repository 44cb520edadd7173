"""Verify a dataset: its files and, on request, whether its images can be decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.images import IMAGE_FORMATS, decode_image, decode_unconverted, holds_images
from shardio.process import let_through
from shardio.values import check_optional_integer

if TYPE_CHECKING:
    from shardio.shards import DatasetSource, Problem
    from shardio.storage import StorageOptions


def verify(
    source: DatasetSource,
    *,
    deep: bool = False,
    num_workers: int | None = None,
    storage_options: StorageOptions | None = None,
) -> list[Problem]:
    """Compare a dataset's manifest, indexes and tars, and return all problems. Nothing is written.

    Each tar is read once: its size and digest, each member's header and each content's hash are compared with its
    index. The result also names keys that occur twice, tars that the manifest lacks, and unfinished packs.

    >>> problems = shardio.verify("out")  # doctest: +SKIP
    >>> for problem in problems:  # doctest: +SKIP
    ...     print(problem.kind, problem)

    Args:
        source: A packed directory, a manifest, a tar, a pattern of tars, a directory of tars, or a list of tars. Tars
            need indexes: create missing ones with ``shardio index``.
        deep: Whether to also decode every image.
        num_workers: The number of shards to read at a time; by default, up to 4.
        storage_options: Settings of the store of a remote source, as for :class:`shardio.ShardDataset`.

    Returns:
        The problems; an empty list if there are none.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
        ValueError: If ``num_workers`` is not positive, or a storage option is invalid.
    """
    # Not at the top, so that worker processes, which import this folder, start faster.
    from shardio.shards import find_problems
    from shardio.storage import make_direct_access

    num_workers = check_optional_integer("num_workers", num_workers, at_least=1)
    access = make_direct_access(storage_options)
    check_content = check_image if deep else None
    return list(find_problems(source, access, check_content=check_content, num_workers=num_workers))


def check_image(field: str, content: bytes) -> str | None:
    """Return the reason why an image cannot be decoded; None if it can, or if the field does not hold images."""
    if not holds_images(field):
        return None
    # A mask's values are read as they are stored: conversion to RGB may be impossible.
    decode = decode_image if field in IMAGE_FORMATS else decode_unconverted
    try:
        decode(content)
    except ValueError as error:
        let_through(error)
        return f"the image cannot be decoded: {error}"
    return None
