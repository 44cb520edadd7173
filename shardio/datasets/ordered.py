"""Datasets and samplers that hold an order and give each rank its own samples.

Frameworks wrap loaders and datasets in objects that give each process a part of the samples. If a dataset or sampler
already yields its rank's share, a second split would lose samples. The wrapper does not announce itself, so this module
looks for it among the callers.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, DistributedSampler

from shardio.bad_samples import Broken
from shardio.datasets.samples import Transformed
from shardio.errors import StateError
from shardio.order import Cursor, EpochOrder, OrderSettings, Remainder, Split, dump_state, iterate_steps, read_state
from shardio.process import cut_short, describe_error
from shardio.reading import read_nothing_ahead, read_windows_ahead
from shardio.values import check_choice, check_optional_integer
from shardio.world import CarriedWorld, World, choose_world, find_data_world, find_worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_METHODS = frozenset({"__iter__", "__len__", "set_epoch"})
"""The methods in which a wrapper calls the wrapped object. Only the local variables of their frames are read: reading
those of a training loop would keep a batch alive."""

_SHARDS = frozenset({"IterableDatasetShard", "BatchSamplerShard"})
"""Classes of Accelerate and Transformers that give each process a part of the samples of the wrapped object."""

_SKIPPERS = frozenset({"SkipBatchSampler", "SkipDataLoader"})
"""Classes that ``accelerate.skip_first_batches`` creates."""

Value = TypeVar("Value")

Start = Callable[[Cursor, Split, int], Iterator[Value]]
"""A function that iterates over a share, given a cursor, a split and the number of samples to leave out first."""


class Ranked:
    """The base class of datasets and samplers that split their samples over ranks.

    Attributes:
        gives_order: Whether a shardio.DataLoader over it has its order. Frameworks do not split such a loader again.
        has_loader: Whether it belongs to such a loader.
    """

    gives_order = False

    def __init__(
        self,
        *,
        rank: int | None,
        world_size: int | None,
        mesh: DeviceMesh | None,
        group: ProcessGroup | None,
    ) -> None:
        self._world = choose_world(rank, world_size, mesh=mesh, group=group)
        self._carried_world: CarriedWorld | None = None
        self.has_loader = False

    @property
    def rank(self) -> int:
        """The current rank of this process."""
        return self.world().rank

    @property
    def world_size(self) -> int:
        """The current number of ranks."""
        return self.world().world_size

    def world(self) -> World:
        """Return the rank and world size that the user set, or else the current ones.

        Raises:
            RuntimeError: If the user set none, and a mesh makes it unclear which ranks read different samples.
        """
        return self._world or find_data_world(carried=self._carried_world)

    def check_split_once(self) -> World:
        """Check that no caller splits the samples over ranks again, and return the world.

        Raises:
            RuntimeError: If a caller does.
        """
        world = self.world()
        refuse_second_split(self, world, has_loader=self.has_loader, gives_order=self.gives_order)
        return world


class Ordered(Ranked):
    """The base class of datasets and samplers that hold an order.

    Attributes:
        settings: The order's settings.
        digest: The dataset's identity, or "" if it has none.
        old_digest: The identity that earlier versions computed, which states may still hold; None if it is the same.
        num_all_samples: The number of samples in the whole dataset, over all ranks.
        shard_sizes: int64 [shards], the number of samples of each shard.
        remainder: The treatment of samples that do not fill a step.
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


class SampleIterator(Iterator[Value], Generic[Value]):
    """An iterator that yields the samples of a share and counts them. An error in one sample does not end it.

    After an error, a loader drops that sample's batch and requests the next one, so this iterator leaves out the rest
    of the batch.

    StatefulDataLoader saves the state of each worker's iterator after every batch and sends it with the batch. So a
    state counts the samples that were received, not those that were prefetched. It fits only the same rank and worker.

    Args:
        order: The order, which defines the share.
        cursor: The place in the epoch where the share begins.
        start: A function that iterates over the share.
    """

    _num_to_drop: int
    _cut_short_by: str | None

    def __init__(self, order: Ordered, cursor: Cursor, start: Start[Value]) -> None:
        self._order, self._start = order, start
        self._begin(cursor, num_samples=0)

    def __next__(self) -> Value:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        try:
            if self._num_to_drop:
                deque(islice(self._values, self._num_to_drop), maxlen=0)
                self._num_to_drop = 0
            value = next(self._values)
        except StopIteration:
            raise
        except BaseException as error:  # Such as one from a signal handler: the generator has ended, the epoch has not.
            self._cut_short_by = describe_error(error)
            raise
        self._num_samples += 1
        if isinstance(value, Broken):
            self._num_to_drop = -self._num_samples % self._split.batch_size
            self._num_samples += self._num_to_drop
            raise value.error
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this share: a small JSON-serializable dict."""
        return {
            **self._order.dump_cursor(self._cursor),
            "share": self._share(),
            "yielded": self._num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateError: If it belongs to another dataset, order, rank, worker or batch size; the message names what
                differs.
        """
        cursor = self._order.read_cursor(state)
        there, here = state.get("share") or {}, self._share()
        differences = [
            f"{name} is {there.get(name)!r} in the state and {value!r} here"
            for name, value in here.items()
            if there.get(name) != value
        ]
        if differences:
            raise StateError(
                f"this state of a StatefulDataLoader belongs to another share of the epoch: {'; '.join(differences)}. "
                "Restore these settings, or use shardio.DataLoader, whose state fits any number of ranks and workers"
            )
        num_samples = state.get("yielded")
        if not isinstance(num_samples, int) or num_samples < 0:
            raise StateError(f"the state's 'yielded' must be an integer, at least 0, got {num_samples!r}")
        self._begin(cursor, num_samples)

    def _begin(self, cursor: Cursor, num_samples: int) -> None:
        # Check arguments now, not when the first sample is requested.
        self._cursor, self._split, self._num_samples = cursor, self._order.own_split(cursor), num_samples
        self._values = self._start(cursor, self._split, num_samples)
        self._num_to_drop, self._cut_short_by = 0, None

    def _share(self) -> dict[str, Any]:
        split, worker = self._split, find_worker()
        return {
            "rank": split.rank,
            "world_size": split.world_size,
            "batch_size": split.batch_size,
            "remainder": split.remainder,
            "worker_id": worker.worker_id,
            "num_workers": worker.num_workers,
        }


