"""How remote data is reached."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardio.storage.cache.settings import CacheSettings, make_settings
from shardio.storage.remote.options import RemoteOptions, StorageOptions, make_options


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAccess:
    """How remote data is reached. It has no effect on local files.

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
    """Check what a user sets, see :func:`make_options` and :func:`make_settings`. There is a cache in any case.

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
