"""Some of the samples of a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.source import SourceSample, SourceTable


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
