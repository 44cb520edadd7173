"""A cache for parts of indexes that were read, within a memory budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

MAX_BYTES = 64 * 2**20
"""The maximum memory in bytes for the parts of indexes that one reader keeps. The default order needs less for shards
of 20,000 samples with two fields each."""


class PartCache:
    """Keeps parts of indexes in memory, and drops the least recently used ones first.

    There is no lock, because a forked child could inherit it locked. Each operation on the dictionary is atomic, and
    two threads that need the same part at the same time both read it.

    Args:
        max_bytes: The maximum memory of all parts in bytes. Each part counts as much as the largest one.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._largest = 1
        self._parts: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, name: Hashable) -> Any:
        """Return a part, or None if it is not in the cache."""
        part = self._parts.get(name)
        if part is not None:
            with suppress(KeyError):  # Another thread has dropped it.
                self._parts.move_to_end(name)
        return part

    def add(self, name: Hashable, part: Any, num_bytes: int) -> None:
        """Add a part, and drop the least recently used parts that no longer fit."""
        self._largest = max(self._largest, num_bytes)
        self._parts[name] = part
        with suppress(KeyError):
            while len(self._parts) > max(1, self._max_bytes // self._largest):
                self._parts.popitem(last=False)

    def clear(self) -> None:
        """Drop all parts."""
        self._parts.clear()
