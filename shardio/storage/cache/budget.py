"""Keep a cache's folder within its size: copies that were not used for the longest time are removed first."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from shardio.locks import WorkLock

COPY_SUFFIX = ".copy"
"""The suffix of the files that hold copies. Nothing else in the folder is removed."""

LOCK_NAME = ".lock"
"""The lock of the processes that change which copies exist."""

GRANTS = 256
"""A process reserves space in grants of the cache's size divided by this number, because each grant costs a scan."""

SLACK = 16
"""The grants that may be reserved and not yet used, by all processes together, when copies are removed."""

PATIENCE_S = 10.0
"""How long to wait for another process that makes room, in seconds. Without it, a little too much may be removed."""

MAX_GRANT = 64 * 2**20
"""The largest grant in bytes."""


class Budget:
    """The space in a cache's folder that this process may use. Threads share it.

    Args:
        folder: The folder.
        max_bytes: The cache's size in bytes.
        file_mode: The permissions of its files.
    """

    def __init__(self, folder: Path, max_bytes: int, file_mode: int = 0o600) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._room_lock = WorkLock(folder / LOCK_NAME, PATIENCE_S, file_mode)
        self._grant = max(1, min(max_bytes // GRANTS, MAX_GRANT))
        self._lock = threading.Lock()
        self._reserved = 0

    def reserve(self, num_bytes: int, in_use: str) -> None:
        """Reserve space for bytes that are about to be written. Remove copies if there is not enough.

        Args:
            num_bytes: The number of bytes.
            in_use: The path of the copy that grows, which is removed last.
        """
        with self._lock:
            if self._reserved < num_bytes:
                wanted = max(num_bytes - self._reserved, self._grant)
                with self._room_lock.held():
                    self._make_room(wanted, in_use)
                self._reserved += wanted
            self._reserved -= num_bytes

    def _make_room(self, num_bytes: int, in_use: str) -> None:
        copies = _list_copies(self.folder)
        used = sum(size for _, size, _ in copies)
        if used + num_bytes <= self.max_bytes - SLACK * self._grant:
            return
        # Down to a little less, so that not every grant removes copies.
        limit = self.max_bytes - 2 * SLACK * self._grant - num_bytes
        for _, size, path in sorted(copies):
            if used <= limit:
                return
            if path != in_use:
                with suppress(PermissionError):  # In some shared folders, each user may remove only own files.
                    with suppress(FileNotFoundError):
                        os.unlink(path)  # noqa: PTH108  # Many are removed, and a Path costs as much as the call.
                    used -= size


def _list_copies(folder: Path) -> list[tuple[int, int, str]]:
    """Return when each copy was last used, in nanoseconds, the space that it takes in bytes, and its path."""
    found = list[tuple[int, int, str]]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(COPY_SUFFIX):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_blocks * 512, entry.path))
    return found
