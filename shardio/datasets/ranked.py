"""The base classes of datasets and samplers that give each rank its own samples, and of their iterators.

Frameworks wrap loaders and datasets in objects that give each process a part of the samples. If a dataset or sampler
already yields its rank's share, a second split would lose samples. Nothing marks a wrapper that splits samples, so this
module looks for wrappers among the callers.
"""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, IterableDataset

from shardio.bad_samples import Broken
from shardio.datasets.samples import Copied, EpochCell
from shardio.errors import StateError, find_user_level
from shardio.order import (
    POLICIES,
    Cursor,
    EpochOrder,
    OrderSettings,
    Remainder,
    RemainderPolicy,
    Split,
    check_epoch,
    choose_settings,
    dump_state,
    find_differences,
    iterate_steps,
    read_state,
)
from shardio.process import cut_short, describe_error
from shardio.shards import ShardTable, is_sorted_by_class
from shardio.values import check_choice, check_optional_integer
from shardio.world import CarriedWorld, World, choose_world, find_data_world, find_worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_METHODS = frozenset({"__iter__", "__len__", "set_epoch"})
"""The methods in which a wrapper calls the wrapped object. Only the local variables of these methods are read: reading
those of a training loop would keep a batch alive."""

_SHARDS = frozenset({"IterableDatasetShard", "BatchSamplerShard"})
"""Classes from Accelerate and Transformers that give each process a part of the wrapped object's samples."""

_SKIPPERS = frozenset({"SkipBatchSampler", "SkipDataLoader"})
"""Classes that ``accelerate.skip_first_batches`` instantiates."""

Value = TypeVar("Value")

Start = Callable[[Cursor, Split, int], Iterator[Value]]
"""A function that iterates over a share, given a cursor, a split and the number of samples to leave out first."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of the split over ranks.

    Attributes:
        rank: The rank of this process; by default, that of torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun.
        mesh: An alternative to ``rank`` and ``world_size``: a DeviceMesh with one dimension, such as ``mesh["dp"]``,
            whose ranks read different samples. If a mesh with several dimensions exists, as with tensor parallelism,
            ``mesh`` or ``group`` is required.
        group: An alternative to ``rank``, ``world_size`` and ``mesh``: a process group whose ranks read different
            samples.
    """

    rank: int | None = None
    world_size: int | None = None
    mesh: DeviceMesh | None = None
    group: ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class EpochSettings(RankSettings):
    """The settings of an epoch's order and of its split over ranks.

    Attributes:
        shuffle: Whether to shuffle, differently in each epoch. With torch's DataLoader, call ``set_epoch`` before each
            epoch.
        seed: The seed of the order and of the transforms.
        remainder: The treatment of the last samples if they do not fill a batch on every rank. ``pad`` repeats some
            samples to give all ranks the same number of samples. ``mask`` repeats samples as ``pad`` does, and adds a
            last value ``valid``, which is false for repeats. ``keep`` gives some ranks one more sample. ``drop`` leaves
            out the last samples.
        batch_size: The batch size of torch's DataLoader; set it to get the same batches as from shardio.DataLoader,
            which uses its own batch size.
        window: With ``shuffle``, the number of neighboring samples, in the shuffled shards, that are shuffled together,
            rounded up to a multiple of ``strata``.
        strata: With ``shuffle``, the number of equal parts of a window, a power of two. Consecutive samples come from
            the parts in turn, and ranks read different parts. With 1, all ranks read the whole window.
    """

    shuffle: bool = False
    seed: int = 0
    remainder: Remainder = "pad"
    batch_size: int | None = None
    window: int | None = None
    strata: int | None = None

    def choose_order(self, shard_sizes: NDArray[np.int64], table: ShardTable | None = None) -> OrderSettings:
        """Return the order of an epoch of shards, given the shards' table if they have one.

        If remote shards are sorted by class, warn, because mixing the classes needs a request for each sample.
        """
        choose = partial(choose_settings, shard_sizes, shuffle=self.shuffle, seed=self.seed)
        settings = choose(window=self.window, strata=self.strata)
        is_default = self.shuffle and self.window is None and self.strata is None
        if table is None or not is_default or not is_sorted_by_class(table):
            return settings
        mixed = choose(is_sorted=True)
        if table.is_local:
            return mixed
        warnings.warn(
            f"the shards of {table.tars[0].folder} are sorted by class, so the batches of a rank have few classes. "
            f"Pack them again (shardio pack mixes the samples), or set window={mixed.window}, strata=1: each rank then "
            "reads all of a window, and makes about one request for each sample",
            RuntimeWarning,
            stacklevel=find_user_level(),
        )
        return settings


