"""Read samples of several readers as if there were one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from shardio.errors import SampleError
from shardio.reading.files import FileReader
from shardio.reading.reader import SampleReader
from shardio.reading.stored import StoredSamples

Value = TypeVar("Value")
LocatedSample = tuple[int, Any]
"""The place of a reader among those that were joined, and what it needs to find the sample."""


class JoinedReader:
    """A reader of samples that belong to several readers.

    Args:
        readers: The readers.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    def read(self, samples: Sequence[LocatedSample], fields: Sequence[str]) -> StoredSamples:
        """Read some fields of some samples.

        Args:
            samples: n samples of any of the readers.
            fields: The names of the fields to read. The result omits fields that a sample lacks.

        Raises:
            SampleError: If a sample cannot be read.
        """
        columns: dict[str, list[bytes | None]] = {}
        found: list[tuple[list[int], StoredSamples]] = []
        parts = np.array([part for part, _ in samples], np.int64)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part).tolist()
            try:
                stored = self._readers[part].read(self._take(part, [samples[row][1] for row in rows]), fields)
            except SampleError as error:
                raise error.at_row(rows[error.row]) from error
            found.append((rows, stored))
            for field, contents in stored.columns.items():
                _put(contents, columns.setdefault(field, [None] * len(samples)), rows)
        return StoredSamples(
            columns,
            len(samples),
            describe=lambda row, some: self.describe(samples[row], some),
            list_keys=partial(_list_keys, found, len(samples)),
        )

    def describe(self, sample: LocatedSample, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and where some of its fields are stored, for messages."""
        part, inner = sample
        return self._readers[part].describe(inner, fields)

    def close(self) -> None:
        """Close all files. The next read reopens them."""
        for reader in self._readers:
            reader.close()

    def _take(self, part: int, samples: list[Any]) -> Any:
        """Return what a reader needs to find samples: an array of indices, or a list."""
        return np.array(samples, np.int64) if isinstance(self._readers[part], SampleReader) else samples


def _list_keys(found: Sequence[tuple[list[int], StoredSamples]], num_samples: int) -> list[str]:
    keys = [""] * num_samples
    for rows, stored in found:
        _put(stored.keys(), keys, rows)
    return keys


def _put(values: Sequence[Value], column: list[Value], rows: Sequence[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        column[row] = value


Reader = SampleReader | FileReader | JoinedReader
