"""The local file system as a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardio.storage.local_file import LocalFile, refuse_other_kinds, stat_of
from shardio.storage.store import FileStat, Location
from shardio.whole_writes import find_target, write_whole


@dataclass(frozen=True, slots=True)
class LocalStore:
    """The local file system. Keys are absolute paths."""

    @property
    def prefix(self) -> str:
        return ""

    def stat(self, key: str) -> FileStat:
        status = Path(key).stat()
        refuse_other_kinds(key, status)
        return stat_of(status)

    def open(self, key: str) -> LocalFile:
        return LocalFile(Location(store=self, key=key))

    def read_whole(self, key: str) -> bytes:
        with open(key, "rb", buffering=0) as file:  # noqa: PTH123  # A Path costs as much as the read.
            return file.readall()

    def is_folder(self, key: str) -> bool:
        return Path(key).is_dir()

    def list(self, key: str) -> list[str]:
        try:
            with os.scandir(key) as entries:
                names = [entry.name + "/" if _is_directory(entry) else entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if find_target(name) is None)  # Unfinished files are not objects yet.

    def walk(self, key: str) -> Iterator[str]:
        """Yield the paths of all files below a directory: see :func:`walk_files`."""
        return map(str, walk_files(Path(key))) if self.is_folder(key) else iter(())

    @contextmanager
    def write_whole(self, key: str) -> Iterator[BinaryIO]:
        path = Path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(path) as file:
            yield file

    def remove(self, key: str) -> None:
        Path(key).unlink(missing_ok=True)

    def can_write(self, key: str) -> bool:
        return os.access(Path(key).parent, os.W_OK)

    def resolve(self, key: str) -> str:
        return str(Path(key).resolve())


def walk_files(directory: Path, _holders: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield all files below a directory except hidden ones, sorted within each directory.

    Hidden directories are skipped. Symbolic links are followed, and broken links are yielded.

    Raises:
        OSError: If a directory cannot be read, or a symbolic link points to a directory that contains it.
    """
    here = directory.resolve()
    if here in _holders:
        raise OSError(f"{directory} is a symbolic link to a directory that contains it: remove the link")
    with os.scandir(directory) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in found:
        path = directory / entry.name
        if _is_directory(entry):
            yield from walk_files(path, (*_holders, here))
        elif (entry.is_symlink() and not path.exists()) or entry.is_file():
            yield path


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, or a link to one. A link that leads nowhere, or in a circle, is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_and_stat(path: Path) -> tuple[os.stat_result, bytes, os.stat_result]:
    """Read a local file. Return its status before the read, its content, and its status after the read."""
    with path.open("rb", buffering=0) as file:
        return os.fstat(file.fileno()), file.readall(), os.fstat(file.fileno())
