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
    """

    table: SourceTable
    rows: NDArray[np.int64]
    keys: Sequence[str]

    @property
    def root(self) -> str:
        return self.table.root

    @property
    def num_bytes(self) -> int:
        return int(self.sizes_in_tar().sum())

    def __len__(self) -> int:
        return len(self.rows)

    def sizes_in_tar(self) -> NDArray[np.int64]:
        return self.table.sizes_in_tar()[self.rows]

    def digest(self) -> bytes:
        return xxhash.xxh3_128(self.table.digest() + self.rows.tobytes()).digest()

    def take(self, rows: NDArray[np.int64]) -> Sequence[SourceSample]:
        return self.table.take(self.rows[rows])

    def find_changes(self) -> Iterator[FileProblem]:
        return self.table.find_changes()


def select(table: SourceTable, rows: NDArray[np.int64]) -> Selection:
    """Return some rows of a table, int64 [n] in ascending order."""
    return Selection(table=table, rows=rows, keys=[table.keys[row] for row in rows.tolist()])
