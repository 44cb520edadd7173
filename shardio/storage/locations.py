"""Parse users' paths and URLs. This is the only module that chooses a store."""

from __future__ import annotations

import os

from shardio.storage.local import LocalStore
from shardio.storage.paths import absolute_path, find_url, make_path
from shardio.storage.store import Location


def parse_location(name: str | os.PathLike[str]) -> Location:
    """Return the location that a path or URL names. It stays valid when the working directory changes.

    Raises:
        FileNotFoundError: If the name is a URL, or a relative path while the working directory does not exist.
        ValueError: If the name is empty or contains a NUL character.
    """
    path = make_path(name)
    if (url := find_url(name)) is not None and not path.exists():
        raise FileNotFoundError(f"URLs are not supported yet, got {url}: download the data and pass its directory")
    return Location(store=LocalStore(), key=absolute_path(path).as_posix())
