"""An epoch's batches from torch's loader, made in its workers or in the calling process."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from shardio.interruptions import is_interruption
from shardio.loader.failures import Failure


class TorchBatches:
    """The batches of one of torch's iterators.

    Args:
        batches: torch's iterator.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] | None = batches

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead."""
        assert self._batches is not None, "it was not closed"
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            raise
        except Exception as error:
            if not _is_of_a_batch(error) or is_interruption(error):  # Only an error in one batch is not the end.
                raise
            return Failure(error=error)
        return batch

    def is_ready(self, timeout_s: float) -> bool:
        """Return True: torch's iterator does not tell."""
        return True

    @property
    def members(self) -> Sequence[Any]:
        """The workers."""
        members: Sequence[Any] = getattr(self._batches, "_workers", ())
        return members

    def close(self) -> None:
        """Release the workers, unless they persist for the next epoch."""
        self._batches = None


def _is_of_a_batch(error: Exception) -> bool:
    """Return whether an error of torch's iterator comes from one batch, not from the sampler or a dead worker."""
    functions = (ExceptionWrapper.reraise, _MapDatasetFetcher.fetch, _IterableDatasetFetcher.fetch)
    of_batches = {function.__code__ for function in functions}
    return any(frame.f_code in of_batches for frame, _ in traceback.walk_tb(error.__traceback__))
