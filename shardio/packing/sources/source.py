"""Define the interface of pack sources, of their samples and of their files, and list all kinds of sources."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.sample import Sample
from shardio.storage import Location, read_and_stat
from shardio.values import count

if TYPE_CHECKING:
    from shardio.packing.pack_call import PackOptions

SourceKind = Literal["auto", "documents", "files", "lmdb", "litdata", "mds", "parquet", "saved", "table", "tars"]
"""The kind of a source: ``documents`` are texts or tokens, ``files`` is a directory of images or other files, ``saved``
is a directory written by ``save_to_disk`` of ``datasets``, ``table`` is a table of paths, and ``auto`` recognizes the
kind from the files."""

SOURCES: Mapping[SourceKind, str] = {
    "saved": "tables:SavedDataset",
    "table": "tables:TableOfPaths",
    "parquet": "tables:ParquetFiles",
    "mds": "mds:MdsShards",
    "litdata": "litdata:LitDataChunks",
    "tars": "tars:Tars",
    "lmdb": "lmdb:LmdbEnvironment",
    "files": "directory:Directory",
    "documents": "documents:Documents",
}
"""The module in this folder and the :class:`PackSource` of each kind, in the order of the search. If several kinds find
the same file, shardio chooses the first kind, so specific kinds precede general kinds."""

COLUMNS = ("image_column", "label_column", "key_column")

OPTIONS_OF_DOCUMENTS = ("tokenizer", "token_column", "token_dtype")

OPTIONS_OF_KINDS = ("prefix_keys", "layout", "source_split", "fields", *COLUMNS, *OPTIONS_OF_DOCUMENTS)
"""The options that apply only to some kinds of sources."""


def describe_option(name: str) -> str:
    """Return the name of an option on the command line and in Python, for messages."""
    return f"--{name.replace('_', '-')} ({name})"


class Evidence(NamedTuple):
    """A file that shows the kind of a source. If the file holds no samples, the user must choose the kind."""

    file: Path
    holds_samples: bool = True


class PackSource(ABC):
    """A kind of dataset that can be packed: the interface that each module in this folder implements.

    To add a kind, write a module with a subclass, and add its name to :data:`SourceKind` and :data:`SOURCES`. In
    :data:`SOURCES`, the new kind must precede any kind that recognizes the same files, such as ``table``, which
    recognizes each ``.jsonl`` file. The tests in :class:`shardio.testing.pack_source.PackSourceTests` check the
    subclass.

    Attributes:
        what: The kind's name in messages, such as ``MDS shards``.
        takes: The options in :data:`OPTIONS_OF_KINDS` that apply to the kind. Any other option in
            :data:`OPTIONS_OF_KINDS` raises an error.
    """

    what: ClassVar[str]
    takes: ClassVar[Collection[str]] = COLUMNS

    @abstractmethod
    def find(self, src: Path) -> Evidence | None:
        """Return a file that shows that a path is a dataset of this kind, or None if the path is not one.

        This method must be quick, and must not fail if the path does not exist or its files are damaged.

        Args:
            src: A file, a directory, or a pattern of files.
        """

    @abstractmethod
    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Find the samples of a dataset, if possible without reading the contents of their fields.

        Two scans of an unchanged dataset with the same options find the same samples, in the same order. Most kinds
        return the result of :func:`~shardio.packing.sources.records.scan_records`.

        Args:
            src: A dataset that ``find`` recognizes.
            options: The options of the pack.

        Raises:
            PackError: If the dataset cannot be packed. The message tells the user what to do.
        """


class SourceSample(Protocol):
    """A sample before packing. The object can be pickled, and its sample read in another process."""

    @property
    def key(self) -> str:
        """The sample's key."""

    def read(self) -> Sample:
        """Return the sample with its fields.

        Raises:
            FileChangedError: If the source has changed since the scan.
            PackError: If the sample cannot be read.
        """

    def problem(self, field: str, what: str) -> FileProblem:
        """Return a problem with a field, and the field's place in the source."""


