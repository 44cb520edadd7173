"""Tables that name image files: CSV, JSON Lines or Parquet with a column of paths."""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS, read_format
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import dump_json
from shardio.packing.sources.files import SHOWN, FileName, FileProblem, FileSample, FileTable, header_sizes, stat_file
from shardio.packing.sources.labels import (
    TABLE_SUFFIXES,
    Row,
    SplitColumn,
    find_labels,
    holds_contents,
    make_keys,
    read_rows,
    separate_equal_stems,
    without_image_suffix,
)
from shardio.packing.sources.layouts import split_suffix
from shardio.packing.sources.records import Columns, choose_columns, number_record_labels
from shardio.packing.sources.source import COLUMNS, Evidence, PackSource, SourceScan
from shardio.sample import Sample
from shardio.shards import BLOCK, MAX_MEMBER, TOO_LARGE
from shardio.storage import absolute_path

JSON_FIELD = "json"
"""The field of the columns that are neither paths nor labels nor keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSample:
    """A row before packing: its file, and the content of its json field, if it has one."""

    file: FileSample
    json: bytes | None

    @property
    def key(self) -> str:
        return self.file.key

    def read(self) -> Sample:
        sample = self.file.read()
        if self.json is None:
            return sample
        return replace(sample, fields=dict(sorted({**sample.fields, JSON_FIELD: self.json}.items())))

    def problem(self, field: str, what: str) -> FileProblem:
        return self.file.problem(field, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTable:
    """The rows of a table in their order: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        root: The table's folder, as a string that ends in a slash.
        files: The files that the rows name.
        json: The contents of the json fields, end to end; None if the samples have none.
        json_bounds: int64 [n + 1], the offsets in ``json`` at which they start and stop.
    """

    root: str
    files: FileTable
    json: bytes | None
    json_bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def keys(self) -> Sequence[str]:
        return self.files.keys

    @property
    def num_bytes(self) -> int:
        return self.files.num_bytes + len(self.json or b"")

    def sizes_in_tar(self) -> NDArray[np.int64]:
        sizes = self.files.sizes_in_tar()
        if self.json is not None:
            json_sizes = np.diff(self.json_bounds)
            sizes += -(-json_sizes // BLOCK) * BLOCK + header_sizes(self.keys, JSON_FIELD, json_sizes)
        return sizes

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128(self.files.digest())
        digest.update(self.json_bounds.data)
        digest.update(self.json or b"")
        return digest.digest()

    def take(self, rows: NDArray[np.int64]) -> list[PathSample]:
        starts, stops = self.json_bounds[rows].tolist(), self.json_bounds[rows + 1].tolist()
        return [
            PathSample(file=file, json=None if self.json is None else self.json[start:stop])
            for file, start, stop in zip(self.files.take(rows), starts, stops, strict=True)
        ]

    def find_changes(self) -> Iterator[FileProblem]:
        return self.files.find_changes()


_USUAL_NAMES = ("file", "file_name", "file_path", "filename", "filepath", "image", "image_path", "img_path", "path")
"""The usual names of columns of paths."""


class TableOfPaths(PackSource):
    """A CSV or JSON Lines file, or a Parquet file, with a column of paths."""

    what = "a table of paths"
    takes = (*COLUMNS, "source_split")

    def find(self, src: Path) -> Evidence | None:
        """Recognise the table. A Parquet file with columns of contents must be chosen."""
        suffix = src.suffix.lower()
        if not src.is_file() or suffix not in TABLE_SUFFIXES:
            return None
        return Evidence(src, suffix != ".parquet" or not holds_contents(src))

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Find the samples of a table of paths. Each file's size and time are read.

        Paths are absolute, or relative to the table's folder. Without a key column, they are the keys, without
        suffixes.

        Raises:
            PackError: If the table cannot be read, files are missing, or keys or labels are missing, equal or invalid.
        """
        rows, other_labels = _Rows(src, options.main_fields), list[Any]()
        columns: Columns | None = None
        split: SplitColumn | None = None
        try:
            for number, row in enumerate(read_rows(src), 1):
                columns = columns or _choose_columns(src, list(row), options)
                split = split or SplitColumn(src, options.source_split, (columns.image, columns.label, columns.key))
                if split.selects(row):
                    rows.add(number, row, columns)
                elif columns.label is not None:
                    other_labels.append(row.get(columns.label))
        except (OSError, ValueError, csv.Error) as error:
            raise PackError(f"{src} cannot be read as a table of paths: {error}") from error
        if columns is None or split is None:
            raise PackError(f"{src} has no rows: there is nothing to pack")
        split.check()
        table = rows.finish(columns, rename_dots=options.rename_dots)
        numbers: NDArray[np.int64] | None = None
        classes: tuple[str, ...] = ()
        if (file := options.label_file) is not None:
            numbers, classes = find_labels(file, table.keys, options.classes, rows.names)
        elif columns.label is not None:
            labels = rows.labels + other_labels
            numbers, classes = number_record_labels(
                src, rows, labels, (), options.classes, is_selected=np.arange(len(labels)) < len(rows.labels)
            )
        elif options.classes is not None:
            raise PackError(f"classes are given, but {src} has no labels: omit --classes (classes=…)")
        if numbers is not None:
            table = replace(table, files=table.files.with_labels(numbers))
        return SourceScan(samples=table, classes=classes, suffixed=rows.suffixed)


