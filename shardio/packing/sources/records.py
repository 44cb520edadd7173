"""Pack the records of another tool's dataset: rows of a table, entries of a database, samples of a tar.

This module contains the code that the adapters in this folder share: it converts scans to samples, chooses columns, and
names fields.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import find_field, find_format
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import check_field
from shardio.packing.sources.labels import Described, find_labels, make_keys, number_labels, read_label
from shardio.packing.sources.source import (
    COLUMNS,
    FileProblem,
    SourceFile,
    SourceScan,
    SourceTable,
    check_unchanged,
    describe_option,
    divide,
    find_change,
)
from shardio.sample import Sample
from shardio.shards import BLOCK, LABEL_FIELD

IMAGE = ""
"""A placeholder for the name of the image field. The image's format determines the actual name."""


class RecordReader(Protocol):
    """A reader of records in one process."""

    def read(self, row: int) -> Mapping[str, bytes]:
        """Return the fields of a record, without the label. The image's field has the placeholder name ``IMAGE``.

        Raises:
            OSError, ValueError: If the record cannot be read.
        """


class Records(Protocol):
    """The paths and names of another tool's dataset. Worker processes receive this object and open the dataset."""

    @property
    def path(self) -> Path:
        """The dataset, for messages."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The dataset's files at the time of the scan."""

    def open(self) -> RecordReader:
        """Open the dataset in this process. It stays open until another dataset is opened, or the process ends."""

    def describe(self, row: int) -> str:
        """Return the name of a record for messages, such as ``row 7``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordScan:
    """The result of an adapter's scan of a dataset.

    Attributes:
        records: The dataset.
        sizes: int64 [n], the size of each record's fields in bytes, possibly estimated.
        num_fields: The usual number of fields of a record, without the label.
        keys: The value of the key column for each record, or None to number the records.
        labels: The label of each record, an integer or a class name, or None if the records have none.
        classes: The class names by label, if the dataset has them.
        ignored: The parts that do not belong to a record, as paths below the dataset.
        is_selected: bool [n], whether to pack each record, or None for all records.
    """

    records: Records
    sizes: NDArray[np.int64]
    num_fields: int = 1
    keys: Sequence[str] | None = None
    labels: Sequence[int | str] | None = None
    classes: tuple[str, ...] = ()
    ignored: Sequence[Path] = ()
    is_selected: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordSample:
    """A record before packing."""

    records: Records
    row: int
    key: str
    label: int | None

    def read(self) -> Sample:
        try:
            found = _opened.get(self.records).read(self.row)
            fields = {name or find_field(content): content for name, content in found.items()}
            for name in fields:
                check_field(self.key, name)  # The field name comes from a column.
        except (OSError, ValueError) as error:
            what = self.records.describe(self.row)
            raise PackError(f"{what} of {self.records.path} cannot be read: {error}") from error
        if self.label is not None:
            fields[LABEL_FIELD] = b"%d" % self.label
        return Sample(key=self.key, fields=dict(sorted(fields.items())), origin=self.key)

    def problem(self, field: str, what: str) -> FileProblem:
        return FileProblem(self.records.path, f"{self.records.describe(self.row)}, field {field!r}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """The records of a dataset in order: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        records: The dataset.
        keys: The keys of the records.
        sizes: int64 [n], the size of each record's fields in bytes.
        tar_sizes: int64 [n], the size of each record in a tar in bytes.
        labels: int64 [n], the labels, or None if the records have no labels, or have a label field.
    """

    records: Records
    keys: Sequence[str]
    sizes: NDArray[np.int64]
    tar_sizes: NDArray[np.int64]
    labels: NDArray[np.int64] | None

    @property
    def root(self) -> str:
        return f"{self.records.path.parent}/".replace("//", "/")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def sizes_in_tar(self) -> NDArray[np.int64]:
        return self.tar_sizes

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128(repr(self.records).encode(errors="surrogateescape"))
        digest.update("\n".join(self.keys).encode(errors="surrogateescape"))
        for column in self.sizes, self.tar_sizes, self.labels:
            digest.update(b"none" if column is None else np.ascontiguousarray(column).data)
        return digest.digest()

    def take(self, rows: NDArray[np.int64]) -> list[_RecordSample]:
        labels = [None] * len(rows) if self.labels is None else self.labels[rows].tolist()
        return [
            _RecordSample(records=self.records, row=row, key=self.keys[row], label=label)
            for row, label in zip(rows.tolist(), labels, strict=True)
        ]

    def find_changes(self) -> Iterator[FileProblem]:
        yield from filter(None, map(find_change, self.records.files))


def scan_records(found: RecordScan, options: PackOptions) -> SourceScan:
    """Convert an adapter's scan to the scan of a source.

    Raises:
        PackError: If keys or labels are missing or invalid, or two records have the same key.
    """
    path, num_records = found.records.path, len(found.sizes)
    if not num_records:
        raise PackError(f"{path} holds no records: there is nothing to pack")
    if found.keys is None:
        keys: Sequence[str] = [f"{row:0{max(8, len(str(num_records)))}d}" for row in range(num_records)]
    else:
        keys = make_keys(found.records, found.keys, rename_dots=options.rename_dots)
    selected = found.is_selected if found.is_selected is not None else np.ones(num_records, np.bool_)
    rows = np.flatnonzero(selected)
    wanted = [keys[row] for row in rows.tolist()] if options.labels is not None else ()
    numbers, classes = number_labels_of_records(
        path, found.records, found.labels, found.classes, options, is_selected=selected, keys=wanted
    )
    overhead = found.num_fields * (BLOCK + BLOCK // 2) + (0 if numbers is None else 2 * BLOCK)
    labels = None
    if numbers is not None:
        labels = np.zeros(num_records, np.int64)
        labels[rows] = numbers
    table = RecordTable(
        records=found.records, keys=keys, sizes=found.sizes, tar_sizes=found.sizes + overhead, labels=labels
    )
    samples: SourceTable = table if len(rows) == num_records else divide(table, selected.astype(np.int64), 2)[1]
    return SourceScan(samples=samples, classes=classes, ignored=found.ignored)


def number_labels_of_records(
    path: Path,
    records: Described,
    values: Sequence[Any] | None,
    names: Sequence[str],
    options: PackOptions,
    *,
    is_selected: NDArray[np.bool_],
    keys: Sequence[str],
    other_names: Mapping[str, str] | None = None,
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return the labels of selected records, int64 [k] or None if they have no labels, and the class names.

    By default, the class names come from all records, so all splits number their classes in the same way.

    Args:
        path: The dataset, for messages.
        records: The dataset, which describes its records for messages.
        values: The label of each record, an integer or a class name, or None if the records have none.
        names: The class names by label, if the dataset has them.
        options: The options of the pack, including a label file and class names.
        is_selected: bool [n], whether each record is selected.
        keys: The keys of the selected records, for the label file.
        other_names: The keys of records, by alternative names that a label file may use.

    Raises:
        PackError: If a label is missing or invalid, or class names and integers are mixed.
    """
    classes = options.classes
    if (file := options.label_file) is not None:
        return find_labels(file, keys, classes, other_names)
    if values is None:
        if classes is not None:
            raise PackError(f"classes are given, but {path} has no labels: omit --classes (classes=…)")
        return None, ()
    labels = list[int | str | None]()
    try:
        labels.extend(map(read_label, values))
    except ValueError as error:
        raise PackError(f"{records.describe(len(labels))} of {path} has {error}") from error
    rows = np.flatnonzero(is_selected).tolist()
    if all(labels[row] in (None, -1) for row in rows):
        return None, ()  # Hugging Face marks missing labels with -1, for example in test sets.
    if names:  # The dataset has names for its integers, but this pack may number the names differently.
        labels = [_name_label(names, label) for label in labels]
    wanted = list[int | str]()
    for row in rows:
        if (label := labels[row]) is None:
            raise PackError(
                f"{records.describe(row)} of {path} has no label, but others have one: add the label, or remove the row"
            )
        wanted.append(label)
    others = [labels[row] for row in np.flatnonzero(~is_selected).tolist()]
    known = wanted + [label for label in others if label is not None and label != -1]
    return number_labels(path, known, wanted, classes or names or None)


