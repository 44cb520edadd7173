"""The interface of executors, through which a DataLoader gets its batches.

To add an executor, write it in its own file and return it from :mod:`shardio.loader.executors.choice`.
"""

from __future__ import annotations

from typing import Any, Protocol

from shardio.loader.stats import LoaderStats
from shardio.order import Cursor, Split


class BatchIterator(Protocol):
    """The batches of one epoch, in their order."""

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead. After a Failure, the next batch can still be requested.

        Raises:
            StopIteration: If the epoch has no further batch.
            BaseException: If the epoch ends with an error. Nothing may be requested after it.
        """

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead."""


class Executor(Protocol):
    """The interface of executors, which make the batches of one loader, epoch after epoch."""

    def start(self, cursor: Cursor | None, split: Split | None) -> BatchIterator:
        """Begin an epoch and return its batches.

        Args:
            cursor: Where the epoch begins; None if the order is not shardio's.
            split: This rank's share, from the cursor to the end; None in the same case.
        """

    def start_workers(self) -> None:
        """Start the workers of the next epoch now, unless only the epoch itself can start them."""

    def stats(self) -> LoaderStats | None:
        """Return the statistics of the latest epoch; None if this executor has none."""
