"""Samples as read from storage, with a column of contents for each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

from shardio.sample import Sample

Columns = Mapping[str, Sequence[bytes | None]]
"""For each field, the content of each sample, or None if the sample lacks the field."""


class StoredSamples(Sequence[Sample]):
    """Samples in columns, so that many small ones cost little. Single samples are created on demand.

    Args:
        columns: The contents by field, in the order in which the fields were requested.
        num_samples: The number of samples.
        describe: A function that returns the key of the sample in a row, and where some of its fields are stored.
        list_keys: A function that returns the keys of all samples.
        remedy: What else to do about a sample that lacks a field, for messages.
    """

    def __init__(
        self,
        columns: Columns,
        num_samples: int,
        *,
        describe: Callable[[int, Sequence[str]], tuple[str, str]],
        list_keys: Callable[[], list[str]],
        remedy: str = "",
    ) -> None:
        self.columns = columns
        self.remedy = remedy
        self._num_samples = num_samples
        self._describe = describe
        self._list_keys = list_keys

    def keys(self) -> list[str]:
        """Return the samples' keys."""
        return self._list_keys()

    def describe(self, row: int, fields: Sequence[str] | None = None) -> tuple[str, str]:
        """Return a sample's key and where some of its fields (by default, those read) are stored, for messages."""
        return self._describe(row, tuple(self.columns) if fields is None else fields)

    def __len__(self) -> int:
        return self._num_samples

    @overload
    def __getitem__(self, row: int) -> Sample: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Sample]: ...
    def __getitem__(self, row: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._num_samples))]
        if not -self._num_samples <= row < self._num_samples:
            raise IndexError(f"row {row} is out of range: there are {self._num_samples} samples")
        row %= self._num_samples
        key, origin = self.describe(row)
        fields = {field: content for field, column in self.columns.items() if (content := column[row]) is not None}
        return Sample(key=key, fields=fields, origin=origin)