class SourceTable(Protocol):
    """The samples of a source, in the order in which they are packed if they are not shuffled."""

    @property
    def root(self) -> str:
        """The slash-terminated prefix of file names in messages."""

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the samples. No two keys are equal."""

    @property
    def num_bytes(self) -> int:
        """The size of all samples in the source, in bytes."""

    def __len__(self) -> int: ...

    def sizes_in_tar(self) -> NDArray[np.int64]:
        """Return the size of each sample in a tar, in bytes, int64 [n]. Sizes may be estimates."""

    def digest(self) -> bytes:
        """Return a hash of everything that determines the output: keys, labels, and the state of the source's files."""

    def take(self, rows: NDArray[np.int64]) -> Sequence[SourceSample]:
        """Return some samples.

        Args:
            rows: int64 [k].
        """

    def find_changes(self) -> Iterator[FileProblem]:
        """Yield the source's files that have changed since the scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScan:
    """The result of scanning a source.

    Attributes:
        samples: The samples to pack.
        classes: The class names in the order of their labels, or () if labels have no names.
        ignored: Files that do not belong to a sample.
        suffixed: The keys that end in their file's suffix, because another image's path differs only in its suffix.
    """

    samples: SourceTable
    classes: tuple[str, ...]
    ignored: Sequence[Path] = ()
    suffixed: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Selected rows of a table: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        table: The table.
        rows: int64 [n], the rows in ascending order.
        keys: The keys of the selected samples.
        tar_sizes: int64 [n], the size of each sample in a tar, in bytes.
    """

    table: SourceTable
    rows: NDArray[np.int64]
    keys: Sequence[str]
    tar_sizes: NDArray[np.int64]

    @property
    def root(self) -> str:
        return self.table.root

    @property
    def num_bytes(self) -> int:
        return int(self.tar_sizes.sum())

    def __len__(self) -> int:
        return len(self.rows)

    def sizes_in_tar(self) -> NDArray[np.int64]:
        return self.tar_sizes

    def digest(self) -> bytes:
        return xxhash.xxh3_128(self.table.digest() + self.rows.tobytes()).digest()

    def take(self, rows: NDArray[np.int64]) -> Sequence[SourceSample]:
        return self.table.take(self.rows[rows])

    def find_changes(self) -> Iterator[FileProblem]:
        return self.table.find_changes()


def divide(table: SourceTable, numbers: NDArray[np.int64], num_parts: int) -> list[_Selection]:
    """Return the rows of each part of a table.

    Args:
        table: The table.
        numbers: int64 [n], the number of each row's part.
        num_parts: The number of parts.
    """
    sizes, selections = table.sizes_in_tar(), list[_Selection]()
    for number in range(num_parts):
        rows = np.flatnonzero(numbers == number)
        keys = [table.keys[row] for row in rows.tolist()]
        selections.append(_Selection(table=table, rows=rows, keys=keys, tar_sizes=sizes[rows]))
    return selections


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Named parts of a dataset.

    A sample's part depends only on its key and on the fractions. The xxh3-64 of the key in UTF-8, divided by 2**64, is
    compared with the running sums of the fractions. A sample stays in its part when other samples are added.

    Attributes:
        names: The name of each part.
        thresholds: The lowest hash of each part, except the first part.
    """

    names: tuple[str, ...]
    thresholds: tuple[int, ...]

    def assign(self, key_hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of each sample's part, int64 [n], given the hashes of the samples' keys, uint64 [n]."""
        return np.searchsorted(np.array(self.thresholds, np.uint64), key_hashes, side="right")

    def refuse_empty(self, num_samples: Sequence[int], where: str) -> None:
        """Raise PackError if a part would have no samples.

        Args:
            num_samples: The number of samples in each part.
            where: The dataset that is being split, for the message.
        """
        if empty := [name for name, number in zip(self.names, num_samples, strict=True) if not number]:
            raise PackError(
                f"none of the {count(sum(num_samples), 'sample')} of {where} would be in {empty[0]}: choose larger "
                "fractions"
            )


