"""Samples that are records of another tool's dataset: a row of a table, an entry of a database, a sample of a tar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import find_field
from shardio.packing.names import check_name
from shardio.packing.sources.files import FileProblem, SourceFile, check_unchanged, find_change
from shardio.packing.sources.keys import make_keys
from shardio.packing.sources.label_files import as_label, find_labels, number_labels
from shardio.packing.sources.source import SourceOptions, SourceScan
from shardio.sample import Sample
from shardio.shards import BLOCK, LABEL_FIELD

IMAGE = ""
"""The name of a record's field that holds an image. The field gets the name of the image's format."""


class RecordReader(Protocol):
    """Reads records in one process."""

    def read(self, row: int) -> Mapping[str, bytes]:
        """Return the fields of a record, without the label. The name ``IMAGE`` stands for that of an image's format.

        Raises:
            OSError, ValueError: If the record cannot be read.
        """


class Records(Protocol):
    """A dataset of another tool. Worker processes receive it, and open it themselves: it holds paths and names.

    Two of them are equal if they are the same dataset in the same state.
    """

    @property
    def path(self) -> Path:
        """The dataset, for messages."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Its files, as they were at the time of the scan."""

    def open(self) -> RecordReader:
        """Open the dataset in this process. It stays open until another one is opened, or the process ends."""

    def describe(self, row: int) -> str:
        """Return what a record is called in messages, such as ``row 7``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordScan:
    """What an adapter finds in a dataset.

    Attributes:
        records: The dataset.
        sizes: int64 [n], the size of each record's fields in bytes. It may be an estimate.
        num_fields: The number of fields of most records, without the label.
        keys: The value of the key column for each record; None to number the records.
        labels: The label of each record, an integer or a class name; None if the records have none.
        classes: The class names by label, if the dataset has them.
    """

    records: Records
    sizes: NDArray[np.int64]
    num_fields: int = 1
    keys: Sequence[str] | None = None
    labels: Sequence[int | str] | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSample:
    """A record before packing."""

    records: Records
    row: int
    key: str
    label: int | None

    def read(self) -> Sample:
        try:
            found = _open(self.records).read(self.row)
            fields = {name or find_field(content): content for name, content in found.items()}
            for name in fields:
                check_name(self.key, name)  # It comes from the name of a column.
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
    """The records of a dataset in its order: see :class:`~shardio.packing.sources.source.SourceTable`."""

    records: Records
    keys: Sequence[str]
    sizes: NDArray[np.int64]
    num_fields: int
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
        overhead = self.num_fields * (BLOCK + BLOCK // 2) + (0 if self.labels is None else 2 * BLOCK)
        return self.sizes + overhead

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128(repr(self.records).encode(errors="surrogateescape"))
        digest.update("\n".join(self.keys).encode(errors="surrogateescape"))
        for column in self.sizes, self.labels:
            digest.update(b"none" if column is None else np.ascontiguousarray(column).data)
        return digest.digest()

    def take(self, rows: NDArray[np.int64]) -> list[RecordSample]:
        labels = [None] * len(rows) if self.labels is None else self.labels[rows].tolist()
        return [
            RecordSample(records=self.records, row=row, key=self.keys[row], label=label)
            for row, label in zip(rows.tolist(), labels, strict=True)
        ]

    def find_changes(self) -> Iterator[FileProblem]:
        for file in self.records.files:
            if (problem := find_change(file)) is not None:
                yield problem


def scan_records(found: RecordScan, options: SourceOptions) -> SourceScan:
    """Make the scan of a source from what its adapter found.

    Raises:
        PackError: If keys or labels are missing, equal or invalid.
    """
    path, num_records = found.records.path, len(found.sizes)
    if not num_records:
        raise PackError(f"{path} holds no records: there is nothing to pack")
    if found.keys is None:
        keys: Sequence[str] = [f"{row:0{max(8, len(str(num_records)))}d}" for row in range(num_records)]
    else:
        keys = make_keys(found.records, found.keys, rename_dots=options.rename_dots)
    numbers: NDArray[np.int64] | None = None
    classes: tuple[str, ...] = ()
    if options.labels is not None:
        numbers, classes = find_labels(options.labels, keys, options.classes)
    elif found.labels is not None:
        numbers, classes = _number_labels(found, found.labels, options.classes)
    elif options.classes is not None:
        raise PackError(f"classes are given, but {path} has no labels: omit --classes (classes=…)")
    table = RecordTable(
        records=found.records, keys=keys, sizes=found.sizes, num_fields=found.num_fields, labels=numbers
    )
    return SourceScan(samples=table, classes=classes)


def _number_labels(
    found: RecordScan, values: Sequence[Any], classes: Sequence[str] | None
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return the labels of records, int64 [n], and the class names; no labels if no record has one."""
    path = found.records.path
    if all(value is None or (value == -1 and not isinstance(value, bool)) for value in values):
        return None, ()  # Hugging Face's mark of a missing label is -1, which test sets have in all rows.
    labels = [as_label(value) for value in values]
    if found.classes:  # Integers have names there, which may have other numbers here.
        labels = [_name_label(found.classes, label) for label in labels]
    if None in labels:
        row = labels.index(None)
        raise PackError(
            f"{found.records.describe(row)} of {path} has the label {values[row]!r}: it must be a class name or an "
            "integer"
        )
    known = [label for label in labels if label is not None]
    return number_labels(path, known, known, classes or found.classes or None)


def _name_label(classes: Sequence[str], label: int | str | None) -> int | str | None:
    return classes[label] if isinstance(label, int) and 0 <= label < len(classes) else label


_opened: list[tuple[Records, RecordReader]] = []
"""The dataset that is open in this process, and its reader."""


def _open(records: Records) -> RecordReader:
    """Open a dataset, or return the reader of the one that is open.

    Raises:
        FileChangedError: If its files have changed since the scan.
    """
    if _opened and _opened[0][0] is records:  # Comparing the names of thousands of files takes milliseconds.
        return _opened[0][1]
    if _opened and _opened[0][0] == records:
        reader = _opened[0][1]
    else:
        for file in records.files:
            check_unchanged(file)
        reader = records.open()
    _opened[:] = [(records, reader)]
    return reader
