"""What was read of indexes: parts of them, as many as fit a budget of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

MAX_BYTES = 64 * 2**20
"""Memory of one reader for parts of indexes, in bytes: more than the default order uses at a time of shards of 20,000
samples with two fields each."""


class PartCache:
    """Parts of indexes in memory, least recently used out first.

    It has no lock, which a forked child could find taken: each step on the dictionary is atomic, and a part that two
    threads read at the same time is only read twice.

    Args:
        max_bytes: The memory that parts may take. All are taken to be as large as the largest.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._largest = 1
        self._parts: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, name: Hashable) -> Any:
        """Return a part, or None."""
        part = self._parts.get(name)
        if part is not None:
            with suppress(KeyError):  # Another thread has dropped it meanwhile.
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
