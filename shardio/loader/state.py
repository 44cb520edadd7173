"""shardio's order in a loader: the next epoch, and the position that a run saves and resumes from."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from shardio.datasets import EpochSampler, ShardDataset
from shardio.loader.executors.settings import find_override
from shardio.order import EpochCounter


class LoaderOrder:
    """shardio's order in one loader, and the loader's progress in it.

    Attributes:
        ordered: The dataset or sampler that holds the order.
    """

    def __init__(self, ordered: ShardDataset | EpochSampler) -> None:
        self.ordered = ordered
        self._counter = ordered.counter if isinstance(ordered, EpochSampler) else EpochCounter()
        self._num_epoch_sets = 0

    def copy(self) -> LoaderOrder:
        """Return the order for a copy of the loader. An EpochSampler counts for both, a ShardDataset for none."""
        other = LoaderOrder(self.ordered)
        if isinstance(self.ordered, ShardDataset):
            other._counter, other._num_epoch_sets = copy.deepcopy(self._counter), self._num_epoch_sets
        return other

    def update_counter(self) -> EpochCounter:
        """Apply ``set_epoch`` of the dataset or sampler; return the counter that determines the next epoch.

        An EpochSampler has its own counter, so its ``set_epoch`` works too. A ShardDataset may serve several loaders,
        so each loader has a counter, which follows the dataset's ``set_epoch``.
        """
        if isinstance(self.ordered, ShardDataset) and self.ordered.num_epoch_sets != self._num_epoch_sets:
            self._num_epoch_sets = self.ordered.num_epoch_sets
            self._counter.set_epoch(self.ordered.epoch)
        return self._counter


def find_order(loader: Any) -> LoaderOrder | None:
    """Return the order of a loader's samples; None if it is not shardio's."""
    if find_override(loader) is not None:
        return None
    if isinstance(loader.dataset, ShardDataset):
        return LoaderOrder(loader.dataset)
    # A subclass that overrides these methods has a different order.
    sampler = loader.sampler
    if isinstance(sampler, EpochSampler) and all(
        getattr(type(sampler), name) is getattr(EpochSampler, name) for name in ("__iter__", "__len__")
    ):
        return LoaderOrder(sampler)
    return None


class OrderSampler(torch.utils.data.Sampler[None]):
    """The sampler of a ShardDataset's loader. It yields no indices: frameworks call its ``set_epoch``."""

    def __init__(self, order: LoaderOrder) -> None:
        self._order = order

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's next ``iter``."""
        self._order.update_counter().set_epoch(epoch)
