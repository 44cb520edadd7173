"""Atomic writes to local files: a file appears whole, synced to disk, or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".partial"
"""The suffix of the hidden files that hold unfinished content."""

_UNFINISHED = re.compile(rf"\.(?P<target>.+)\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}", re.DOTALL)


@contextmanager
def write_whole(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a file for writing so that it appears whole or not at all.

    The content goes to a hidden file in the same directory, which is synced to disk and renamed at the end. If the
    block raises, the hidden file is removed and ``path`` stays as it was.

    Args:
        path: The file to write.
        mode: Its permissions, regardless of the umask; by default, those of any new file.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full. The error names ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        with naming(path):
            with os.fdopen(_create(temporary, mode), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
    except BaseException:  # Ctrl-C must not leave a partial file either.
        temporary.unlink(missing_ok=True)
        raise


def create_whole(path: Path, content: bytes) -> bool:
    """Write a file if none exists; it appears whole. Return whether it was written.

    Raises:
        OSError: If the file cannot be written, or the file system has no hard links.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        with write_whole(temporary) as file:
            file.write(content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def find_target(name: str) -> str | None:
    """Return the name that an unfinished file gets when it is whole; None if ``name`` is not that of such a file."""
    found = _UNFINISHED.fullmatch(name)
    return None if found is None else found["target"]


def remove_unfinished(directory: Path, targets: Container[str] | None = None) -> None:
    """Remove what a killed process left in a directory that no other process writes to.

    Args:
        directory: The directory.
        targets: The names of the files whose unfinished versions are removed; None for any.
    """
    for path in directory.iterdir():
        target = find_target(path.name)
        if target is not None and (targets is None or target in targets):
            path.unlink()


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add the name of a file or an object to an OSError that does not name it, such as one from a write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None and str(path) not in str(error):
            error.filename = str(path)
        raise


def _create(path: Path, mode: int | None) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return descriptor


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some file systems cannot sync directories.
            raise
    finally:
        os.close(descriptor)
