"""Datasets that consist of a file ``index.json`` and of numbered files, each with consecutive samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from shardio.errors import PackError
from shardio.json_text import parse_json
from shardio.packing.sources.files import stat_file
from shardio.packing.sources.source import Evidence
from shardio.storage import parse_location

INDEX = "index.json"

_SPLITS = ("train", "val", "valid", "validation", "test")


@dataclass(frozen=True, slots=True)
class FileSeries:
    """The files of a dataset in order.

    Attributes:
        names: The name of each file below the dataset.
        ends: For each file, the number of samples up to its end.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], nums_samples: Sequence[int]) -> FileSeries:
        return cls(tuple(names), tuple(accumulate(nums_samples)))

    def find(self, row: int) -> tuple[int, int]:
        """Return which file has a sample, and the sample's number in that file."""
        number = bisect_right(self.ends, row)
        return number, row - (self.ends[number - 1] if number else 0)

    def describe(self, row: int) -> str:
        """Return what a sample is called in messages."""
        number, sample = self.find(row)
        return f"sample {sample} of {self.names[number]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKind:
    """How the ``index.json`` of a tool is recognised.

    Attributes:
        entries: The name of the list of files in the JSON object.
        key: A key of each object in that list.
        pattern: The files beside an ``index.json`` that is damaged.
    """

    entries: str
    key: str
    pattern: str


def find_index(src: Path, kind: IndexKind) -> Evidence | None:
    """Find the ``index.json`` of a tool in a directory, or in one of its splits."""
    found = (src / split for split in (".", *_SPLITS) if _matches(src / split, kind))
    return next((Evidence(folder / INDEX) for folder in found), None)


def read_index(src: Path, kind: IndexKind) -> Mapping[str, Any]:
    """Return the content of a directory's ``index.json``.

    Raises:
        PackError: If the directory consists of splits, or the file cannot be read.
    """
    if not (src / INDEX).is_file():
        splits = _find_splits(src, kind)
        raise PackError(
            f"{src} holds the splits {', '.join(splits)}: pack each one, such as {src / splits[0] if splits else src}"
        )
    try:
        found = parse_json(parse_location(src / INDEX).read_whole())
    except (OSError, ValueError) as error:
        raise PackError(f"{src / INDEX} cannot be read: {error}. Download or create it again") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def invalid_index_is_an_error(src: Path) -> Iterator[None]:
    """Raise PackError if the block finds that a value of ``index.json`` is missing or has another type."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise PackError(f"{src / INDEX} is invalid: {what}. Download or create it again") from error


def resolve_file(src: Path, name: object) -> Path:
    """Return the path of a file that ``index.json`` names.

    Raises:
        PackError: If the name leads out of the directory.
    """
    if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PackError(f"{src / INDEX} names the file {name!r}, which is not below {src}: create {INDEX} again")
    return src / name


def has_size(path: Path, num_bytes: int) -> bool:
    """Return whether a file exists and has at least a certain size."""
    return path.is_file() and stat_file(str(path)).size >= num_bytes


def check_size(src: Path, path: Path, num_bytes: int, *, at_least: bool = False) -> None:
    """Check that a file has the size that ``index.json`` gives.

    Args:
        src: The dataset.
        path: The file.
        num_bytes: Its size in bytes.
        at_least: Whether it may be larger.

    Raises:
        PackError: If it has another size, or does not exist.
    """
    try:
        size = stat_file(str(path)).size
    except OSError as error:
        raise PackError(f"{path}, which {src / INDEX} names, cannot be read: {error.strerror or error}") from error
    if size < num_bytes or (size > num_bytes and not at_least):
        raise PackError(
            f"{path} has {size} bytes, but {num_bytes} according to {src / INDEX}: download or create it again"
        )


def _find_splits(src: Path, kind: IndexKind) -> list[str]:
    return [split for split in _SPLITS if _matches(src / split, kind)]


def _matches(folder: Path, kind: IndexKind) -> bool:
    if not (folder / INDEX).is_file():
        return False
    try:
        found = parse_json(parse_location(folder / INDEX).read_whole())
    except (OSError, ValueError):
        return next(folder.glob(kind.pattern), None) is not None
    entries = found.get(kind.entries) if isinstance(found, dict) else None
    return isinstance(entries, list) and all(isinstance(entry, dict) and kind.key in entry for entry in entries)