def warn_of_other_length(dataset: Any, split: Split) -> None:
    """Warn if torch's DataLoader requests the dataset's length but makes a different number of batches.

    torch divides the length by the batch size, but each of its workers may end with an incomplete batch. The batch size
    and the number of workers are those of the calling loader.

    Args:
        dataset: The dataset whose length is requested.
        split: The rank's share, in blocks of the dataset's ``batch_size``, or of one sample.
    """
    loader = next((one for one in find_callers() if isinstance(one, DataLoader) and one.dataset is dataset), None)
    if loader is None or loader.batch_size is None:
        return
    num_samples, size, num_workers = split.num_own_samples, loader.batch_size, max(loader.num_workers, 1)
    shares = [len(range(worker, split.num_batches, num_workers)) * split.batch_size for worker in range(num_workers)]
    shares[(split.num_batches - 1) % num_workers] -= sum(shares) - num_samples  # The last block may be incomplete.
    num_made = sum(share // size if loader.drop_last else -(-share // size) for share in shares)
    num_said = num_samples // size if loader.drop_last else -(-num_samples // size)
    if num_made != num_said:
        lost = f", and leaves out {num_samples - num_made * size} of {num_samples} samples" if loader.drop_last else ""
        warnings.warn(
            f"{type(loader).__name__} makes {num_made} batches{lost}, but its length is {num_said}: several of "
            f"its {num_workers} workers end with an incomplete batch. Use {type(dataset).__name__}"
            f"(batch_size={size}), which gives the workers whole batches, or shardio.DataLoader",
            RuntimeWarning,
            stacklevel=4,
        )


def read_ahead(
    order: Ordered,
    dataset: Transformed,
    cursor: Cursor,
    split: Split,
    inner_indices: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which a rank's samples are read ahead if they are remote.

    Its value is a function to call with the number of samples that the rank is about to read.

    Args:
        order: The order.
        dataset: The dataset.
        cursor: The start of the epoch.
        split: The rank's share.
        inner_indices: Maps the order's indices to those of samples in the dataset; None if they are the same.
    """
    if (samples := dataset.remote_samples()) is None:
        return read_nothing_ahead()
    upcoming = (indices for _, indices in order.steps(cursor, split))
    return read_windows_ahead(
        samples, upcoming if inner_indices is None else map(inner_indices, upcoming), *_windows(order, split)
    )


def _windows(order: Ordered, split: Split) -> tuple[int | None, int | None]:
    """Return the number of a rank's samples in the rest of the first window of all lanes, and in each further window.

    Both are None without shuffling.
    """
    if not order.shuffle:
        return None, None
    length = order.lanes * order.window
    rest = length - split.start % length
    return -(-rest // split.world_size), -(-length // split.world_size)


def refuse_second_split(order: Any, world: World, *, has_loader: bool, gives_order: bool) -> None:
    """Check that no caller splits the samples of ``order`` again, or skips batches through a rebuilt loader.

    Args:
        order: The dataset or sampler that takes its rank's share.
        world: The rank and world size of that share.
        has_loader: Whether it belongs to a shardio.DataLoader.
        gives_order: Whether a shardio.DataLoader over it is not split again.

    Raises:
        RuntimeError: If a caller does; the message names the caller and the remedy.
    """
    name = type(order).__name__
    for caller in find_callers():
        kind = f"{type(caller).__module__}.{type(caller).__name__}"
        if has_loader and type(caller).__name__ in _SKIPPERS:
            raise RuntimeError(
                f"{kind} reads the {name} through its own loader, which does not know the epoch or the batches of the "
                "shardio.DataLoader that it was created from: to resume, call load_state_dict() on the "
                "shardio.DataLoader instead of using skip_first_batches(). See docs/frameworks.md"
            )
        if world.world_size == 1 or caller is order:
            continue
        remedy = (
            "Pass the framework a shardio.DataLoader, which it does not split again. Or let" if gives_order else "Let"
        )
        if (num_parts := _num_parts(caller)) > 1:
            raise RuntimeError(
                f"{kind} splits the samples over {num_parts} processes, but the {name} has already split them (this is "
                f"rank {world.rank} of {world.world_size}), so samples would be lost. {remedy} only the framework "
                f"split: create {name}(..., rank=0, world_size=1). See docs/frameworks.md"
            )


def find_callers() -> Iterator[Any]:
    """Yield the objects whose methods called this function, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _METHODS and (caller := frame.f_locals.get("self")) is not None:
            yield caller


def _num_parts(caller: Any) -> int:
    """Return the number of processes over which an object splits what it iterates over."""
    if type(caller).__name__ == "DataLoaderDispatcher":  # Accelerate's: rank 0 reads for all ranks.
        return int(caller.state.num_processes)
    if isinstance(caller, DistributedSampler):
        return caller.num_replicas
    if _SHARDS & {kind.__name__ for kind in type(caller).__mro__}:
        return int(caller.num_processes)
    return 1  # In other classes, such attributes may describe the wrapped object.
