"""Some samples as they were read: a column of contents for each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

from shardio.sample import Sample

Columns = Mapping[str, Sequence[bytes | None]]
"""By field, the content of each sample, or None where a sample lacks the field."""


class StoredSamples(Sequence[Sample]):
    """Samples held by column, so that many small ones cost little; one by one on demand.

    Args:
        columns: The contents by field, in the order that the fields were asked for.
        number: How many samples there are.
        describe: Returns the key of one of them, and where some of its fields lie.
        list_keys: Returns the keys of all of them.
    """

    def __init__(
        self,
        columns: Columns,
        number: int,
        *,
        describe: Callable[[int, Sequence[str]], tuple[str, str]],
        list_keys: Callable[[], list[str]],
    ) -> None:
        self.columns = columns
        self._number = number
        self._describe = describe
        self._list_keys = list_keys

    def keys(self) -> list[str]:
        """Return the samples' keys."""
        return self._list_keys()

    def describe(self, row: int, fields: Sequence[str] | None = None) -> tuple[str, str]:
        """Return a sample's key and where some of its fields lie, for messages; by default those that were read."""
        return self._describe(row, tuple(self.columns) if fields is None else fields)

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, row: int) -> Sample: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Sample]: ...
    def __getitem__(self, row: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._number))]
        if not -self._number <= row < self._number:
            raise IndexError(f"sample {row} of {self._number}")
        row %= self._number
        key, origin = self.describe(row)
        fields = {field: content for field, column in self.columns.items() if (content := column[row]) is not None}
        return Sample(key=key, fields=fields, origin=origin)
