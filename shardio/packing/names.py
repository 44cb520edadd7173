"""Check keys and field names before they are written, and find keys that occur twice."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from unicodedata import category

import numpy as np

from shardio.shards import ShardTable, join_name, read_keys, split_name
from shardio.storage import Location


def check_name(key: object, field: object) -> tuple[str, str]:
    """Return a key and a field name, after checking that every reader of the tar finds them again.

    Raises:
        TypeError: If one of them is not a string.
        ValueError: If readers would split the member's name differently, or the key is not a relative path. The message
            says how to change it.
    """
    key = check_key(key)
    return key, check_field(key, field)


def check_field(key: str, field: object) -> str:
    """Return a field name, after checking that readers find it and the key again.

    Args:
        key: The key of the sample, which other tools may have made.
        field: The name.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it cannot be a field name.
    """
    if not isinstance(field, str):
        raise TypeError(f"the field names of sample {key!r} must be strings such as 'jpg', got {field!r}")
    if not field or "/" in field or not _is_printable(field):
        raise ValueError(
            f"the field name {field!r} of sample {key!r} is empty, or contains a slash, a control character or a "
            "surrogate: use a file suffix such as 'jpg' or 'seg.png'"
        )
    if field != field.lower():
        raise ValueError(
            f"the field name {field!r} of sample {key!r} contains capital letters, which readers convert to lower "
            f"case: use {field.lower()!r}"
        )
    if split_name(join_name(key, field)) != (key, field):
        raise ValueError(f"field {field!r} of sample {key!r} would be read as {split_name(join_name(key, field))}")
    return field


def check_key(key: object) -> str:
    """Return a key, after checking it.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it cannot be a key.
    """
    if not isinstance(key, str):
        raise TypeError(f"__key__ must be a string such as 'cats/0001', got {key!r}")
    folder, _, base = key.rpartition("/")
    if not base:
        raise ValueError(f"the key {key!r} is empty or ends in a slash: use a name such as 'cats/0001'")
    if "." in base:
        raise ValueError(
            f"the key {key!r} has a dot after its last slash, but a key ends there at the first dot, so the rest would "
            f"be read as part of the field's name: use {folder + '/' * bool(folder) + base.replace('.', '_')!r}"
        )
    if not _is_printable(key):
        raise ValueError(f"the key {key!r} contains a control character or a surrogate: remove it")
    if key.startswith("/") or {"", ".", ".."} & set(key.split("/")):
        raise ValueError(f"the key {key!r} is not a plain relative path: use a key such as 'cats/0001'")
    if split_name(join_name(key, "x")) is None:
        raise ValueError(f"the key {key!r} starts with a name such as __meta__, which readers skip: use another name")
    return key


def _is_printable(text: str) -> bool:
    return (text.isascii() and text.isprintable()) or not any(category(letter) in ("Cc", "Cs") for letter in text)


_START = 1024


class KeyHashes:
    """A set of 64-bit hashes. It takes 16 to 32 bytes for each hash (Python's own set: about 70)."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _START))  # Open addressing. 0 means empty.
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, key_hash: int) -> bool:
        """Add a hash. Return whether it is new."""
        if 2 * self._num >= len(self._table):
            self._grow()
        if not _place(self._table, key_hash or 1):
            return False
        self._num += 1
        return True

    def _grow(self) -> None:
        table = array("Q", bytes(16 * len(self._table)))
        for value in self._table:
            if value:
                _place(table, value)
        self._table = table


def _place(table: array[int], value: int) -> bool:
    """Put a value into a table; return False if it is there already."""
    mask = len(table) - 1
    place = value & mask
    while found := table[place]:
        if found == value:
            return False
        place = (place + 1) & mask
    table[place] = value
    return True


def find_duplicate(tables: Sequence[ShardTable]) -> tuple[str, Location, Location] | None:
    """Return a key that two samples of some datasets have, and the two tars; None if all keys differ.

    Only the indexes are read. Memory holds the hashes of all keys: 8 bytes each, and 16 bytes while they are sorted.

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
