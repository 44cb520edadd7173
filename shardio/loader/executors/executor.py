"""The interface of executors, through which a DataLoader gets its batches.

To add an executor, write it in its own file and return it from :mod:`shardio.loader.executors.choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shardio.loader.stats import LoaderStats
from shardio.order import Cursor, Split


class BatchIterator(Protocol):
    """The batches of one epoch, in their order.

    The iterator that the user gets has the same methods: it raises the error of a Failure, and may be asked for further
    batches after its end. ``tests/loader/iterator_laws.py`` checks any iterator against this interface.

    An iterator over what a sampler yields also has ``indices``, which iterates over the rest of it.

    Where the loader has a state, a batch counts when the user receives it, which :mod:`shardio.handover` tells, and a
    failed one when the next one is requested. Neither :meth:`is_ready` nor :meth:`close` counts any.
    """

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead. After a Failure, the next batch can still be requested.

        Raises:
            StopIteration: If the epoch has no further batch. An epoch whose helper has ended does not end like this:
                either another helper makes the batches, or an error says what has happened.
            BaseException: If the epoch ends with an error. Nothing may be requested after it.
        """

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether a request would be answered at once.

        The answer is a batch, a Failure, an error or the end. True if only a request can tell: where the calling
        process makes the batches, or torch's iterator.
        """

    def close(self) -> None:
        """End the epoch; drop batches that were made ahead. Further calls do nothing.

        Workers end, unless they persist for the next epoch.
        """

    def end_workers(self) -> None:
        """End the epoch and the workers, also those that persist. No other epoch may have begun since."""

    @property
    def members(self) -> Sequence[Any]:
        """The processes or threads that call the user's dataset; none if shardio's own code makes the samples."""


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
