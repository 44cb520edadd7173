"""Parse users' paths and URLs. This is the only module that chooses a store."""

from __future__ import annotations

import os

from shardio.errors import LocationError
from shardio.storage.access import RemoteAccess
from shardio.storage.local import LocalStore
from shardio.storage.paths import absolute_path, find_url, make_path
from shardio.storage.store import Location


def parse_location(name: str | os.PathLike[str], access: RemoteAccess | None = None) -> Location:
    """Return the location that a path or URL names. It stays valid when the working directory changes.

    Args:
        name: A path, or a URL of an object store or an HTTP server.
        access: How remote data is reached; by default, with the settings of the environment and without a cache.

    Raises:
        FileNotFoundError: If the name is a relative path and the working directory does not exist.
        LocationError: If the URL is invalid or not supported.
        ValueError: If the name is empty or contains a NUL character.
    """
    path = make_path(name)
    if (url := find_url(name)) is not None and not path.exists():
        # Imported here, because local commands need none of it.
        from shardio.storage.cache.cached_store import CachedStore
        from shardio.storage.remote.object_store import ObjectStore
        from shardio.storage.remote.urls import split_url

        access = access or RemoteAccess()
        root, key = split_url(url)
        store = ObjectStore(root=root, options=access.options)
        return Location(store=store if access.cache is None else CachedStore(inner=store, cache=access.cache), key=key)
    if os.fspath(name).startswith("pipe:") and not path.exists():
        raise LocationError(
            "a pipe: is the output of a command, which can only be read forwards: read it with shardio.StreamDataset, "
            "or write the output to a file and name that"
        )
    return Location(store=LocalStore(), key=absolute_path(path).as_posix())
