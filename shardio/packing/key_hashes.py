"""Find keys that occur twice, with a few bytes of memory for each key."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from shardio.shards import ShardTable, read_keys
from shardio.storage import Location

_START = 1024


class KeyHashes:
    """A set of 64-bit hashes. It takes 16 to 32 bytes for each (Python's own set: about 70)."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _START))  # An open-addressed table. 0 means empty.
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, key_hash: int) -> bool:
        """Add a hash. Return whether it is new."""
        if 2 * self._num >= len(self._slots):
            self._grow()
        if not _place(self._slots, key_hash or 1):
            return False
        self._num += 1
        return True

    def _grow(self) -> None:
        slots = array("Q", bytes(16 * len(self._slots)))
        for value in self._slots:
            if value:
                _place(slots, value)
        self._slots = slots


def _place(slots: array[int], value: int) -> bool:
    """Put a value into its slot; return False if it is there already."""
    mask = len(slots) - 1
    place = value & mask
    while found := slots[place]:
        if found == value:
            return False
        place = (place + 1) & mask
    slots[place] = value
    return True


def find_duplicate(tables: Sequence[ShardTable]) -> tuple[str, Location, Location] | None:
    """Return a key that two samples of some datasets have, and the two tars; None if all keys differ.

    Only the indexes are read. The keys' hashes are held in memory: 8 bytes each, and 16 bytes while they are sorted.

    Raises:
        FormatError: If an index is damaged.
    """
    tars = [tar for table in tables for tar in table.tars]
    indexes = [index for table in tables for index in table.indexes]
    hashes = [read_keys(index).hash_all() for index in indexes]
    together = np.sort(np.concatenate([np.zeros(0, np.uint64), *hashes]))
    suspects = np.unique(together[1:][together[1:] == together[:-1]])
    if not len(suspects):
        return None
    first = dict[str, Location]()
    for tar, index, of_shard in zip(tars, indexes, hashes, strict=True):
        rows = np.flatnonzero(np.isin(of_shard, suspects)).tolist()
        if not rows:
            continue
        keys = read_keys(index)
        for row in rows:
            key = keys.text(row)
            if key in first:
                return key, first[key], tar
            first[key] = tar
    return None
