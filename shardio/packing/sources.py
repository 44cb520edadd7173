"""The files of a source: as the scan saw them, and whether they still are that when they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import PackError
from shardio.storage import read_and_stat

SHOWN = 20
"""How many files an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file that is not what its name says, or no longer what the scan saw."""

    path: Path
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file as the scan saw it: its size in bytes, and when it was last written, in nanoseconds."""

    path: Path
    size: int
    mtime_ns: int


class FileChangedError(Exception):
    """A file is no longer what the scan saw."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.problem = Problem(path=path, what=what)


def see_file(path: Path) -> SourceFile:
    """Return a file as it is now."""
    status = path.stat()
    return SourceFile(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns)


def read_unchanged(file: SourceFile) -> bytes:
    """Return a file's content, if it is the one that the scan saw.

    The open file is compared before and after it is read: what another program writes meanwhile is noticed.

    Raises:
        FileChangedError: If it has another size or time, is gone, or cannot be read.
    """
    try:
        before, content, after = read_and_stat(file.path)
    except OSError as error:
        raise FileChangedError(file.path, _describe(error)) from error
    _compare(file, before)
    _compare(file, after)
    if len(content) != file.size:
        raise FileChangedError(file.path, f"had {file.size} bytes, and {len(content)} could be read")
    return content


def explain_changes(first: FileChangedError, files: Iterable[SourceFile], dst: Path) -> PackError:
    """Return the error for a pack that stopped at a file, which names all files that have changed by now."""
    problems = {first.problem.path: first.problem}
    for file in files:
        if (problem := _find_change(file)) is not None:
            problems.setdefault(file.path, problem)
    lines = [f"{problem.path} {problem.what}" for problem in problems.values()]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return PackError(
        "\n".join(
            [
                "files of the source changed, or cannot be read any more, since the pack began:",
                *lines[:SHOWN],
                *more,
                "Run the same command when nothing writes to the source any more; if it reports an unfinished "
                f"pack, delete {dst} first. Or leave out the samples of such files by --on-changed skip "
                "(on_changed='skip')",
            ]
        )
    )


def _find_change(file: SourceFile) -> Problem | None:
    try:
        _compare(file, file.path.stat())
    except FileChangedError as change:
        return change.problem
    except OSError as error:
        return Problem(path=file.path, what=_describe(error))
    return None


def _compare(file: SourceFile, status: os.stat_result) -> None:
    if status.st_size != file.size:
        raise FileChangedError(file.path, f"changed: it had {file.size} bytes, and has {status.st_size}")
    if status.st_mtime_ns != file.mtime_ns:
        seconds = (status.st_mtime_ns - file.mtime_ns) / 1e9
        raise FileChangedError(file.path, f"changed: its modification time moved by {seconds:+.3f} s")


def _describe(error: OSError) -> str:
    return "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