def _name_label(classes: Sequence[str], label: int | str | None) -> int | str | None:
    return classes[label] if isinstance(label, int) and 0 <= label < len(classes) else label


def close_records() -> None:
    """Close the dataset that is open in this process, if any. Some datasets cannot be opened twice at the same time."""
    _opened.close()


class _Opened:
    """A dataset that stays open in this process, because opening it for each sample would be slow."""

    def __init__(self) -> None:
        self._records: Records | None = None
        self._reader: RecordReader | None = None

    def get(self, records: Records) -> RecordReader:
        """Return the reader of a dataset, and open the dataset if it is not open."""
        # The samples of a shard share one object, so the slow comparison of thousands of files is rare.
        if self._reader is None or (records is not self._records and records != self._records):
            self.close()
            for file in records.files:
                check_unchanged(file)
            self._reader = records.open()
        self._records = records
        return self._reader

    def close(self) -> None:
        self._records = self._reader = None


_opened = _Opened()


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The roles of a table's columns.

    Attributes:
        contents: The columns whose values are contents of files.
        image: The column of images, whose field name is the format alone, such as ``jpg``. The fields of the
            other columns in ``contents`` have names such as ``depth.png``.
        label: The column with labels.
        key: The column with keys.
        others: The columns that become the ``json`` field.
    """

    contents: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None
    key: str | None = None
    others: tuple[str, ...] = ()


def choose_columns(
    path: Path, names: Sequence[str], *, contents: Sequence[str], labels: Sequence[str], options: PackOptions
) -> Columns:
    """Return the role of each column.

    Args:
        path: The table, for messages.
        names: The names of all columns.
        contents: The names of columns whose values are contents of files.
        labels: The names of columns whose type shows that they are labels.
        options: The columns that the caller has chosen. By default, the images are in the only column of contents or in
            ``image``, and the labels in the only column of labels or in ``label``. Without a key column, samples are
            numbered.

    Raises:
        PackError: If a chosen column does not exist, or the choice is ambiguous.
    """
    chosen = {option: options.column_of_source(option) for option in COLUMNS}
    for option, name in chosen.items():
        if name is not None and name not in names:
            raise PackError(
                f"{describe_option(option)} names column {name!r}, but the columns of {path} are {', '.join(names)}"
            )
    image = chosen["image_column"] or _choose(path, contents, "image", "image_column", "images")
    label = chosen["label_column"]
    if label is None and options.labels is None:
        by_name = [name for name in ("label",) if name in names and name not in contents]
        label = _choose(path, labels or by_name, "label", "label_column", "labels")
    key = chosen["key_column"]
    lower = [name.lower() for name in names]
    if len({*lower}) != len(lower):
        twice = sorted(name for name in names if lower.count(name.lower()) > 1)
        raise PackError(
            f"columns of {path} differ only in case ({', '.join(twice)}), but field names are lowercase: rename one"
        )
    if image is not None and image not in contents:
        raise PackError(f"the column {image!r} of {path} does not hold bytes: choose one of {', '.join(contents)}")
    others = tuple(name for name in names if name not in contents and name not in (label, key))
    return Columns(contents=tuple(contents), image=image, label=label, key=key, others=others)


def name_field(columns: Columns, name: str, content: bytes, suffix: str) -> str:
    """Return the name of the field for a file's content, or ``IMAGE`` if the content is the sample's image.

    Args:
        columns: The columns of the table.
        name: The name of the content's column, optionally followed by a dot and the content's number.
        content: The content.
        suffix: The suffix of the content's file, or "" if the suffix is unknown.
    """
    if name == columns.image:
        return IMAGE if find_format(content) is not None or not suffix else suffix
    if not suffix:
        suffix = "bin" if content and find_format(content) is None else find_field(content)
    return f"{name.lower()}.{suffix}"


def _choose(path: Path, candidates: Sequence[str], usual: str, option: str, what: str) -> str | None:
    if usual in candidates:
        return usual
    if len(candidates) > 1:
        raise PackError(
            f"several columns of {path} may hold the {what} ({', '.join(candidates)}): choose one with "
            f"{describe_option(option)}"
        )
    return candidates[0] if candidates else None


@dataclass(frozen=True, slots=True)
class FileSeries:
    """The files of a dataset in order.

    Attributes:
        names: The path of each file, relative to the dataset.
        ends: The number of samples up to the end of each file.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], nums_samples: Sequence[int]) -> FileSeries:
        return cls(tuple(names), tuple(accumulate(nums_samples)))

    def find(self, row: int) -> tuple[int, int]:
        """Return the number of the file that contains a sample, and the sample's number in the file."""
        number = bisect_right(self.ends, row)
        return number, row - (self.ends[number - 1] if number else 0)

    def describe(self, row: int) -> str:
        """Return the name of a sample for messages."""
        number, sample = self.find(row)
        return f"sample {sample} of {self.names[number]}"
