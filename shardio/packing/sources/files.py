"""The files of a source: their state at the time of the scan, and reading them only if they are unchanged."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardio.errors import PackError
from shardio.storage import Location, read_and_stat

SHOWN = 20
"""The maximum number of files that an error names."""


class FileProblem(NamedTuple):
    """A file that has changed, is damaged or is not what its suffix says."""

    path: Path | Location
    what: str


class SourceFile(NamedTuple):
    """A file at the time of the scan: its path, its size in bytes, and its modification time in nanoseconds."""

    path: str
    size: int
    mtime_ns: int


class FileChangedError(Exception):
    """A file has changed since the scan."""

    def __init__(self, path: Path | Location, what: str) -> None:
        super().__init__(path, what)  # All of it, so that the error can be pickled.
        self.problem = FileProblem(path, what)

    def __str__(self) -> str:
        return f"{self.problem.path} {self.problem.what}"


def stat_file(path: str) -> SourceFile:
    """Return a file as it is now.

    Raises:
        OSError: If it does not exist, or is a directory.
    """
    status = os.stat(path)  # noqa: PTH116  # A million Paths cost seconds.
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def read_unchanged(file: SourceFile) -> bytes:
    """Return a file's content if the file has not changed since the scan.

    The open file's status is checked after the read, which detects writes by other programs up to then.

    Raises:
        FileChangedError: If its size or modification time differs, or it is missing or unreadable.
    """
    try:
        content, status = read_and_stat(file.path, file.size)
    except OSError as error:
        raise FileChangedError(Path(file.path), _describe(error)) from error
    _compare(file, status)
    if len(content) != file.size:
        raise FileChangedError(Path(file.path), f"has {file.size} bytes, but only {len(content)} could be read")
    return content


def check_unchanged(file: SourceFile) -> None:
    """Raise FileChangedError if a file has changed since the scan."""
    if (problem := find_change(file)) is not None:
        raise FileChangedError(*problem)


def explain_changes(first: FileChangedError, changes: Iterable[FileProblem], dst: Location) -> PackError:
    """Return the error for a pack that stopped at a changed file. It names all files that have changed so far."""
    problems = {first.problem.path: first.problem}
    for problem in changes:
        problems.setdefault(problem.path, problem)
    lines = [f"{problem.path} {problem.what}" for problem in problems.values()]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return PackError(
        "\n".join(
            [
                "files of the source changed or became unreadable during the pack:",
                *lines[:SHOWN],
                *more,
                "Rerun the same command when nothing is writing to the source. If the command then reports an "
                f"unfinished pack, delete {dst} and run it again. To leave out the samples of such files, pass "
                "--on-changed skip (on_changed='skip')",
            ]
        )
    )


def find_change(file: SourceFile) -> FileProblem | None:
    """Return how a file has changed since the scan; None if it has not."""
    try:
        _compare(file, os.stat(file.path))  # noqa: PTH116  # A million Paths cost seconds.
    except FileChangedError as change:
        return change.problem
    except OSError as error:
        return FileProblem(Path(file.path), _describe(error))
    return None


def _compare(file: SourceFile, status: os.stat_result) -> None:
    if status.st_size != file.size:
        raise FileChangedError(Path(file.path), f"changed from {file.size} to {status.st_size} bytes")
    if status.st_mtime_ns != file.mtime_ns:
        seconds = (status.st_mtime_ns - file.mtime_ns) / 1e9
        raise FileChangedError(Path(file.path), f"changed: its modification time differs by {seconds:+.3f} s")


def _describe(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
