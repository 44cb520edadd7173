"""Datasets and samplers that hold an order and give each rank its own samples, such as EpochSampler.

Frameworks wrap loaders and datasets in objects that give each process a part of the samples. If a dataset or sampler
already yields its rank's share, a second split would lose samples. The wrapper does not announce itself, so this module
looks for it among the callers.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DistributedSampler, StackDataset, Subset

from shardio.bad_samples import Broken
from shardio.datasets.samples import check_integers, takes
from shardio.epochs import hand_over
from shardio.errors import StateError
from shardio.order import (
    POLICIES,
    Cursor,
    EpochCounter,
    EpochOrder,
    OrderSettings,
    Progress,
    Remainder,
    RemainderPolicy,
    Split,
    choose_settings,
    dump_state,
    iterate_steps,
    read_state,
)
from shardio.process import cut_short, describe_error
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


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of the split over ranks.

    Attributes:
        rank: The rank of this process; by default, that of torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun.
        mesh: An alternative to ``rank`` and ``world_size``: a DeviceMesh with one dimension, such as ``mesh["dp"]``,
            whose ranks read different samples. If a mesh with several dimensions exists, as with tensor parallelism,
            ``mesh`` or ``group`` is required.
        group: Another alternative: a process group whose ranks read different samples.
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
            samples: all ranks then have the same number. ``mask`` does the same, and adds a last value ``valid``,
            which is false for repeats. ``keep`` gives some ranks one more sample. ``drop`` leaves the samples out.
        batch_size: The batch size of torch's DataLoader. Set it to get the same batches as from shardio.DataLoader,
            which uses its own batch size.
        lanes: With ``shuffle``, the number of lanes: the shuffled shards, laid end to end, are cut into this many
            equal parts, and consecutive samples come from each part in turn.
        window: With ``shuffle``, the number of neighbouring samples that are shuffled together.
    """

    shuffle: bool = False
    seed: int = 0
    remainder: Remainder = "pad"
    batch_size: int | None = None
    lanes: int | None = None
    window: int | None = None

    def choose_order(self, shard_sizes: NDArray[np.int64]) -> OrderSettings:
        """Return the order of an epoch of these shards."""
        return choose_settings(shard_sizes, shuffle=self.shuffle, seed=self.seed, lanes=self.lanes, window=self.window)


