"""Give an object a second name: by a hard link where possible, otherwise by a copy."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

from shardio.storage.local import LocalStore
from shardio.storage.store import Location
from shardio.storage.streaming import read_pieces

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems that cannot link the two names, although a copy may be possible."""


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