def make_parts(fractions: Sequence[float | str], names: Sequence[str]) -> Parts:
    """Return parts, given the fraction and the name of each part.

    Raises:
        ValueError: If the fractions are not positive or do not sum to 1, or if a name is not a directory name or is
            given twice.
    """
    if isinstance(fractions, str) or isinstance(names, str) or len(fractions) != len(names) or len(fractions) < 2:
        raise ValueError(
            f"the fractions and the names must be lists of the same length, at least 2, got {fractions!r} and {names!r}"
        )
    for name in names:
        if PurePath(name).name != name or name.startswith("."):
            raise ValueError(f"the name of a part must be a directory name, got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"the names of the parts must differ, got {', '.join(names)}")
    try:
        exact = [Fraction(str(fraction)) for fraction in fractions]  # Convert the decimal exactly as the user wrote it.
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"the fractions must be numbers such as 0.9 and 0.1, got {fractions!r}") from error
    total = sum(exact, Fraction())
    if min(exact) <= 0 or abs(total - 1) > Fraction(1, 10**9):
        raise ValueError(f"the fractions must be positive and sum to 1, got {', '.join(map(str, fractions))}")
    ends = np.cumsum(np.array(exact, object)).tolist()
    return Parts(names=tuple(names), thresholds=tuple(int(end / total * 2**64) for end in ends[:-1]))


@contextmanager
def requiring(package: str, src: Path, remedy: str) -> Iterator[None]:
    """Raise PackError if the block cannot import a package that reads a source."""
    try:
        yield
    except (ImportError, RuntimeError) as error:  # Packages raise RuntimeError if a dependency has the wrong version.
        raise PackError(f"reading {src} requires the package {package} ({error}): {remedy}") from error


SHOWN = 20
"""The maximum number of files that an error names."""


class FileProblem(NamedTuple):
    """A file that has changed, is damaged, or has a format that does not match its suffix."""

    path: Path | Location
    what: str


class SourceFile(NamedTuple):
    """A file's path, and its size in bytes and modification time in nanoseconds at the time of the scan."""

    path: str
    size: int
    mtime_ns: int


class FileChangedError(Exception):
    """A file has changed since the scan."""

    def __init__(self, path: Path | Location, what: str) -> None:
        # Pass all arguments to Exception, because otherwise the error cannot be unpickled.
        super().__init__(path, what)
        self.problem = FileProblem(path, what)

    def __str__(self) -> str:
        return f"{self.problem.path} {self.problem.what}"


def list_some(lines: Sequence[str], rest: str = "and {} more") -> list[str]:
    """Return at most SHOWN lines of an error message, followed by a line that counts the rest."""
    return [*lines[:SHOWN], *([rest.format(len(lines) - SHOWN)] if len(lines) > SHOWN else [])]


def stat_file(path: str) -> SourceFile:
    """Return a file with its current size and modification time.

    Raises:
        OSError: If the file does not exist, or is a directory.
    """
    status = os.stat(path)  # noqa: PTH116  # Paths are slower.
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def read_unchanged(file: SourceFile, start: int = 0, stop: int | None = None) -> bytes:
    """Return a file's bytes [start, stop), by default all, if the file has not changed since the scan.

    The open file's status is checked after the read, to detect writes by other programs up to that time.

    Raises:
        FileChangedError: If the file's size or modification time differs, or the file is missing or unreadable.
    """
    stop = file.size if stop is None else stop
    try:
        content, status = read_and_stat(file.path, start, stop)
    except OSError as error:
        raise FileChangedError(Path(file.path), _describe(error)) from error
    _compare(file, status)
    if len(content) != stop - start:
        raise FileChangedError(Path(file.path), f"has {file.size} bytes, but only {start + len(content)} could be read")
    return content


def check_unchanged(file: SourceFile) -> None:
    """Raise FileChangedError if a file has changed since the scan."""
    if (problem := find_change(file)) is not None:
        raise FileChangedError(*problem)


def explain_changes(first: FileChangedError, changes: Iterable[FileProblem], dst: Location) -> PackError:
    """Return the error for a pack that stopped at a changed file, with the names of all files that have changed."""
    problems = {first.problem.path: first.problem}
    for problem in changes:
        problems.setdefault(problem.path, problem)
    remedy = (
        "Rerun the same command when nothing is writing to the source. If the command then reports an unfinished pack, "
        f"delete {dst} and run it again. To leave out the samples of such files, pass --on-changed skip "
        "(on_changed='skip')"
    )
    first_line = "files of the source changed or became unreadable during the pack:"
    lines = [f"{problem.path} {problem.what}" for problem in problems.values()]
    return PackError("\n".join([first_line, *list_some(lines), remedy]))


def find_change(file: SourceFile) -> FileProblem | None:
    """Return the change to a file since the scan, or None if the file is unchanged."""
    try:
        _compare(file, os.stat(file.path))  # noqa: PTH116  # Paths are slower.
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
