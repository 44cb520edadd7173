"""Watch the memory of worker processes, because the user's own code may leak it."""

from __future__ import annotations

import os
import warnings

GROWTH_BYTES = 1 << 30
"""A worker process may use twice its initial memory and this much more before a warning."""


def read_private_bytes() -> int:
    """Return the anonymous memory of this process in bytes, including what the fork server had; 0 if it is unknown.

    Slots and files are not counted.
    """
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # A Path would take three times as long.
            pages = file.read().split()
    except OSError:  # /proc is not mounted.
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """The latest memory of each worker process of a pool.

    Args:
        warns: Whether to warn of growth.

    Attributes:
        bytes_by_worker: The memory of each living worker process, by its id.
    """

    def __init__(self, *, warns: bool) -> None:
        self.bytes_by_worker: dict[int, int] = {}
        self._warns = warns
        self._firsts: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def record(self, worker_id: int, num_bytes: int) -> None:
        """Note the memory of a worker process; warn when it has grown much, and whenever it has doubled after that."""
        self.bytes_by_worker[worker_id] = num_bytes
        first = self._firsts.setdefault(worker_id, num_bytes)
        if self._warns and num_bytes > self._limits.setdefault(worker_id, 2 * first + GROWTH_BYTES):
            self._limits[worker_id] = 2 * num_bytes
            warnings.warn(
                f"a worker process uses {_describe(num_bytes)} of memory, {_describe(num_bytes - first)} more than at "
                "its start. If it keeps growing, your transform, decoders or collate_fn leak memory: watch "
                "loader.stats().worker_bytes",
                RuntimeWarning,
                stacklevel=2,
            )

    def forget(self, worker_id: int) -> str:
        """Stop watching a worker process that has died, and return what its memory was, for messages."""
        self._firsts.pop(worker_id, None)
        self._limits.pop(worker_id, None)
        num_bytes = self.bytes_by_worker.pop(worker_id, 0)
        return f" (it used {_describe(num_bytes)} of memory before its last chunks)" if num_bytes else ""


def _describe(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
