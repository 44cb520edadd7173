"""From the name that a user gives to a location: the only place that chooses a store."""

from __future__ import annotations

import os

from shardio.storage.local import LocalStore
from shardio.storage.paths import absolute_path, find_url, make_path
from shardio.storage.store import Location


def parse_location(name: str | os.PathLike[str]) -> Location:
    """Return the location that a path or URL names. It stays right when the working directory changes.

    Raises:
        FileNotFoundError: If it is a URL, or a relative path while there is no working directory.
        ValueError: If it is empty, or holds a NUL.
    """
    path = make_path(name)
    if (url := find_url(name)) is not None and not path.exists():
        raise FileNotFoundError(f"URLs are not read yet, got {url}: download the data first, then pass its directory")
    return Location(store=LocalStore(), key=absolute_path(path).as_posix())
