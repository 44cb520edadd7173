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
from shardio.packing.names import check_field
from shardio.packing.sources.files import FileProblem, SourceFile, check_unchanged, find_change
from shardio.packing.sources.keys import Described, make_keys
from shardio.packing.sources.label_files import find_labels, number_labels, read_label
from shardio.packing.sources.selection import divide
from shardio.packing.sources.source import SourceOptions, SourceScan, SourceTable
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
    """A dataset of another tool. Worker processes receive it, and open it themselves: it holds paths and names."""

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
        ignored: What does not belong to a record, as paths below the dataset.
        is_selected: bool [n], the records to pack; None for all.
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
class RecordSample:
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
                check_field(self.key, name)  # It comes from the name of a column.
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
    """The records of a dataset in its order: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        records: The dataset.
        keys: The keys of the records.
        sizes: int64 [n], the size of each record's fields in bytes.
        tar_sizes: int64 [n], the size of each record in a tar in bytes.
        labels: int64 [n]; None if the records have none, or have them among their fields.
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
    selected = found.is_selected if found.is_selected is not None else np.ones(num_records, np.bool_)
    rows = np.flatnonzero(selected)
    if options.labels is not None:
        numbers, classes = find_labels(options.labels, [keys[row] for row in rows.tolist()], options.classes)
    elif found.labels is not None:
        numbers, classes = number_record_labels(
            path, found.records, found.labels, found.classes, options.classes, is_selected=selected
        )
    elif options.classes is not None:
        raise PackError(f"classes are given, but {path} has no labels: omit --classes (classes=…)")
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


def number_record_labels(
    path: Path,
    records: Described,
    values: Sequence[Any],
    names: Sequence[str],
    classes: Sequence[str] | None,
    *,
    is_selected: NDArray[np.bool_],
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return the labels of selected records, int64 [k], and the class names; no labels if no selected one has a label.

    Args:
        path: The dataset, for messages.
        records: Names the records in messages.
        values: The label of each record, an integer or a class name.
        names: The class names by label, if the dataset has them.
        classes: The class names that define the labels; None to find them in the dataset, among all records, so that
            all splits number their classes in the same way.
        is_selected: bool [n], the records.

    Raises:
        PackError: If a label is missing or invalid, or class names and integers are mixed.
    """
    labels = list[int | str | None]()
    try:
        labels.extend(map(read_label, values))
    except ValueError as error:
        raise PackError(f"{records.describe(len(labels))} of {path} has {error}") from error
    rows = np.flatnonzero(is_selected).tolist()
    if all(labels[row] in (None, -1) for row in rows):
        return None, ()  # Hugging Face's mark of a missing label is -1, which test sets have in all rows.
    if names:  # Integers have names there, which may have other numbers here.
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
    """Close the dataset that is open in this process, if there is one: some can be opened only once."""
    _opened.close()


class _Opened:
    """The dataset that is open in this process: opening one for each sample would be slow."""

    def __init__(self) -> None:
        self._records: Records | None = None
        self._reader: RecordReader | None = None

    def get(self, records: Records) -> RecordReader:
        """Open a dataset, or return the one that is open.

        Raises:
            FileChangedError: If its files have changed since the scan.
        """
        # The samples of a shard share the object. Comparing the values takes long for thousands of files.
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
