"""The interface by which long work reports its progress."""

from __future__ import annotations


class WorkProgress:
    """Receives the progress of long work and ignores it. Subclasses override its methods."""

    def start(self, total: int, num_bytes: int | None = None) -> None:
        """Receive the number of things to do, and their size in bytes if it is known; called once, before the first."""

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        """Receive the number of things done since the last call, their size in bytes, and their number of samples."""
