"""Lock a directory while shards are written to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from shardio.errors import PackError

LOCK_NAME = ".shardio-pack.lock"


@contextmanager
def locked_folder(folder: Path, lock_name: str = LOCK_NAME) -> Iterator[None]:
    """Create a directory, and lock it for this process. If it is new and stays empty, remove it afterwards.

    Raises:
        PackError: If it cannot be created or written, or another process has locked it.
    """
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / lock_name, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise PackError(
            f"another process is writing to {folder}: wait until it has finished, or choose another directory"
        ) from error
    except OSError as error:
        raise PackError(
            f"cannot write to the directory {folder}: {error.strerror or error}. Choose another directory"
        ) from error
    try:
        yield
    finally:
        (folder / lock_name).unlink(missing_ok=True)
        lock.release()
        if not existed:
            with suppress(OSError):  # It is not empty.
                folder.rmdir()
