"""The parts of indexes that were read: as many as fit a memory budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

MAX_BYTES = 64 * 2**20
"""Bytes of memory that one reader uses for parts of indexes: more than the default order needs at a time for shards of
20,000 samples with two fields each."""


class PartCache:
    """Keeps parts of indexes in memory, and drops the least recently used ones first.

    There is no lock, because a forked child could find it taken: each step on the dictionary is atomic, and a part that
    two threads read at the same time is merely read twice.

    Args:
        max_bytes: The memory that parts may take, if each is as large as the largest.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._largest = 1
        self._parts: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, name: Hashable) -> Any:
        """Return a part, or None if it is not kept."""
        part = self._parts.get(name)
        if part is not None:
            with suppress(KeyError):  # Another thread has dropped it.
                self._parts.move_to_end(name)
        return part

    def add(self, name: Hashable, part: Any, num_bytes: int) -> None:
        """Keep a part."""
        self._largest = max(self._largest, num_bytes)
        self._parts[name] = part
        with suppress(KeyError):
            while len(self._parts) > max(1, self._max_bytes // self._largest):
                self._parts.popitem(last=False)

    def clear(self) -> None:
        """Drop all parts."""
        self._parts.clear()
