"""Users' settings for remote data: the access to stores, and the cache with its folder and its budget of space."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardio.errors import StoreError
from shardio.files import WorkLock, describe_owner, is_trusted
from shardio.storage.store import absolute_path, find_url, make_path
from shardio.values import check_flag, check_integer, check_seconds, parse_size

StorageOptions = Mapping[str, str | int | float | bool]
"""``storage_options`` as users pass it: see :class:`RemoteOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The settings of a remote store. They can be compared, hashed and pickled.

    Attributes:
        retries: The number of times that a failed request is repeated.
        timeout_s: The longest time in seconds without any progress, after which a request counts as failed.
        deadline_s: The time in seconds after which a request that keeps failing is not repeated any more.
        max_requests: The maximum number of requests that a run's storage process makes at a time to one store.
        config: The other options, sorted by name: those of the backend, such as ``endpoint`` or ``region``. They may
            contain credentials, so they are not shown.
    """

    retries: int = 20
    timeout_s: float = 10.0
    deadline_s: float = 300.0
    max_requests: int = 64
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def make_options(storage_options: StorageOptions | None) -> RemoteOptions:
    """Check a user's ``storage_options``.

    Raises:
        TypeError: If it is not a mapping, or a value has the wrong type.
        ValueError: If a value is out of range.
    """
    if storage_options is None:
        return RemoteOptions()
    if not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options must be a dict, got {type(storage_options).__name__}")
    checked: dict[str, Any] = {}
    for name, value in storage_options.items():
        if name in _CHECKS:
            checked[name] = _CHECKS[name](f"storage_options[{name!r}]", value)
    config = {name.lower(): _write_value(name, value) for name, value in storage_options.items() if name not in _CHECKS}
    return RemoteOptions(config=tuple(sorted(config.items())), **checked)


def _check_count(name: str, value: Any, *, at_least: int = 1) -> int:
    return check_integer(name, value, at_least=at_least, below=1000)


def _write_value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    # The value is not shown, because it may be a credential.
    raise TypeError(f"storage_options[{name!r}] must be a string, a number or a boolean, got {type(value).__name__}")


_CHECKS: dict[str, Callable[[str, Any], int | float]] = {
    "retries": partial(_check_count, at_least=0),
    "max_requests": _check_count,
    "timeout_s": check_seconds,
    "deadline_s": check_seconds,
}
"""The options that shardio handles itself, with the functions that check them."""


COPY_SUFFIX = ".copy"
"""The suffix of the files that hold copies. Only they are removed from the folder."""

LOCK_NAME = ".lock"
"""The name of the lock that a process holds while it removes copies."""

GRANTS = 256
"""The divisor of the cache's size that gives the size of a grant. A process reserves space in grants, because each
reservation scans the folder."""

SLACK = 16
"""The number of grants that all processes together may have reserved and not yet used when copies are removed."""

PATIENCE_S = 10.0
"""The time in seconds to wait for another process that makes room. After it, a little too much may be removed."""

MAX_GRANT = 64 * 2**20
"""The largest grant in bytes."""


class Budget:
    """The space in a cache's folder that this process may use. Threads share it.

    Args:
        folder: The folder.
        max_bytes: The cache's size in bytes.
        file_mode: The permissions of its files.
    """

    def __init__(self, folder: Path, max_bytes: int, file_mode: int = 0o600) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._room_lock = WorkLock(folder / LOCK_NAME, PATIENCE_S, file_mode)
        self._grant = max(1, min(max_bytes // GRANTS, MAX_GRANT))
        self._lock = threading.Lock()
        self._reserved = 0

    def reserve(self, num_bytes: int, in_use: str) -> None:
        """Reserve space for bytes that are about to be written. Remove copies if there is not enough.

        Args:
            num_bytes: The number of bytes.
            in_use: The path of the copy that grows, which is removed last.
        """
        with self._lock:
            if self._reserved < num_bytes:
                wanted = max(num_bytes - self._reserved, self._grant)
                with self._room_lock.held():
                    self._make_room(wanted, in_use)
                self._reserved += wanted
            self._reserved -= num_bytes

    def _make_room(self, num_bytes: int, in_use: str) -> None:
        copies = _list_copies(self.folder)
        used = sum(size for _, size, _ in copies)
        if used + num_bytes <= self.max_bytes - SLACK * self._grant:
            return
        # A little more is removed than necessary, so that not every grant removes copies.
        limit = self.max_bytes - 2 * SLACK * self._grant - num_bytes
        for _, size, path in sorted(copies):
            if used <= limit:
                return
            if path != in_use:
                with suppress(PermissionError):  # In some shared folders, users may remove only their own files.
                    with suppress(FileNotFoundError):
                        os.unlink(path)  # noqa: PTH108  # Many are removed, and a Path costs as much as the call.
                    used -= size


def _list_copies(folder: Path) -> list[tuple[int, int, str]]:
    """Return when each copy was last used, in nanoseconds, the space that it takes in bytes, and its path."""
    found = list[tuple[int, int, str]]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(COPY_SUFFIX):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_blocks * 512, entry.path))
    return found


MAX_PRIVATE = 32 * 2**30
"""The largest default size of a private cache, in bytes."""

SHARE_OF_DISK = 5
"""The divisor of the free space that gives the default size of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The settings of a cache.

    Attributes:
        folder: Its folder; None for a private cache, which the storage process removes when it ends.
        max_bytes: Its size in bytes; None for a share of the free space.
        is_shared: Whether to trust copies that other users wrote and may change.
    """

    folder: str | None = None
    max_bytes: int | None = None
    is_shared: bool = False


def make_settings(
    cache: str | os.PathLike[str] | None, cache_size: str | int | None, cache_shared: bool = False
) -> CacheSettings:
    """Check a user's settings of a cache.

    Args:
        cache: A local folder that processes and jobs share; None for a private one, which is removed at the end.
        cache_size: Its size, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB if the cache
            is private.
        cache_shared: Whether other users may write to the folder, and their copies are trusted.

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
    """Return a cache's folder. If all users may create files in it, as in /tmp, return this user's folder there."""
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
        folder.chmod(stat.S_IMODE(status.st_mode) & 0o755)  # By default, some systems let a group write to new folders.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAccess:
    """The access to remote data. It has no effect on local files.

    Attributes:
        options: The settings of the stores.
        cache: The cache through which objects are read; None for none.
    """

    options: RemoteOptions = field(default_factory=RemoteOptions)
    cache: CacheSettings | None = None


def make_access(
    storage_options: StorageOptions | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: str | int | None = None,
    cache_shared: bool = False,
) -> RemoteAccess:
    """Check a user's settings, as :func:`make_options` and :func:`make_settings` do. The access always has a cache.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range.
    """
    return RemoteAccess(options=make_options(storage_options), cache=make_settings(cache, cache_size, cache_shared))


def make_direct_access(storage_options: StorageOptions | None = None) -> RemoteAccess:
    """Check a user's settings of a store that is used without a cache, such as one that is written to.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range.
    """
    return RemoteAccess(options=make_options(storage_options))
