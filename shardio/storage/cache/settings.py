"""Where remote data is cached, and how much of it."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import StoreError
from shardio.storage.cache.budget import COPY_SUFFIX, LOCK_NAME
from shardio.storage.paths import absolute_path, find_url, make_path
from shardio.trust import describe_owner, is_trusted
from shardio.values import check_flag, parse_size

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
        is_shared: Whether copies that other users wrote are believed, and may be changed by them.
    """

    folder: str | None = None
    max_bytes: int | None = None
    is_shared: bool = False


def make_settings(
    cache: str | os.PathLike[str] | None, cache_size: str | int | None, cache_shared: bool = False
) -> CacheSettings:
    """Check what a user sets.

    Args:
        cache: A local folder that processes and jobs share; None for a private one, which is removed at the end.
        cache_size: Its size, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB if the cache
            is private.
        cache_shared: Whether other users may write to the folder, and their copies are believed.

    Raises:
        TypeError: If ``cache_size`` is neither a string nor an integer, or ``cache_shared`` is no boolean.
        ValueError: If the folder is a URL, the size is invalid, or a private cache is to be shared.
    """
    is_shared = check_flag("cache_shared", cache_shared)
    if is_shared and cache is None:
        raise ValueError("cache_shared=True needs cache: the folder that users share")
    if cache is not None and (url := find_url(cache)) is not None:
        raise ValueError(f"cache must be a local folder, got {url}")
    return CacheSettings(
        folder=None if cache is None else str(absolute_path(make_path(cache))),
        max_bytes=None if cache_size is None else parse_size("cache_size", cache_size),
        is_shared=is_shared,
    )


def find_cache_folder(settings: CacheSettings, folder: Path) -> Path:
    """Return a cache's folder. Where all users may create files, as in /tmp, it is a folder of this user's own."""
    with suppress(FileNotFoundError):
        is_for_all = folder.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH) == stat.S_ISVTX | stat.S_IWOTH
        if is_for_all and not settings.is_shared:
            return folder / f"shardio-{os.geteuid()}"
    return folder


def make_cache_folder(settings: CacheSettings, folder: Path) -> None:
    """Create a cache's folder, to which only this user may write, or check one that exists.

    Other users lose write access to an existing folder if it belongs to this user and holds only a cache.

    Raises:
        StoreError: If users other than this one and root may write to it, and the cache is not shared.
        OSError: If it cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if settings.is_shared or is_trusted(status):
        return
    if status.st_uid == os.geteuid() and all(map(_is_of_cache, folder.iterdir())):
        folder.chmod(stat.S_IMODE(status.st_mode) & 0o755)  # As it is by default where new folders are a group's.
    else:
        raise StoreError(
            f"the cache {folder} {describe_owner(status)}: users other than this one can put data into it, which would "
            "be read as yours. Name a folder of your own, take write access from the others (chmod go-w), or, if you "
            "trust all who can write to it, set cache_shared=True (--cache-shared)"
        )


def _is_of_cache(path: Path) -> bool:
    return path.name.endswith(COPY_SUFFIX) or path.name.startswith(LOCK_NAME)


def find_file_mode(settings: CacheSettings, folder: Path) -> int:
    """Return the permissions of the files in a cache's folder, which exists."""
    return folder.stat().st_mode & 0o666 if settings.is_shared else 0o600


def choose_size(settings: CacheSettings, folder: Path) -> int:
    """Return the size in bytes of a cache in a folder, which exists."""
    if settings.max_bytes is not None:
        return settings.max_bytes
    share = shutil.disk_usage(folder).free // SHARE_OF_DISK
    return min(share, MAX_PRIVATE) if settings.folder is None else share