class Ranked:
    """The base class of datasets and samplers that split their samples over ranks.

    Attributes:
        gives_order: Whether a shardio.DataLoader over it has its order. Frameworks do not split such a loader again.
        has_loader: Whether it belongs to such a loader.
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
        if self.batch_size is None and self.remainder_policy.leaves_out:
            raise ValueError(
                f"remainder={self.remainder!r} leaves out samples that do not fill a batch, but torch's DataLoader "
                f"does not pass on its batch size: set {type(self).__name__}(batch_size=...) too, or use "
                "shardio.DataLoader"
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
    if type(caller).__name__ == "DataLoaderDispatcher":  # Accelerate's: rank 0 reads for all ranks.
        return int(caller.state.num_processes)
    if isinstance(caller, DistributedSampler):
        return caller.num_replicas
    if _SHARDS & {kind.__name__ for kind in type(caller).__mro__}:
        return int(caller.num_processes)
    return 1  # In other classes, such attributes may describe the wrapped object.


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(EpochSettings):
    """The arguments of EpochSampler.

    Attributes:
        dataset: A map-style dataset. If it has shards, the order follows them. Otherwise, the order has one lane and
            one window by default.
        batch_size: The batch size of torch's DataLoader; leave it unset with shardio.DataLoader, which uses its own.
            With torch's DataLoader, ``remainder="drop"`` requires it, and an unshuffled order needs it to make the
            same batches as shardio.DataLoader.
        shuffle: Whether to shuffle, differently in each epoch.
        seed: The seed of the order and, in shardio.DataLoader, of shardio's transforms.
        remainder: The treatment of the last samples if they do not fill a batch on every rank: see
            :class:`shardio.ShardDataset`. ``mask`` requires shardio.DataLoader.
    """

    dataset: Sized = field(kw_only=False)
    shuffle: bool = True


class EpochSampler(Ordered, DistributedSampler[Any]):  # type: ignore[override]  # attributes in torch
    """A sampler that gives each rank its share of a map-style dataset, in shardio's order.

    It subclasses torch's DistributedSampler, so frameworks see that the data is already split. In shardio.DataLoader,
    its state counts the batches that the user received. In torch's DataLoader, it counts the samples that the loader
    requested. If a subclass overrides ``__iter__`` or ``__len__``, both loaders treat it like any other sampler: see
    :class:`shardio.DataLoader`.

    Raises:
        ValueError: If an argument is out of range, the dataset is empty, or its length differs from the number of
            samples in its shards.
    """

    @takes(SamplerSettings)
    def __init__(self, options: SamplerSettings) -> None:
        # DistributedSampler.__init__ queries torch.distributed at once. This class reads the world when it is needed,
        # so torch's attributes are properties below.
        Ordered.__init__(self, options)
        dataset = options.dataset
        self.dataset = dataset  # type: ignore[assignment]  # torch's type requires a Dataset; a length is enough
        self.num_all_samples = len(dataset)
        if self.num_all_samples == 0:
            raise ValueError("the dataset is empty: pass a dataset with at least one sample")
        self.digest = find_digest(dataset)
        sizes = getattr(dataset, "shard_sizes", None)
        if sizes is not None and sizes.sum() != len(dataset):
            raise ValueError(
                f"the length of {type(dataset).__name__} is {len(dataset)}, but its shards hold {sizes.sum()} samples, "
                "which determine the order: do not override __len__; use torch's Subset(dataset, indices) for a part"
            )
        self.shard_sizes = np.array([len(dataset)]) if sizes is None else sizes
        if sizes is None and options.shuffle:
            lanes = 1 if options.lanes is None else options.lanes
            window = len(dataset) if options.window is None else options.window
            options = replace(options, lanes=lanes, window=window)
        self.settings = options.choose_order(self.shard_sizes)
        self.counter = EpochCounter()

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.world_size

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.counter.next.epoch

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # an attribute in torch
        return self.remainder_policy.leaves_out

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self) * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        If a state was loaded, setting its epoch resumes at its position. Any other epoch begins at its start.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If it is negative, or not below 2**62.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        self.check_split_once()
        self.counter.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position: that of the running epoch, even if ``set_epoch`` has already set the next one."""
        return self.dump_cursor(self.counter.now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateError: If it belongs to another dataset or order.
        """
        self.counter.load(self.read_cursor(state))

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in a full epoch."""
        return self.own_split(Cursor(epoch=0)).num_own_samples

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of this rank's samples. Without ``set_epoch``, every iteration repeats one epoch.

        Raises:
            ValueError: If the remainder policy marks repeats.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        if self.remainder_policy.marks_repeats:
            raise ValueError(
                f"remainder={self.remainder!r} requires shardio.DataLoader, which adds the field 'valid' to batches"
            )
        iteration = SampleIterator(self, self.counter.find_start(self.num_all_samples), self._start)
        self.counter.start(self.num_all_samples, repeats=True)  # Not before: an iteration that raises does not count.
        return iteration

    def _start(self, cursor: Cursor, split: Split, num_left_out: int) -> Iterator[int]:
        num_batches, start = divmod(num_left_out, split.batch_size)  # Only the last batch may have fewer samples.
        self.counter.progress = progress = Progress(cursor=cursor, split=split, num_batches=num_batches)
        return self._yield_indices(progress, start)

    def _yield_indices(self, progress: Progress, start: int) -> Iterator[int]:
        first_batch = progress.num_batches
        batches = self.batches(progress.cursor, progress.split, first_batch)
        for num_batches, (_, indices) in enumerate(batches, first_batch + 1):
            if start == len(indices):
                continue
            *first, last = indices.tolist()
            yield from first[start:]
            start = 0
            # Before the last sample is yielded: the state must be right as soon as the sample is received.
            hand_over([partial(setattr, progress, "num_batches", num_batches)])
            yield last
        hand_over([partial(setattr, progress, "is_finished", True)])


def find_digest(dataset: Any) -> str:
    """Return a dataset's identity: its ``digest``, or a hash of what torch's class makes of its parts.

    This is a hash of the inner identity and the indices for a Subset, and of the parts' identities and lengths for a
    ConcatDataset or a StackDataset.
    """
    if isinstance(dataset, Subset):
        indices = check_integers(dataset.indices).astype(np.int64).tobytes()
        return xxhash.xxh3_128_hexdigest(find_digest(dataset.dataset).encode() + indices)
    if isinstance(dataset, ConcatDataset | StackDataset) and not hasattr(dataset, "digest"):
        parts: Any = dataset.datasets
        named = parts.items() if isinstance(parts, dict) else [("", part) for part in parts]
        words = [[str(name), find_digest(part), len(part)] for name, part in named]
        return xxhash.xxh3_128_hexdigest(json.dumps([isinstance(dataset, StackDataset), words]).encode())
    return str(getattr(dataset, "digest", ""))
