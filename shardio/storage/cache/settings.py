"""Where remote data is cached, and how much of it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardio.storage.paths import absolute_path, find_url, make_path
from shardio.values import parse_size

MAX_PRIVATE = 32 * 2**30
"""The largest default size of a private cache, in bytes."""

SHARE_OF_DISK = 5
"""By default, a private cache takes at most the free space divided by this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The settings of a cache.

    Attributes:
        folder: Its folder. None is a private cache, which the storage process removes when it ends.
        max_bytes: Its size in bytes; None for a share of the free space.
    """

    folder: str | None = None
    max_bytes: int | None = None


def make_settings(cache: str | os.PathLike[str] | None, cache_size: str | int | None) -> CacheSettings:
    """Check what a user sets.

    Args:
        cache: A local folder that processes and jobs share; None for a private one, which is removed at the end.
        cache_size: Its size, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB if the cache
            is private.

    Raises:
        TypeError: If ``cache_size`` is neither a string nor an integer.
        ValueError: If the folder is a URL, or the size is invalid.
    """
    if cache is not None and (url := find_url(cache)) is not None:
        raise ValueError(f"cache must be a local folder, got {url}")
    return CacheSettings(
        folder=None if cache is None else str(absolute_path(make_path(cache))),
        max_bytes=None if cache_size is None else parse_size("cache_size", cache_size),
    )


def choose_size(settings: CacheSettings, folder: Path) -> int:
    """Return the size in bytes of a cache in a folder, which exists."""
    if settings.max_bytes is not None:
        return settings.max_bytes
    share = shutil.disk_usage(folder).free // SHARE_OF_DISK
    return min(share, MAX_PRIVATE) if settings.folder is None else share
