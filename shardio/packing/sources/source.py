"""The interface of a source: the options for reading it, its samples, and the result of its scan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.images import CONVERTIBLE, IMAGE_FIELDS, IMAGE_FORMATS
from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.labels import ALL_SPLITS, LabelFile
from shardio.packing.sources.layouts import Layout, OnIncomplete
from shardio.sample import Sample
from shardio.storage import make_path

SourceKind = Literal["auto", "files", "lmdb", "litdata", "mds", "parquet", "saved", "table", "tars"]
"""The kind of a source. ``files``: a directory of images, or of other files. ``saved``: a directory that
``save_to_disk`` of ``datasets`` wrote. ``table``: a table of paths. ``auto``: recognised by its files."""


class Evidence(NamedTuple):
    """A file that shows the kind of a source, and whether it holds samples. If not, the caller must choose the kind."""

    file: Path
    holds_samples: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options for reading a source.

    Attributes:
        source_kind: The kind of the source.
        layout: The layout of a directory.
        source_split: The split to pack, of a source that holds several; ``all`` for all of them.
        on_incomplete: The treatment of a sample that lacks a file that others have, in the layout ``pairs``.
        rename_dots: Whether each dot in the stem of a file or key becomes an underscore.
        prefix_keys: Whether the name of its tar is put before each key.
        classes: The class names that define the labels; None to find them in the source.
        labels: The file that labels the samples; None to find the labels in the source.
        fields: The fields to pack from a directory: the suffixes of a sample's files. Each sample must have the first.
            None packs images, and the files that have the same stem as an image.
        converts: Whether images in all formats that Pillow reads are packed, because they are converted.
        image_column: The column with images, in a source that has columns; None to find it.
        label_column: The column with labels; None to find it.
        key_column: The column with keys; None to number the samples.
    """

    source_kind: SourceKind = "auto"
    layout: Layout = "auto"
    source_split: str | None = None
    on_incomplete: OnIncomplete = "raise"
    rename_dots: bool = False
    prefix_keys: bool = False
    classes: Sequence[str] | None = None
    labels: LabelFile | None = None
    fields: tuple[str, ...] | None = None
    converts: bool = False
    image_column: str | None = None
    label_column: str | None = None
    key_column: str | None = None

    def __post_init__(self) -> None:
        if self.on_incomplete != "raise" and self.layout != "pairs":
            raise ValueError("--on-incomplete (on_incomplete) applies only to --layout pairs (layout='pairs'): omit it")
        if self.source_split == "":
            raise ValueError("--source-split (source_split) is empty: pass the name of a folder, or 'all'")
        if self.fields is not None and not (self.fields and all(self.fields)):
            raise ValueError(f"--fields (fields) must be suffixes such as wav and txt, got {self.fields!r}")

    @property
    def main_fields(self) -> frozenset[str]:
        """The fields that make a file a sample, which also has the files with the same stem."""
        if self.fields is not None:
            return frozenset(self.fields[:1])
        return CONVERTIBLE.union(IMAGE_FORMATS) if self.converts else frozenset(IMAGE_FORMATS)

    @property
    def description(self) -> str:
        """The main fields in words, for messages about their absence."""
        if self.fields is not None:
            return f".{self.fields[0]} files, which --fields (fields) names first"
        others = "" if self.converts else f"; --convert-to (convert_to) also takes {', '.join(sorted(CONVERTIBLE))}"
        return f"images that can be packed (supported: {', '.join(IMAGE_FIELDS)}{others})"


def make_options(
    *,
    fields: Sequence[str] | None,
    labels: str | os.PathLike[str] | None,
    label_column: str | None,
    key_column: str | None,
    **options: Any,
) -> SourceOptions:
    """Return options, given the arguments of a call.

    Args:
        fields: The fields to pack from a directory; None for images. A string is not a list of fields.
        labels: The file of labels, which then has the two columns; None if the source has them.
        label_column: The column with labels.
        key_column: The column with keys.
        options: Further attributes of SourceOptions.
    """
    if isinstance(fields, str):
        raise TypeError(f"fields must be a list of suffixes such as ['wav', 'txt'], got {fields!r}")
    options["fields"] = None if fields is None else tuple(field.lower().removeprefix(".") for field in fields)
    if labels is None:
        return SourceOptions(label_column=label_column, key_column=key_column, **options)
    file = LabelFile(
        path=make_path(labels),
        key_column=key_column,
        label_column=label_column,
        may_mix_splits=options.get("source_split") == ALL_SPLITS,
    )
    return SourceOptions(labels=file, **options)


class SourceSample(Protocol):
    """A sample before packing. It can be pickled, and read in another process."""

    @property
    def key(self) -> str:
        """Its key."""

    def read(self) -> Sample:
        """Return the sample with its fields.

        Raises:
            FileChangedError: If the source has changed since the scan.
            PackError: If it cannot be read.
        """

    def problem(self, field: str, what: str) -> FileProblem:
        """Return a problem of a field, with the place in the source that the field comes from."""


class SourceTable(Protocol):
    """The samples of a source, in the order in which they are packed without shuffling."""

    @property
    def root(self) -> str:
        """The prefix of the names of files in messages, which ends in a slash."""

    @property
    def keys(self) -> Sequence[str]:
        """Their keys, all different."""

    @property
    def num_bytes(self) -> int:
        """The size of all samples in the source, in bytes."""

    def __len__(self) -> int: ...

    def sizes_in_tar(self) -> NDArray[np.int64]:
        """Return the size of each sample in a tar, in bytes, int64 [n]. It may be an estimate."""

    def digest(self) -> bytes:
        """Return a hash of everything that decides the output: keys, labels, and the state of the source's files."""

    def take(self, rows: NDArray[np.int64]) -> Sequence[SourceSample]:
        """Return some samples.

        Args:
            rows: int64 [k].
        """

    def find_changes(self) -> Iterator[FileProblem]:
        """Yield the source's files that have changed since the scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScan:
    """The contents of a source.

    Attributes:
        samples: The samples to pack.
        classes: The class names in the order of their labels; empty if labels have no names.
        ignored: Files that do not belong to a sample.
        suffixed: The keys that end in the file's suffix, because another image has the same name except for its suffix.
    """

    samples: SourceTable
    classes: tuple[str, ...]
    ignored: Sequence[Path] = ()
    suffixed: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows of a table: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        table: The table.
        rows: int64 [n], the rows in ascending order.
        keys: Their keys.
        tar_sizes: int64 [n], their sizes in a tar in bytes.
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


def divide(table: SourceTable, numbers: NDArray[np.int64], num_parts: int) -> list[Selection]:
    """Return the rows of each part of a table.

    Args:
        table: The table.
        numbers: int64 [n], the number of the part of each row.
        num_parts: The number of parts.
    """
    sizes, selections = table.sizes_in_tar(), list[Selection]()
    for number in range(num_parts):
        rows = np.flatnonzero(numbers == number)
        keys = [table.keys[row] for row in rows.tolist()]
        selections.append(Selection(table=table, rows=rows, keys=keys, tar_sizes=sizes[rows]))
    return selections
