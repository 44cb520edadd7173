"""The interface by which long work reports its progress."""

from __future__ import annotations


class PackProgress:
    """A receiver of progress reports during a pack, which ignores them. Subclasses override methods."""

    def planned(self, num_samples: int, num_bytes: int) -> None:
        """Receive the totals; called once, before the first shard is written."""

    def packed(self, num_samples: int, num_bytes: int) -> None:
        """Receive the number of samples and bytes that were packed since the last call, or that were kept."""
