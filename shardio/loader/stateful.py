"""Where a loader is: the epoch that comes next, and the state that a run saves and resumes from."""

from __future__ import annotations

import warnings
from typing import Any

from shardio.datasets import ShardDataset
from shardio.datasets.map_dataset import MapDataset
from shardio.epochs import set_epoch, set_epoch_of_parts
from shardio.loader.feeds import SamplerFeed, ShardFeed
from shardio.order import check_epoch

NO_STATE = (
    "this loader has no state, for neither its dataset nor its sampler holds shardio's order: its saved state "
    "is empty, so a resumed run restarts the epoch. Use a ShardDataset, or sampler=EpochSampler(dataset)"
)


class Stateful:
    """A loader that counts the batches that its user received, where it holds an order of shardio's.

    Without one the state is empty, and a RuntimeWarning says so. It is no error, because frameworks ask every loader
    that has the methods, and take them from its class.
    """

    _feed: ShardFeed | SamplerFeed | None
    sampler: Any
    batch_sampler: Any
    dataset: Any

    @property
    def has_state(self) -> bool:
        """Whether the loader can say where it is: whether it holds an order of shardio's."""
        return self._feed is not None

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next ``iter`` is. The loaded epoch keeps its position, another one drops it.

        An epoch that is under way goes on, and until the next ``iter`` it is what ``state_dict`` describes. Other
        people's samplers and datasets are told the epoch, too, if they have a ``set_epoch``.

        Raises:
            TypeError: If ``epoch`` is no integer.
            ValueError: If it is negative, or not below 2**62.
        """
        epoch = check_epoch(epoch)
        # A map-style dataset of shardio's has no order of its own, and may serve several loaders.
        if self._feed is None:
            set_epoch_of_parts(self, epoch, skip=(MapDataset,))
        else:
            self._feed.get_counter().set_epoch(epoch)
            set_epoch(self.dataset, epoch, skip=(MapDataset, ShardDataset))

    def state_dict(self) -> dict[str, Any]:
        """Return where the user is: a small JSON-able dict that fits any number of ranks and workers.

        It is empty, and a RuntimeWarning says so, if neither the dataset nor the sampler holds shardio's order.
        """
        if self._feed is None:
            warnings.warn(NO_STATE, RuntimeWarning, stacklevel=2)
            return {}
        return self._feed.source.dump_cursor(self._feed.get_counter().now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state at the next ``iter``.

        An empty state changes nothing where neither the dataset nor the sampler holds shardio's order, and a
        RuntimeWarning says so.

        Raises:
            StateError: If the state belongs to another dataset or order; the message names what differs.
            TypeError: If neither the dataset nor the sampler holds shardio's order, and the state is not empty.
        """
        if self._feed is None:
            if state:
                raise TypeError(
                    "this state needs shardio's order: a ShardDataset, or sampler=EpochSampler(dataset); "
                    f"got {type(self.dataset).__name__} with {type(self.sampler).__name__}"
                )
            warnings.warn(NO_STATE, RuntimeWarning, stacklevel=2)
            return
        self._feed.get_counter().load(self._feed.source.read_cursor(state))
