"""An epoch's batches from torch's loader, made in its workers or in the calling process."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardio.interruptions import is_interruption
from shardio.loader.failures import Failure


class TorchBatches:
    """The batches of one of torch's iterators.

    Args:
        batches: torch's iterator.
        forget: Releases torch's iterator if its workers persist.
    """

    def __init__(self, batches: _BaseDataLoaderIter, forget: Callable[[], None]) -> None:
        self._batches: _BaseDataLoaderIter | None = batches
        self._forget = forget
        self._latest = weakref.ref(batches)

    @property
    def members(self) -> Sequence[Any]:
        """The worker processes."""
        return getattr(self._latest(), "_workers", ())

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

    def close(self) -> None:
        """Release the workers, unless they persist for the next epoch."""
        self._batches = None

    def end_workers(self) -> None:
        """End the workers, also those that persist."""
        self.close()
        self._forget()  # torch's iterator ends them when its last reference goes.


def _is_of_a_batch(error: Exception) -> bool:
    """Return whether an error of torch's iterator comes from one batch, not from the sampler or a dead worker."""
    functions = (ExceptionWrapper.reraise, _MapDatasetFetcher.fetch, _IterableDatasetFetcher.fetch)
    of_batches = {function.__code__ for function in functions}
    return any(frame.f_code in of_batches for frame, _ in traceback.walk_tb(error.__traceback__))
