"""Samples that are files, in columns: a million of them take about 150 MB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.packing.sources.files import FileProblem, SourceFile, find_change, read_unchanged
from shardio.sample import Sample
from shardio.shards import BLOCK, LABEL_FIELD, fits_plain_header, join_name, make_header

PART = 4096
"""The number of samples whose names are handled together."""


class FileName(NamedTuple):
    """How a file's path follows from its sample's stem: prefix, stem, suffix; and the field that the file becomes."""

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
        stems: Their files' paths below the source, without prefix and suffix. Usually these are the keys.
        kinds: The kinds of samples: for each, the names of its files, sorted by field.
        kind_ids: int32 [n], the kind of each sample.
        first_files: int64 [n + 1], where the files of each sample begin in ``sizes`` and ``mtimes_ns``.
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
