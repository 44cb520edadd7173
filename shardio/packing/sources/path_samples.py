"""Samples that are files with a json field each, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.packing.sources.file_table import FileSample, FileTable, header_sizes
from shardio.packing.sources.files import FileProblem
from shardio.sample import Sample
from shardio.shards import BLOCK

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
        json_bounds: int64 [n + 1], where they start and stop.
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