class _Rows:
    """Collects rows in columns.

    Attributes:
        labels: The label of each row.
        names: The keys that do not follow from the path by removing the suffix, by path.
        suffixed: The keys that end in the file's suffix, because another image has the same path except for its suffix.

    Args:
        path: The table.
        main_fields: The suffixes of images.
    """

    def __init__(self, path: Path, main_fields: Collection[str]) -> None:
        self._main_fields = main_fields
        self._path, self._folder = path, absolute_path(path.parent).as_posix()
        self._root = f"{path.parent}/".replace("//", "/")
        self.labels = list[Any]()
        self._keys, self._stems = list[Any](), list[str]()
        self._kind_ids, self._kinds = dict[FileName, int](), array("i")
        self._sizes, self._mtimes = array("q"), array("q")
        self._json, self._json_bounds, self._has_json = bytearray(), array("q", [0]), False
        self.names, self.suffixed = dict[str, str](), list[str]()
        self._numbers, self._num_errors, self._errors = array("q"), 0, list[str]()

    def describe(self, row: int) -> str:
        return f"row {self._numbers[row]}" if row < len(self._numbers) else "a row of another split"

    def add(self, number: int, row: Row, columns: Columns) -> None:
        """Add a row, given its number in the table. Record problems of its file.

        Raises:
            ValueError: If the row is invalid.
        """
        path = row.get(str(columns.image))
        if not isinstance(path, str) or not path:
            raise ValueError(f"row {number} has {path!r:.100} in the column {columns.image!r}, which must be a path")
        if (problem := self._add_file(path)) is not None:
            self._num_errors += 1
            if len(self._errors) < SHOWN:
                self._errors.append(f"row {number}: {problem}")
            return
        self._numbers.append(number)
        self._keys.append(self._key_of(path) if columns.key is None else row.get(columns.key))
        self.labels.append(None if columns.label is None else row.get(columns.label))
        used = (columns.image, columns.label, columns.key)
        others = {name: value for name, value in row.items() if name not in used}
        try:
            self._json += dump_json(others)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        self._json_bounds.append(len(self._json))
        self._has_json = self._has_json or bool(others)

    def finish(self, columns: Columns, *, rename_dots: bool) -> PathTable:
        """Return the samples, without labels.

        Raises:
            PackError: If files are missing or no images, or keys are invalid or equal.
        """
        if self._errors:
            more = [f"and {self._num_errors - SHOWN} more"] if self._num_errors > SHOWN else []
            raise PackError(
                "\n".join(
                    [
                        f"{self._num_errors} of {self._num_errors + len(self._numbers)} rows of {self._path} name "
                        "files that cannot be packed:",
                        *self._errors,
                        *more,
                        f"Paths are relative to {self._root}, or absolute. Correct or remove these rows",
                    ]
                )
            )
        separated = separate_equal_stems(self._keys) if columns.key is None else {}
        self.suffixed = list(separated.values())
        keys = make_keys(
            self,
            [separated.get(path, path) for path in self._keys],
            rename_dots=rename_dots,
            where=f"in the column {columns.image if columns.key is None else columns.key!r}",
            remedy="Name a column with other keys by --key-column (key_column)",
        )
        if columns.key is None:
            pairs = zip(self._keys, keys, strict=True)
            self.names = {path: key for path, key in pairs if without_image_suffix(path) != key}
        files = FileTable(
            root="",
            keys=keys,
            stems=keys if keys == self._stems else self._stems,
            kinds=tuple((kind,) for kind in self._kind_ids),
            kind_ids=np.array(self._kinds, np.int32),
            first_files=np.arange(len(keys) + 1),
            sizes=np.array(self._sizes, np.int64),
            mtimes_ns=np.array(self._mtimes, np.int64),
            labels=None,
        )
        json = bytes(self._json) if self._has_json else None
        return PathTable(root=self._root, files=files, json=json, json_bounds=np.array(self._json_bounds, np.int64))

    def _add_file(self, path: str) -> str | None:
        """Add the file of a row, or return the problem that prevents it."""
        prefix = "" if path.startswith("/") else self._root
        try:
            file = stat_file(prefix + path)
            folder, slash, name = path.rpartition("/")
            stem, suffix = split_suffix(name)
            field = suffix[1:].lower()
            if field not in self._main_fields:
                field = _find_field(prefix + path)
        except FileNotFoundError:
            if "\\" in path:
                return f"{prefix + path} does not exist: separate folders by / instead of \\"
            return f"{prefix + path} does not exist" if "://" not in path else f"{path} is a URL: download the files"
        except (OSError, ValueError) as error:
            return f"{prefix + path} cannot be read: {error}"
        if not field:
            return f"{prefix + path} is not an image (supported: {', '.join(IMAGE_FORMATS)})"
        if file.size > MAX_MEMBER:
            return f"{prefix + path} has {file.size} bytes, {TOO_LARGE}"
        kind = FileName(field, prefix, suffix)
        self._stems.append(folder + slash + stem)
        self._kinds.append(self._kind_ids.setdefault(kind, len(self._kind_ids)))
        self._sizes.append(file.size)
        self._mtimes.append(file.mtime_ns)
        return None

    def _key_of(self, path: str) -> str:
        """Return a path relative to the table's folder if it is below it; otherwise, without its first slash."""
        if without_image_suffix(path) == path:  # Another suffix, such as .jfif, or none.
            path = self._stems[-1]
        if path.startswith(("/", ".")) or "//" in path or "/." in path:
            path = os.path.normpath(os.path.join(self._folder, path))  # noqa: PTH118  # A million Paths cost seconds.
            inner = path.removeprefix(f"{self._folder.rstrip('/')}/")
            path = inner if inner != path else path.lstrip("/")
        return path


def _choose_columns(src: Path, names: Sequence[str], options: PackOptions) -> Columns:
    usual = [name for name in names if name.lower() in _USUAL_NAMES and name != options.column_of_source("key_column")]
    candidates = [options.image_column] if options.image_column in names else usual
    columns = choose_columns(src, names, contents=[name for name in candidates if name], labels=(), options=options)
    if columns.image is None:
        raise PackError(
            f"{src} has the columns {', '.join(map(str, names))}: name the one with the paths of the images by "
            "--image-column (image_column)"
        )
    return columns


def _find_field(path: str) -> str:
    """Return the field of an image without an image suffix, such as .jfif; "" if the file is not an image."""
    if (found := read_format(Path(path))) is None:
        return ""
    return next((suffix for suffix, name in IMAGE_FORMATS.items() if name == found), "image")
