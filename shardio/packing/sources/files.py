"""The files of a source: their state at the time of the scan, reads that check it, and the table of samples."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.process import let_through
from shardio.sample import Sample
from shardio.shards import BLOCK, LABEL_FIELD, fits_plain_header, join_name, make_header
from shardio.storage import Location, parse_location, read_and_stat

SHOWN = 20
"""The maximum number of files that an error names."""

PART = 4096
"""The number of samples whose names are hashed together."""


class FileProblem(NamedTuple):
    """A file that has changed, is damaged, or has another format than its suffix says."""

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
        super().__init__(path, what)  # All arguments, so that the error can be pickled.
        self.problem = FileProblem(path, what)

    def __str__(self) -> str:
        return f"{self.problem.path} {self.problem.what}"


def stat_file(path: str) -> SourceFile:
    """Return a file in its present state.

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
    """Return the change of a file since the scan; None if there is none."""
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


class FileName(NamedTuple):
    """The field of a file, and the prefix and the suffix that make its path of its sample's stem."""

    field: str
    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSample:
    """A sample before packing: its key, the files that become its fields, and its label."""

    key: str
    files: Mapping[str, SourceFile]
    label: int | None

    def read(self) -> Sample:
        fields = {name: read_unchanged(file) for name, file in self.files.items()}
        if self.label is not None:
            fields[LABEL_FIELD] = b"%d" % self.label
        return Sample(key=self.key, fields=dict(sorted(fields.items())), origin=self.key)

    def problem(self, field: str, what: str) -> FileProblem:
        return FileProblem(Path(self.files[field].path), what)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable:
    """The samples of a directory, sorted by key: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        root: The directory of the source, as a string that ends in a slash.
        keys: Their keys.
        stems: Their files' paths below the source, without prefix and suffix. They usually equal the keys.
        kinds: The kinds of samples: for each, the names of its files, sorted by field.
        kind_ids: int32 [n], the kind of each sample.
        first_files: int64 [n + 1], the place of each sample's first file in ``sizes`` and ``mtimes_ns``.
        sizes: int64 [m], the sizes of all files in bytes.
        mtimes_ns: int64 [m], their modification times in nanoseconds.
        labels: int64 [n], the label of each sample; None if the samples have none.
    """

    root: str
    keys: Sequence[str]
    stems: Sequence[str]
    kinds: Sequence[Sequence[FileName]]
    kind_ids: NDArray[np.int32]
    first_files: NDArray[np.int64]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    labels: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return int(self.sizes.sum())

    @property
    def fields(self) -> set[str]:
        """The fields of all kinds of samples, without labels."""
        return {name.field for kind in self.kinds for name in kind}

    def with_labels(self, labels: NDArray[np.int64]) -> FileTable:
        """Return the same samples with labels, int64 [n]."""
        return replace(self, labels=labels)

    def select(self, rows: NDArray[np.int64]) -> FileTable:
        """Return some samples, int64 [k]."""
        counts = np.diff(self.first_files)[rows]
        first_files = np.concatenate([[0], np.cumsum(counts)])
        files = np.arange(first_files[-1]) + np.repeat(self.first_files[rows] - first_files[:-1], counts)
        keys = [self.keys[row] for row in rows.tolist()]
        return replace(
            self,
            keys=keys,
            stems=keys if self.stems is self.keys else [self.stems[row] for row in rows.tolist()],
            kind_ids=self.kind_ids[rows],
            first_files=first_files,
            sizes=self.sizes[files],
            mtimes_ns=self.mtimes_ns[files],
            labels=None if self.labels is None else self.labels[rows],
        )

    def find_changes(self) -> Iterator[FileProblem]:
        for row in range(len(self)):
            for file in self.sample(row).files.values():
                if (problem := find_change(file)) is not None:
                    yield problem

    def sample(self, row: int) -> FileSample:
        """Return one sample."""
        (sample,) = self.take(np.array([row]))
        return sample

    def take(self, rows: NDArray[np.int64]) -> list[FileSample]:
        samples = list[FileSample]()
        labels = [None] * len(rows) if self.labels is None else self.labels[rows].tolist()
        for row, first, kind_id, label in zip(
            rows.tolist(), self.first_files[rows].tolist(), self.kind_ids[rows].tolist(), labels, strict=True
        ):
            stem, kind = self.stems[row], self.kinds[kind_id]
            sizes, mtimes_ns = (column[first : first + len(kind)].tolist() for column in (self.sizes, self.mtimes_ns))
            files = {
                name.field: SourceFile(f"{self.root}{name.prefix}{stem}{name.suffix}", size, mtime_ns)
                for name, size, mtime_ns in zip(kind, sizes, mtimes_ns, strict=True)
            }
            samples.append(FileSample(key=self.keys[row], files=files, label=label))
        return samples

    def sizes_in_tar(self) -> NDArray[np.int64]:
        total = np.zeros(len(self), np.int64)
        padded = -(-self.sizes // BLOCK) * BLOCK
        for kind_id, kind in enumerate(self.kinds):
            rows = np.flatnonzero(self.kind_ids == kind_id)
            keys = [self.keys[row] for row in rows.tolist()]
            for i, name in enumerate(kind):
                files = self.first_files[rows] + i
                total[rows] += padded[files] + header_sizes(keys, name.field, self.sizes[files])
            if self.labels is not None:
                total[rows] += BLOCK + header_sizes(keys, LABEL_FIELD, np.ones(len(rows), np.int64))
        return total

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128(repr(self.kinds).encode(errors="surrogateescape"))
        for first in range(0, len(self), PART):
            names = "\n".join((*self.keys[first : first + PART], *self.stems[first : first + PART], ""))
            digest.update(names.encode(errors="surrogateescape"))
        for column in self.kind_ids, self.sizes, self.mtimes_ns, self.labels:
            digest.update(b"none" if column is None else np.ascontiguousarray(column).data)
        return digest.digest()


def header_sizes(keys: Sequence[str], field: str, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sizes of the headers of one field's members, in bytes, int64 [n]."""
    headers = np.full(len(keys), BLOCK, np.int64)
    for i, (key, size) in enumerate(zip(keys, sizes.tolist(), strict=True)):
        if not fits_plain_header(name := join_name(key, field), size):
            headers[i] = len(make_header(name, size))
    return headers


class TemporaryFolder:
    """A folder that is removed with this object, or when the process that made it ends.

    Worker processes receive a copy of this object, which leaves the folder alone.

    Args:
        num_bytes: The size of the files that it will hold.
        src: The source of these files, for messages.

    Attributes:
        path: The folder.

    Raises:
        PackError: If the disk has too little space for the files.
    """

    def __init__(self, num_bytes: int, src: Path) -> None:
        parent = Path(tempfile.gettempdir())
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            raise PackError(
                f"{src} is compressed. Its files have {num_bytes} bytes when they are decompressed, but {parent} has "
                f"only {free} bytes of free space: set the environment variable TMPDIR to a folder on a larger disk"
            )
        self.path = Path(tempfile.mkdtemp(prefix="shardio-", dir=parent))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path


def find_folder(src: Path, unpacked: TemporaryFolder | None, name: str) -> Path:
    """Return the folder that has a file: the folder of decompressed files, or the source itself."""
    return unpacked.path if unpacked is not None and (unpacked.path / name).exists() else src


def unpack(src: Path, dst: Path, num_bytes: int, decompress: Callable[[bytes], bytes]) -> None:
    """Decompress a file.

    Args:
        src: The file.
        dst: The new file.
        num_bytes: The least size of the new file.
        decompress: Returns the decompressed content of a file.

    Raises:
        PackError: If the file is damaged.
    """
    try:
        content = decompress(parse_location(src).read_whole())
    except Exception as error:  # Each algorithm raises its own errors.
        let_through(error)
        raise PackError(f"{src} cannot be decompressed: {error}. Download or create it again") from error
    if len(content) < num_bytes:
        raise PackError(f"{src} has {len(content)} bytes when it is decompressed, not {num_bytes}: create it again")
    dst.parent.mkdir(parents=True, exist_ok=True)
    with parse_location(dst).write_whole() as file:
        file.write(content)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # A fork of the process must not remove it.
        shutil.rmtree(path, ignore_errors=True)
