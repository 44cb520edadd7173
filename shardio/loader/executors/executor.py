"""The interface of executors, through which a DataLoader gets its batches.

To add an executor, write it in a file of its own and return it from :mod:`shardio.loader.executors.choice`.
"""

from __future__ import annotations

from typing import Any, Protocol

from shardio.loader.stats import LoaderStats
from shardio.order import Cursor, Split


class BatchIterator(Protocol):
    """The batches of one epoch, in their order."""

    def __next__(self) -> Any:
        """Return the next batch, or a Failure in its place: the batch after it can still be requested.

        Raises:
            StopIteration: If there is none.
            BaseException: Any other error ends the epoch. Nothing is requested after it.
        """

    def close(self) -> None:
        """Stop; drop batches that were made ahead."""


class Executor(Protocol):
    """Makes the batches of one loader, epoch after epoch."""

    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        """Begin an epoch; return its batches.

        Args:
            cursor: Where the epoch begins; None if the order is not shardio's but that of the loader's sampler.
            split: This rank's share from there on; None in the same case.
        """

    def stats(self) -> LoaderStats | None:
        """Return what happened in the epoch that began last; None if this executor has no statistics."""
