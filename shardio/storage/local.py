"""Local files: positioned reads, and writes that are finished or not there at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardio.errors import FormatError
from shardio.sample import ByteRange
from shardio.storage.descriptors import Descriptor, open_files

PARTIAL_SUFFIX = ".partial"
"""How the hidden files end that hold what is not finished."""


class ReplacedError(FormatError):
    """A file is not the one any more that was opened under its name before."""


class LocalFile:
    """A file for positioned reads. Safe to share between threads and across a fork.

    Its descriptor is one of the process's budget (:mod:`shardio.storage.descriptors`): it may be closed between reads
    and opened again.

    Attributes:
        path: Where the file lies.
        serial: A number that no other file of this process has.
        size: Its size in bytes when it was first opened.
        mtime_ns: Its modification time then, in nanoseconds.
        inode: Its inode then.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = open_files()
        self.serial = next(self._files.serials)
        self._is_open = True
        found = os.fstat(self._files.open(self.serial, path).number)
        self.size, self.mtime_ns, self.inode = found.st_size, found.st_mtime_ns, found.st_ino

    def read(self, where: ByteRange) -> bytes:
        """Return the bytes of ``where``.

        Raises:
            EOFError: If the file ends before ``where.stop``.
            ReplacedError: If another file has taken its name, or it has changed, since it was first opened.
        """
        assert self._is_open, f"{self.path} is closed"
        descriptor = self._files.find(self.serial) or self._open_again()
        content = os.pread(descriptor.number, where.size, where.start)
        while len(content) < where.size:  # One read of Linux returns 2 GiB at the most.
            more = os.pread(descriptor.number, where.size - len(content), where.start + len(content))
            if not more:
                found, _ = self._stat(descriptor)
                raise EOFError(
                    f"{self.path} ends at byte {found}, but bytes "
                    f"{where.start} to {where.stop} were asked for: the file is truncated"
                )
            content += more
        return content

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._is_open = False
        self._files.close(self.serial)

    def _open_again(self) -> Descriptor:
        descriptor = self._files.open(self.serial, self.path)
        if (found := self._stat(descriptor)) != (self.size, self.mtime_ns):
            self._files.close(self.serial)
            raise ReplacedError(
                f"{self.path} changed while it was in use: it had {self.size} bytes and modification time "
                f"{self.mtime_ns} ns, now it has {found[0]} and {found[1]}. Start again with the files as they are now"
            )
        return descriptor

    @staticmethod
    def _stat(descriptor: Descriptor) -> tuple[int, int]:
        found = os.fstat(descriptor.number)
        return found.st_size, found.st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "serial"):
            self.close()


def make_path(name: str | os.PathLike[str]) -> Path:
    """Return the path of a file of this name. Under a locale without its letters, the name's bytes are its UTF-8.

    Raises:
        ValueError: If the name is empty, which a Path takes for the working directory.
    """
    if not os.fspath(name):
        raise ValueError("the path is empty: name a file or a directory, or '.' for the working directory")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return Path(os.fsdecode(os.fspath(name).encode("utf-8", "surrogateescape")))
    return Path(name)


def absolute_path(path: Path) -> Path:
    """Return a path that stays right when the working directory changes, or is removed.

    Raises:
        FileNotFoundError: If the path is relative, and there is no working directory.
    """
    if path.is_absolute():
        return path
    # The system gives the working directory without links, so that its parents can be found by its name.
    here, parts = Path.cwd(), path.parts
    while parts[:1] == ("..",):
        here, parts = here.parent, parts[1:]
    return here.joinpath(*parts)


def read_as_utf8(name: str) -> str:
    """Return a file's name as what its bytes mean in UTF-8: equal under all locales. Other bytes stay escaped."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")


def temporary_path(path: Path) -> Path:
    """Return a name under which to write ``path``: hidden, beside it, unlike any other writer's."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing so that it appears whole or not at all.

    The content goes to a temporary file beside ``path``, is synced to disk and renamed at the end. If the
    block raises, the temporary file is removed and ``path`` is left as it was.

    Raises:
        OSError: If it cannot be written, for example because the disk is full. The error names ``path``: the system
            names no file where a write fails.
    """
    temporary = temporary_path(path)
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_directory(path.parent)
    except BaseException:  # Ctrl-C as well must not leave half a file.
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file's name to an error of the system that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
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