class Ranked:
    """The base class of datasets and samplers that split their samples over ranks.

    Attributes:
        gives_order: Whether a shardio.DataLoader over this object follows its order. If true, frameworks do not split
            the loader again.
        has_loader: Whether this object belongs to a shardio.DataLoader that follows its order.
    """

    gives_order = False

    def __init__(self, options: RankSettings) -> None:
        self._world = choose_world(options.rank, options.world_size, mesh=options.mesh, group=options.group)
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
            RuntimeError: If the user set neither a rank nor a world size, and a mesh makes it unclear which ranks read
                different samples.
        """
        return self._world or find_data_world(carried=self._carried_world)

    def check_split_once(self) -> World:
        """Check that no caller splits the samples again, or skips batches through a rebuilt loader; return the world.

        Raises:
            RuntimeError: If a caller splits the samples or skips batches; the message names the caller and the remedy.
        """
        world = self.world()
        name = type(self).__name__
        for caller in find_callers():
            kind = f"{type(caller).__module__}.{type(caller).__name__}"
            if self.has_loader and type(caller).__name__ in _SKIPPERS:
                raise RuntimeError(
                    f"{kind} reads the {name} through its own loader, which lacks the epoch and the batches of "
                    "the shardio.DataLoader that it was created from: to resume, call load_state_dict() on the "
                    "shardio.DataLoader instead of using skip_first_batches(). See docs/frameworks.md"
                )
            if world.world_size == 1 or caller is self:
                continue
            with_loader = "Pass the framework a shardio.DataLoader, which it does not split again. Or let"
            remedy = with_loader if self.gives_order else "Let"
            if (num_parts := _num_parts(caller)) > 1:
                raise RuntimeError(
                    f"{kind} splits the samples over {num_parts} processes, but the {name} has already split them "
                    f"(this is rank {world.rank} of {world.world_size}), so samples would be lost. {remedy} only the "
                    f"framework split: create {name}(..., rank=0, world_size=1). See docs/frameworks.md"
                )
        return world


class Iterated(Ranked, Copied, IterableDataset[Any]):
    """The base class of iterable-style datasets, whose epoch is shared with the workers of a loader."""

    def __init__(self) -> None:
        self._cell = EpochCell()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._cell.next.epoch

    @property
    def joined(self) -> Any:
        """The dataset that loaders read in this dataset's order: this dataset, unless it mixes other datasets."""
        return self

    @property
    def num_epoch_sets(self) -> int:
        """The number of times that the epoch was set. A higher count tells a loader that the user has set the epoch."""
        return self._cell.num_sets

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in this process and in running workers.

        Call this before ``iter(loader)``. An iteration that has begun keeps its epoch in all workers, and an iteration
        that resumes from a state has the state's epoch. If another dataset iterates over this one in torch's workers,
        each worker reads the epoch when it begins to iterate.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If ``epoch`` is negative or not below 2**62.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        self.check_split_once()
        self._cell.set(Cursor(epoch=check_epoch(epoch)))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled copy may go to a worker process, which sees neither torch.distributed nor these callers.
        self.check_split_once()
        return {**self.__dict__, "_carried_world": CarriedWorld.find()}


