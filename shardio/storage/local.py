"""Local files: positioned reads, and writes that are finished or not there at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardio.sample import ByteRange

PARTIAL_SUFFIX = ".partial"
"""How the hidden files end that hold what is not finished."""


class LocalFile:
    """A file that is open for positioned reads. Safe to share between threads and across a fork."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, where: ByteRange) -> bytes:
        """Return the bytes of ``where``.

        Raises:
            EOFError: If the file ends before ``where.stop``.
        """
        assert self._descriptor is not None, f"{self.path} is closed"
        content = os.pread(self._descriptor, where.size, where.start)
        while len(content) < where.size:  # One read of Linux returns 2 GiB at the most.
            more = os.pread(self._descriptor, where.size - len(content), where.start + len(content))
            if not more:
                raise EOFError(
                    f"{self.path} ends at byte {where.start + len(content)}, but bytes "
                    f"{where.start} to {where.stop} were asked for: the file is truncated"
                )
            content += more
        return content

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def temporary_path(path: Path) -> Path:
    """Return a name under which to write ``path``: hidden, beside it, unlike any other writer's."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing so that it appears whole or not at all.

    The content goes to a temporary file beside ``path``, is synced to disk and renamed at the end. If the
    block raises, the temporary file is removed and ``path`` is left as it was.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk_files(directory: Path, _holders: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield all files below a directory in sorted order; hidden ones and hidden directories are skipped.

    Symbolic links are followed.

    Raises:
        OSError: If a directory cannot be read, or a link leads back to a directory that holds it.
    """
    here = directory.resolve()
    if here in _holders:
        raise OSError(f"{directory} is a symbolic link to a directory that holds it: remove the link")
    with os.scandir(directory) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in found:
        path = directory / entry.name
        if entry.is_dir():
            yield from walk_files(path, (*_holders, here))
        elif entry.is_file() or (entry.is_symlink() and not path.exists()):
            yield path
