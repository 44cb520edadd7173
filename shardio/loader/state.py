"""The state of a loader: the next epoch, and the position that a run saves and resumes from."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from shardio.datasets import EpochSampler, MapDataset, ShardDataset
from shardio.epochs import set_epoch, set_epoch_of_parts
from shardio.loader.fetching.epochs import Epochs
from shardio.loader.fetching.fetchers import takes_arguments
from shardio.order import EpochCounter, check_epoch

NO_STATE = (
    "this loader has no state, because torch's own iterators make its batches: its saved state is empty, so a resumed "
    "run restarts the epoch"
)


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


def find_order(dataset: Any, sampler: Any) -> LoaderOrder | None:
    """Return the order of a loader's samples; None if it is not shardio's."""
    if isinstance(dataset, ShardDataset):
        return LoaderOrder(dataset)
    # A subclass that overrides these methods has a different order.
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


class Stateful:
    """A loader that counts the batches that the user received.

    If torch's own iterators make the batches, the state is empty, and a RuntimeWarning says so. This is not an error,
    because frameworks save the state of every loader that has the methods.
    """

    _order: LoaderOrder | None
    _epochs: Epochs
    sampler: Any
    batch_sampler: Any
    dataset: Any

    @property
    def _is_torchs(self) -> bool:
        """Whether torch's own iterators make the batches, unless the order is shardio's."""
        raise NotImplementedError  # Each loader has its own.

    @property
    def has_order(self) -> bool:
        """Whether the order of the samples is shardio's."""
        return self._order is not None

    @property
    def has_state(self) -> bool:
        """Whether the loader can save its position."""
        parts = (self.dataset, self.sampler, self.batch_sampler)
        return self.has_order or not (self._is_torchs or any(map(takes_arguments, parts)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``. Setting the loaded epoch keeps its position; another epoch drops it.

        (Without shardio's order, the loaded epoch is known if the sampler has a ``set_epoch``. Otherwise, every epoch
        keeps the position.)

        An epoch in flight continues, and ``state_dict`` describes it until the next ``iter``. This also calls
        ``set_epoch`` of other samplers and datasets.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If it is negative, or not below 2**62.
        """
        epoch = check_epoch(epoch)
        # shardio's map-style datasets have no order, and may serve several loaders.
        if self._order is None:
            self._epochs.set_epoch(epoch)
            set_epoch_of_parts(self, epoch, skip=(MapDataset,))
        else:
            self._order.update_counter().set_epoch(epoch)
            set_epoch(self.dataset, epoch, skip=(MapDataset, ShardDataset))

    def state_dict(self) -> dict[str, Any]:
        """Return the user's position.

        With shardio's order, it is a small JSON-serializable dict that fits any number of ranks and workers. Otherwise
        it has the keys of torchdata's StatefulDataLoader, with the states of the dataset, the sampler and their
        iterators if they have any. If torch's own iterators make the batches, it is empty, and a RuntimeWarning says
        so.

        Raises:
            StateError: If the ``state_dict`` of the dataset, the sampler or an iterator fails or takes arguments.
        """
        if self._order is None:
            if not self._is_torchs:
                return self._epochs.dump(self)
            warnings.warn(NO_STATE, RuntimeWarning, stacklevel=2)
            return {}
        return self._order.ordered.dump_cursor(self._order.update_counter().now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state at the next ``iter``.

        An empty state, of a loader without one, restarts the epoch.

        Raises:
            StateError: If the state belongs to another dataset, order or kind of loader; the message names the
                differences.
            TypeError: If torch's own iterators make the batches, and the state is not empty.
        """
        if self._order is None:
            if not self._is_torchs:
                self._epochs.load(self, state)
                return
            if state:
                raise TypeError(
                    f"a loader without a state cannot load one: {type(self.dataset).__name__} needs torch's iterators"
                )
            warnings.warn(NO_STATE, RuntimeWarning, stacklevel=2)
            return
        self._order.update_counter().load(self._order.ordered.read_cursor(state))