class Ordered(Ranked):
    """The base class of datasets and samplers that hold an order.

    Attributes:
        settings: The order's settings.
        digest: The dataset's identity, or "" if it has none.
        num_all_samples: The number of samples in the whole dataset, over all ranks.
        shard_sizes: int64 [shards], the number of samples of each shard.
        remainder: The name of the remainder policy.
        batch_size: The batch size that the user set, if any.
    """

    gives_order = True
    settings: OrderSettings
    digest: str
    num_all_samples: int
    shard_sizes: NDArray[np.int64]

    def __init__(self, options: EpochSettings) -> None:
        Ranked.__init__(self, options)
        self.remainder: Remainder = check_choice("remainder", options.remainder, Remainder)
        self.batch_size = check_optional_integer("batch_size", options.batch_size, at_least=1)

    @property
    def remainder_policy(self) -> RemainderPolicy:
        """The treatment of samples that do not fill a step."""
        return POLICIES[self.remainder]

    @property
    def seed(self) -> int:
        """The seed of the order. Like all settings of the order, the seed is fixed at construction."""
        return self.settings.seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch is shuffled."""
        return self.settings.shuffle

    @property
    def window(self) -> int:
        """The number of neighboring samples, in the shuffled shards, that are shuffled together."""
        return self.settings.window

    @property
    def strata(self) -> int:
        """The number of equal parts of a window, from which consecutive samples come in turn."""
        return self.settings.strata

    def dump_cursor(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of a run that has reached ``cursor`` in this order."""
        return dump_state(cursor, self.settings, self.digest, self.num_all_samples)

    def read_cursor(self, state: Any) -> Cursor:
        """Return the cursor of a state.

        Raises:
            StateError: If the state belongs to a different dataset or order; the message names what differs.
        """
        return read_state(state, self.settings, self.digest, self.num_all_samples)

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
            strata=self.settings.strata,
            remainder=remainder,
        )

    def batches(
        self, cursor: Cursor, split: Split, first: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield this rank's batches of an epoch, each as its positions and its samples' indices, both int64 [n]."""
        for positions, indices in self.steps(cursor, split, range(first, split.num_batches)):
            stops = np.cumsum([len(batch) for batch in positions])
            yield from zip(positions, np.split(indices, stops[:-1]), strict=True)

    def steps(
        self, cursor: Cursor, split: Split, steps: range | None = None
    ) -> Iterator[tuple[list[NDArray[np.int64]], NDArray[np.int64]]]:
        """Yield several batches at a time: the positions of each batch, and the concatenated indices of all batches."""
        return iterate_steps(self.find_order(cursor.epoch), split, range(split.num_batches) if steps is None else steps)

    def find_windows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the window number of each position, int64 [n]. Read-ahead plans each window as a whole."""
        return positions // (self.window if self.shuffle else self.num_all_samples)

    def find_order(self, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the function that maps positions of an epoch to samples, int64 [n] each."""
        return EpochOrder(self.shard_sizes, self.settings, epoch).samples_at

    def own_split(self, cursor: Cursor) -> Split:
        """Return this rank's share for torch's DataLoader, with the batch size and remainder that the user set."""
        if self.batch_size is None and self.remainder_policy.uses_batch_size:
            raise ValueError(
                f"remainder={self.remainder!r} {self.remainder_policy.effect}, depending on the batch size, which "
                f"torch's DataLoader does not pass on: set {type(self).__name__}(batch_size=...), or use "
                "shardio.DataLoader"
            )
        return self.split(cursor, batch_size=self.batch_size or 1, remainder=self.remainder)


class TolerantIterator(Iterator[Value], Generic[Value]):
    """An iterator over a generator's values that continues after a Broken, which holds the error of one sample."""

    _cut_short_by: str | None = None

    def __next__(self) -> Value:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        try:
            value = self._take()
        except StopIteration:
            raise
        except BaseException as error:  # An error, even from a signal handler, ends the generator but not the epoch.
            self._cut_short_by = describe_error(error)
            raise
        if isinstance(value, Broken):
            raise value.error
        return value

    @abstractmethod
    def _take(self) -> Value: ...


class SampleIterator(TolerantIterator[Value]):
    """An iterator that yields the samples of a share and counts them.

    After an error in a sample, a loader drops the sample's batch and requests the next batch, so this iterator leaves
    out the rest of the dropped batch.

    StatefulDataLoader saves the state of each worker's iterator after every batch and sends it with the batch. So a
    state counts the samples that were received, not those that were prefetched. Only the same rank and worker can load
    the state.
    """

    _num_to_drop: int

    def __init__(self, order: Ordered, cursor: Cursor, start: Start[Value]) -> None:
        self._order, self._start = order, start
        self._begin(cursor, num_samples=0)

    def _take(self) -> Value:
        if self._num_to_drop:
            deque(islice(self._values, self._num_to_drop), maxlen=0)
            self._num_to_drop = 0
        value = next(self._values)
        self._num_samples += 1
        if isinstance(value, Broken):
            self._num_to_drop = -self._num_samples % self._split.batch_size
            self._num_samples += self._num_to_drop
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this share: a small JSON-serializable dict."""
        return {**self._order.dump_cursor(self._cursor), "share": self._share(), "yielded": self._num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateError: If the state belongs to a different dataset, order, rank, worker or batch size; the message
                names what differs.
        """
        cursor = self._order.read_cursor(state)
        if differences := find_differences(state.get("share"), self._share()):
            raise StateError(
                f"this state of a StatefulDataLoader belongs to a different share of the epoch: {differences}. "
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
        share = {name: getattr(split, name) for name in ("rank", "world_size", "batch_size", "remainder")}
        return {**share, "worker_id": worker.worker_id, "num_workers": worker.num_workers}


def find_callers() -> Iterator[Any]:
    """Yield the objects whose methods called this function, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _METHODS and (caller := frame.f_locals.get("self")) is not None:
            yield caller


def _num_parts(caller: Any) -> int:
    if type(caller).__name__ == "DataLoaderDispatcher":  # With Accelerate's dispatcher, rank 0 reads for all ranks.
        return int(caller.state.num_processes)
    if isinstance(caller, DistributedSampler):
        return caller.num_replicas
    if _SHARDS & {kind.__name__ for kind in type(caller).__mro__}:
        return int(caller.num_processes)
    return 1  # In other classes, num_processes or num_replicas may describe the wrapped object.
