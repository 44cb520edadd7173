"""The local file system as a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardio.storage.local_file import LocalFile, refuse_other_kinds, stat_of
from shardio.storage.store import FileStat, Location
from shardio.whole_writes import create_whole, find_target, write_whole


@dataclass(frozen=True, slots=True)
class LocalStore:
    """The local file system. Keys are absolute paths."""

    @property
    def prefix(self) -> str:
        return ""

    @property
    def is_local(self) -> bool:
        return True

    @property
    def cache_bytes(self) -> None:
        return None

    def stat(self, key: str) -> FileStat:
        status = Path(key).stat()
        refuse_other_kinds(key, status)
        return stat_of(status)

    def open(self, key: str, *, whole: bool = False) -> LocalFile:
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

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        return ((path, self.stat(path)) for path in self.walk(key))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[BinaryIO]:
        path = Path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(path) as file:
            yield file

    def create(self, key: str, content: bytes) -> bool:
        path = Path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return create_whole(path, content) or self.read_whole(key) == content

    def remove(self, key: str) -> None:
        Path(key).unlink(missing_ok=True)

    def can_write(self, key: str) -> bool:
        return os.access(Path(key).parent, os.W_OK)

    def resolve(self, key: str) -> str:
        return str(Path(key).resolve())


def find_path(location: Location) -> Path | None:
    """Return the path of a location in the local file system; None for one in another store."""
    return Path(location.key) if isinstance(location.store, LocalStore) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """The files directly in a folder, sorted by name.

    Attributes:
        path: The folder's path relative to the root of the walk, with slashes; "" for the root.
        names: The files' names.
        sizes: int64 [n], their sizes in bytes; -1 for a broken link.
        mtimes_ns: int64 [n], their modification times in nanoseconds.
    """

    path: str
    names: list[str]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]


def walk_folders(root: Path) -> Iterator[FolderFiles]:
    """Yield each folder at and below a directory with its files, as :func:`walk_files` finds them."""
    folders = [("", frozenset[str]())]
    while folders:
        path, holders = folders.pop()
        files = list[tuple[str, int, int]]()
        inner = list[tuple[str, frozenset[str]]]()
        for entry in _list_visible(root / path, holders):
            if entry.is_file(follow_symlinks=False):  # Nearly always.
                status = entry.stat(follow_symlinks=False)
                files.append((entry.name, status.st_size, status.st_mtime_ns))
            elif _is_directory(entry):
                inner_path = f"{path}/{entry.name}" if path else entry.name
                inner.append((inner_path, holders | {os.path.realpath(root / path)}))
            elif (found := _stat_file(entry)) is not None:
                files.append((entry.name, *found))
        folders += reversed(inner)
        yield FolderFiles(
            path=path,
            names=[name for name, _, _ in files],
            sizes=np.array([size for _, size, _ in files], np.int64),
            mtimes_ns=np.array([mtime for _, _, mtime in files], np.int64),
        )


def walk_files(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory except hidden ones, sorted within each directory.

    Hidden directories are skipped. Symbolic links are followed, and broken links are yielded.

    Raises:
        OSError: If a directory cannot be read, or a symbolic link points to a directory that contains it.
    """
    return _walk_files(directory, frozenset())


def _walk_files(directory: Path, holders: frozenset[str]) -> Iterator[Path]:
    for entry in _list_visible(directory, holders):
        if _is_directory(entry):
            yield from _walk_files(directory / entry.name, holders | {os.path.realpath(directory)})
        elif _is_broken_link(entry) or entry.is_file():
            yield directory / entry.name


def _list_visible(directory: Path, holders: frozenset[str]) -> list[os.DirEntry[str]]:
    """Return the entries of a directory that are not hidden, sorted; raise OSError if it is one of its holders."""
    if holders and os.path.realpath(directory) in holders:
        raise OSError(f"{directory} is a symbolic link to a directory that contains it: remove the link")
    with os.scandir(directory) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _stat_file(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    """Return a file's size and modification time, both -1 for a broken link; None for a pipe, a socket or a device."""
    if _is_broken_link(entry):
        return -1, -1
    if not entry.is_file():
        return None
    status = entry.stat()
    return status.st_size, status.st_mtime_ns


def _is_broken_link(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110  # A Path costs more than the check.


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, or a link to one. A link that leads nowhere, or in a circle, is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_and_stat(path: str, num_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read at most ``num_bytes`` bytes of a local file. Return them, and the file's status after the read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(descriptor, num_bytes)
        while len(content) < num_bytes and (piece := os.read(descriptor, num_bytes - len(content))):
            content += piece
        return content, os.fstat(descriptor)
    finally:
        os.close(descriptor)
