"""The base class of ShardDataset and EpochSampler, which hold an order and split it over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.ranked import Ranked
from shardio.order import (
    Cursor,
    EpochOrder,
    OrderSettings,
    Remainder,
    Split,
    dump_state,
    iterate_steps,
    read_state,
)
from shardio.values import check_choice, check_optional_integer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Ordered(Ranked):
    """The base class of datasets and samplers that hold an order.

    Attributes:
        settings: The order's settings.
        digest: The dataset's identity, or "" if it has none.
        old_digest: The identity that earlier versions computed, which states may still hold; None if it is the same.
        num_all_samples: The number of samples in the whole dataset, over all ranks.
        shard_sizes: int64 [shards], the number of samples of each shard.
        remainder: What happens to the samples that do not fill a step.
        batch_size: The batch size that the user set, if any.
    """

    gives_order = True
    settings: OrderSettings
    digest: str
    old_digest: str | None = None
    num_all_samples: int
    shard_sizes: NDArray[np.int64]

    def __init__(
        self,
        *,
        remainder: Remainder,
        batch_size: int | None,
        rank: int | None,
        world_size: int | None,
        mesh: DeviceMesh | None,
        group: ProcessGroup | None,
    ) -> None:
        self.remainder: Remainder = check_choice("remainder", remainder, Remainder)
        self.batch_size = check_optional_integer("batch_size", batch_size, at_least=1)
        Ranked.__init__(self, rank=rank, world_size=world_size, mesh=mesh, group=group)

    @property
    def seed(self) -> int:
        """The seed of the order. Like all settings of the order, it is fixed at construction."""
        return self.settings.seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch is shuffled."""
        return self.settings.shuffle

    @property
    def lanes(self) -> int:
        """The number of lanes: equal parts of the shuffled shards, from which consecutive samples come in turn."""
        return self.settings.lanes

    @property
    def window(self) -> int:
        """The number of neighbouring samples that are shuffled together."""
        return self.settings.window

    def dump_cursor(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of a run that has reached ``cursor`` in this order."""
        return dump_state(cursor, self.settings, self.digest, self.num_all_samples)

    def read_cursor(self, state: Any) -> Cursor:
        """Return the cursor of a state.

        Raises:
            StateError: If the state belongs to another dataset or order; the message names what differs.
        """
        found: Any = state.get("dataset") if isinstance(state, dict) else None
        is_old = self.old_digest is not None and isinstance(found, dict) and found.get("digest") == self.old_digest
        digest = self.old_digest if is_old and self.old_digest is not None else self.digest
        return read_state(state, self.settings, digest, self.num_all_samples)

    def split(self, cursor: Cursor, *, batch_size: int, remainder: Remainder) -> Split:
        """Return this rank's share of an epoch, from ``cursor`` to the end.

        Raises:
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        world = self.check_split_once()
        return Split(
            num_samples=self.num_all_samples,
            start=cursor.position,
            rank=world.rank,
            world_size=world.world_size,
            batch_size=batch_size,
            shuffled=self.settings.shuffle,
            remainder=remainder,
        )

    def batches(
        self, cursor: Cursor, split: Split, first: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield this rank's batches of an epoch, each as its positions and its samples' indices, both int64 [n]."""
        for positions, indices in self.steps(cursor, split, first):
            stops = np.cumsum([len(batch) for batch in positions])
            yield from zip(positions, np.split(indices, stops[:-1]), strict=True)

    def steps(
        self, cursor: Cursor, split: Split, first: int = 0
    ) -> Iterator[tuple[list[NDArray[np.int64]], NDArray[np.int64]]]:
        """Yield several batches at a time: the positions of each, and the concatenated indices of all."""
        order = EpochOrder(self.shard_sizes, self.settings, cursor.epoch)
        return iterate_steps(order, split, range(first, split.num_batches))

    def own_split(self, cursor: Cursor) -> Split:
        """Return this rank's share for torch's DataLoader, with the batch size and remainder that the user set."""
        if self.batch_size is None and self.remainder == "drop":
            raise ValueError(
                "remainder='drop' leaves out samples that do not fill a batch, but torch's DataLoader does not pass on "
                f"its batch size: set {type(self).__name__}(batch_size=...) too, or use shardio.DataLoader"
            )
        return self.split(cursor, batch_size=self.batch_size or 1, remainder=self.remainder)
