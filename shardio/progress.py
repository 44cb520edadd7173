"""The interface through which long-running work reports its progress."""

from __future__ import annotations


class WorkProgress:
    """A receiver of progress reports that ignores them. Subclasses override its methods."""

    def start(self, total: int, num_bytes: int | None = None) -> None:
        """Receive the number of items to process and, if known, their size in bytes. Called once, at the start."""

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        """Receive the number of items done since the last call, their size in bytes, and their number of samples."""
