"""Parse users' paths and URLs. This is the only module that chooses a store."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

from shardio.errors import LocationError
from shardio.storage.local import LocalStore
from shardio.storage.options import RemoteAccess
from shardio.storage.store import Location, absolute_path, find_url, make_path, read_pieces

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems that cannot link the two names, although a copy may be possible."""


def parse_location(name: str | os.PathLike[str], access: RemoteAccess | None = None) -> Location:
    """Return the location that a path or URL names. It stays valid when the working directory changes.

    Args:
        name: A path, or a URL of an object store or an HTTP server.
        access: The access to remote data; by default, the settings of the environment, without a cache.

    Raises:
        FileNotFoundError: If the name is a relative path and the working directory does not exist.
        LocationError: If the URL is invalid or not supported.
        ValueError: If the name is empty or contains a NUL character.
    """
    path = make_path(name)
    if (url := find_url(name)) is not None and not path.exists():
        # Imported here, because local commands need none of it.
        from shardio.storage.cache.cached import CachedStore
        from shardio.storage.remote.messages import split_url
        from shardio.storage.remote.object_store import ObjectStore

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


def link_or_copy(source: Location, target: Location, *, copy: bool = False) -> bool:
    """Make ``target`` an object with the content of ``source``. It appears whole or not at all.

    Args:
        source: An object that is never changed in place.
        target: A new object.
        copy: Whether to copy even if a link is possible.

    Returns:
        Whether it is a hard link.

    Raises:
        FileExistsError: If ``target`` exists and would be linked.
        OSError: If the source cannot be read, or the target cannot be written.
    """
    if not copy and isinstance(source.store, LocalStore) and isinstance(target.store, LocalStore):
        Path(target.key).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.resolve(), target.key)  # Resolved, because some systems link symbolic links themselves.
            return True
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
    with closing(source.open()) as file, target.write_whole() as copied:
        for piece in read_pieces(file):
            copied.write(piece)
    return False
