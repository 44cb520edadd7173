"""An executor that runs torch's own iterator, for orders that are not shardio's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from shardio.interruptions import no_end
from shardio.loader.executors.torch_batches import TorchBatches
from shardio.order import Cursor, Split


class TorchLoader:
    """An executor that iterates a loader as torch's DataLoader does, in its sampler's or its dataset's own order.

    Args:
        loader: The loader, which owns this executor.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)  # Weak, so that workers end as soon as the loader is released.
        self._persistent: _BaseDataLoaderIter | None = None

    def start(self, cursor: Cursor | None, split: Split | None) -> TorchBatches:
        """Begin an epoch and return its batches."""
        loader: Any = self._loader()
        assert loader is not None, "the loader owns this executor"
        # torch's loader does the same, but a subclass may override its methods.
        with _endless_collate(loader):
            if (iterator := self._persistent) is not None:
                iterator._reset(loader)
            else:
                kind = _MultiProcessingDataLoaderIter if loader.num_workers else _SingleProcessDataLoaderIter
                iterator = kind(loader)
        self._persistent = iterator if loader.persistent_workers else None
        return TorchBatches(iterator, self._forget)

    def start_workers(self) -> None:
        """Do nothing: torch starts its workers when the epoch begins."""

    def stats(self) -> None:
        """Return None, because torch does not time the stages."""
        return

    def _forget(self) -> None:
        self._persistent = None


@dataclass(frozen=True, slots=True)
class CollateEndless:
    """A collate function that raises RuntimeError if the user's function raises StopIteration.

    Attributes:
        collate: The user's function.
    """

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except StopIteration as error:
            raise no_end(error) from error


@contextmanager
def _endless_collate(loader: Any) -> Iterator[None]:
    """Use CollateEndless in iterators that torch creates in the block."""
    collate_fn = loader.collate_fn
    loader.collate_fn = CollateEndless(collate_fn)
    try:
        yield
    finally:
        loader.collate_fn = collate_fn
