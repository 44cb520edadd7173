"""Coverage: the samples that an epoch delivered, and the loader's claims about its samples.

Each delivery takes 14 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.check.identity import Ids, key_ids
from shardio.order import DROP_LAST, POLICIES, Cursor, EpochOrder, OrderSettings, RemainderPolicy
from shardio.world import World

MIN_WINDOW = 10
"""The smallest window with so many orders that none repeats by chance."""

BLOCK = 1 << 20
"""The number of deliveries in a block of memory."""

NUM_PARTS = 64
"""Deliveries are compared in this many parts, split by identity, to limit memory use."""

MAX_NAMES = 1_000_000
"""The number of keys to keep for messages. Messages show the hashes of later keys."""

UNKNOWN = -1
"""The ID of an unknown worker."""


@runtime_checkable
class HasRemainder(Protocol):
    """A dataset or a sampler with shardio's order and a remainder policy."""

    remainder_policy: RemainderPolicy
    num_all_samples: int
    batch_size: int | None
    digest: str
    shard_sizes: NDArray[np.int64]
    settings: OrderSettings

    def world(self) -> World:
        """Return the rank and the world size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The repeats and omissions that the remainder policy requires of an epoch.

    Attributes:
        num_samples: The number of samples in the dataset.
        num_repeats: The number of extra deliveries over all ranks, without marked repeats.
        num_missing: The number of samples that are left out, or were delivered before the run resumed.
        num_marked: The number of marked repeats over all ranks.
        samples: The sorted indices of the samples that are repeated or left out; None if unknown.
        digest: The digest of the dataset that the indices refer to.
    """

    num_samples: int
    num_repeats: int = 0
    num_missing: int = 0
    num_marked: int = 0
    samples: tuple[int, ...] | None = None
    digest: str = ""


def find_remainder(loader: Iterable[Any]) -> tuple[HasRemainder, RemainderPolicy] | None:
    """Return the dataset or sampler that orders a loader, and its remainder policy.

    Return None if the order is not shardio's.
    """
    for holder in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(holder, HasRemainder):
            # Only shardio's drop_last is a policy. In torch, it drops the incomplete batch of each worker.
            drops = hasattr(loader, "calls_dataset") and bool(getattr(loader, "drop_last", False))
            return holder, POLICIES[DROP_LAST] if drops else holder.remainder_policy
    return None


def find_cursor(loader: Iterable[Any]) -> Cursor | None:
    """Return a loader's cursor in shardio's order, read from its state; None if it has none."""
    found = find_remainder(loader)
    # Do not ask other loaders for their state: torchdata's starts its workers to determine it.
    holder: Any = loader if hasattr(loader, "calls_dataset") else None if found is None else found[0]
    if found is None or not callable(getattr(holder, "state_dict", None)):
        return None
    if not getattr(holder, "has_order", True):  # A subclass of shardio's sampler has its own __iter__.
        return None
    state = holder.state_dict()
    return Cursor(epoch=state["epoch"], position=state["position"])


def resumes(loader: Iterable[Any], num_batches: int) -> bool | None:
    """Return whether a loader resumes the epoch that stopped after ``num_batches`` batches; None if it was complete."""
    found = find_remainder(loader)
    cursor = find_cursor(loader) if found is not None and hasattr(loader, "calls_dataset") else None
    if found is None or cursor is None:
        length = len(loader) if hasattr(loader, "__len__") else None  # type: ignore[arg-type]  # hasattr checks it
        return True if length is None or num_batches < length else None
    return None if cursor.position >= found[0].num_all_samples else cursor.position > 0


def find_allowance(loader: Iterable[Any], before: Cursor | None = None) -> Allowance | None:
    """Return the allowance of a loader's epoch; None if the order is not shardio's.

    Args:
        loader: The loader, after it delivered the epoch's first batch, if the epoch has one.
        before: The loader's cursor before that batch.
    """
    found = find_remainder(loader)
    if found is None:
        return None
    holder, policy = found
    num_samples, world_size = holder.num_all_samples, holder.world().world_size
    batch_size = holder.batch_size or getattr(loader, "batch_size", None) or 1
    now = find_cursor(loader)
    start = before.position if before is not None and now is not None and before.epoch == now.epoch else 0
    start = 0 if start == num_samples and now != before else start
    num_dealt = policy.count_dealt(num_samples - start, world_size, batch_size)
    num_padded, num_dropped = max(start + num_dealt - num_samples, 0), max(num_samples - start - num_dealt, 0)
    num_repeats = 0 if policy.marks_repeats else num_padded
    positions = np.arange(num_samples - num_dropped, num_samples + num_repeats)
    samples: tuple[int, ...] | None = None
    if now is not None and start == 0:
        order = EpochOrder(holder.shard_sizes, holder.settings, now.epoch)
        samples = tuple(sorted(order.samples_at(positions).tolist())) if len(positions) else ()
    return Allowance(
        num_samples=num_samples,
        num_repeats=num_repeats,
        num_missing=num_dropped + start,
        num_marked=num_padded - num_repeats,
        samples=samples,
        digest=holder.digest,
    )


@runtime_checkable
class HasWorkers(Protocol):
    """A loader with the attributes of torch's DataLoader."""

    collate_fn: Callable[[Any], Any]
    num_workers: int
    dataset: Any


@dataclass(slots=True, kw_only=True)
class RankEpoch:
    """Facts about one rank's epoch other than its deliveries.

    Attributes:
        num_batches: The number of batches that arrived.
        by_keys: Whether samples are identified by keys rather than by content.
        is_stable: Whether a sample's content was the same on every read; None if not tested.
        instability: Evidence that contents change, as text; empty if there is none.
        is_whole: Whether the loader was read to the end of the epoch.
        num_claimed: The number of samples that the loader reports for this rank; None if unknown.
        may_be_fewer: Whether ``num_claimed`` is only an upper limit.
        num_dataset: The number of samples in the dataset, over all ranks; None if unknown.
        num_marked: The number of marked repeats; None if marks were not read.
        shuffles: Whether the loader shuffles; None if unknown.
        cause: A property of the loader that explains wrong epochs, as text; empty if there is none.
        sampler_state: The epoch and seed of a sampler that splits the dataset over ranks, as text.
        num_shares: The number of ranks that this sampler splits the dataset over; None if unknown.
    """

    num_batches: int = 0
    by_keys: bool = True
    is_stable: bool | None = None
    instability: str = ""
    is_whole: bool = True
    num_claimed: int | None = None
    may_be_fewer: bool = False
    num_dataset: int | None = None
    num_marked: int | None = None
    shuffles: bool | None = None
    cause: str = ""
    sampler_state: str = ""
    num_shares: int | None = None


def find_claims(loader: Iterable[Any], world_size: int) -> RankEpoch:
    """Return a loader's claims about its next epoch, on one of ``world_size`` ranks."""
    outer, loader = loader, source_of(loader)
    epoch = RankEpoch(shuffles=_find_shuffle(loader))
    sampler, dataset = sampler_of(loader), getattr(loader, "dataset", None)
    epoch.sampler_state = _find_state(sampler)
    epoch.num_shares = sampler.num_replicas if _is_torchs(sampler, "DistributedSampler") else None
    if getattr(sampler, "replacement", False):
        epoch.cause = f"the sampler ({type(sampler).__name__}) samples with replacement"
    if (found := find_remainder(loader)) is not None:
        epoch.num_dataset = found[0].num_all_samples
        return epoch
    if not isinstance(loader, HasWorkers) or not is_batching(loader):
        return epoch
    batching = _batching_of(loader)
    batch_size = getattr(batching, "batch_size", None)
    if not is_map_style(loader):
        # With several ranks, an iterable dataset's length may count one share or all samples.
        if world_size == 1 and batch_size is not None:
            epoch.num_claimed, epoch.may_be_fewer = _length(dataset), True
        return epoch
    num_own = _length(sampler)
    num_all = _length(dataset)
    if num_own is not None and num_all is not None and world_size == 1 and num_own < num_all:
        epoch.cause = epoch.cause or (
            f"the sampler ({type(sampler).__name__}) has {num_own:,} indices, but the dataset has {num_all:,} samples: "
            "if this is intended, expect only the sampler's samples (expected=, --expected)"
        )
    if batch_size is None or num_own is None:  # Or batched by a user-defined batch sampler.
        return epoch
    epoch.num_claimed = num_own // batch_size * batch_size if getattr(batching, "drop_last", False) else num_own
    is_own_loop = not _module_of(type(loader).__iter__).startswith(("torch.", "torchdata.", "shardio."))
    epoch.may_be_fewer = is_own_loop or _skips(loader) or outer is not loader
    if world_size == 1 or splits(loader):
        epoch.num_dataset = num_all
    return epoch


def source_of(loader: Any) -> Any:
    """Return a loader without wrappers such as DevicePrefetcher, which lack its dataset."""
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def sampler_of(loader: Any) -> Any:
    """Return a loader's sampler, including one in torch's BatchSampler; None if unknown."""
    return getattr(_batching_of(loader), "sampler", None)


def _batching_of(loader: Any) -> Any:
    """Return the object that holds the batch size: the loader or its batch sampler; None if unknown."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if getattr(loader, "batch_size", None) is not None or batch_sampler is None:
        return loader
    return batch_sampler if _is_torchs(batch_sampler, "BatchSampler") else None


def is_map_style(loader: HasWorkers) -> bool:
    """Return whether a loader reads its dataset by index."""
    import torch.utils.data

    return not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def splits(loader: HasWorkers) -> bool:
    """Return whether a loader's sampler splits a map-style dataset, which all ranks have, over ranks."""
    return is_map_style(loader) and _is_torchs(sampler_of(loader), "DistributedSampler")


def is_batching(loader: Any) -> bool:
    """Return whether a loader collates samples. If not, it yields the dataset's items."""
    if getattr(loader, "batch_size", None) is not None or getattr(loader, "batch_sampler", None) is not None:
        return True
    if hasattr(loader, "batch_size") and hasattr(loader, "batch_sampler"):
        return False
    # A wrapper lacks these attributes. torch's function for single samples has this name.
    return getattr(collate_of(loader), "__name__", "") != "default_convert"


def collates_columns(loader: Any) -> bool:
    """Return whether a loader collates into columns: with a function of torch or shardio."""
    return is_batching(loader) and _module_of(collate_of(loader)).startswith(("torch.", "shardio."))


def collate_of(loader: Any) -> Any:
    """Return a loader's own collate function, even while its workers tag their batches."""
    collate = getattr(loader, "collate_fn", None)
    return getattr(collate, "untagged", collate)


def indices_of(loader: HasWorkers) -> Any:
    """Return the indices that a loader's sampler chooses from, in the dataset's order; None if unknown."""
    sampler: Any = sampler_of(loader)
    length = _length(loader.dataset)
    if _is_torchs(sampler, "SubsetRandomSampler"):
        return sorted(map(int, sampler.indices))
    names = ("SequentialSampler", "RandomSampler", "DistributedSampler", "WeightedRandomSampler")
    return None if length is None or not _is_torchs(sampler, *names) else range(length)


def _find_shuffle(loader: Any) -> bool | None:
    found = find_remainder(loader)
    if found is not None:
        settings = found[0].settings
        return settings.shuffle and (settings.window >= MIN_WINDOW or None)
    if not getattr(loader, "in_order", True):
        return False  # Batches arrive in any order.
    sampler: Any = sampler_of(loader)
    if _is_torchs(sampler, "DistributedSampler"):
        return bool(sampler.shuffle)
    if _is_torchs(sampler, "SequentialSampler"):
        return False
    return True if _is_torchs(sampler, "RandomSampler", "SubsetRandomSampler") else None


def _find_state(sampler: Any) -> str:
    """Return the epoch and seed of a DistributedSampler as text; "" for other samplers."""
    if not _is_torchs(sampler, "DistributedSampler") or not sampler.shuffle:
        return ""
    return f"epoch {sampler.epoch} and seed {sampler.seed}"


def _is_torchs(sampler: Any, *names: str) -> bool:
    """Return whether a sampler is an instance of a torch class and keeps torch's ``__iter__``."""
    import torch.utils.data

    classes = tuple(getattr(torch.utils.data, name) for name in names)
    return isinstance(sampler, classes) and _module_of(type(sampler).__iter__).startswith("torch.")


def _skips(loader: Any) -> bool:
    return getattr(loader, "on_error", "raise") == "skip"


def _module_of(function: Any) -> str:
    return f"{getattr(function, '__module__', None) or type(function).__module__}."


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The arrival of one sample: its rank, the rank's worker (None if unknown) and batch."""

    rank: int
    worker: int | None
    batch: int

    def __str__(self) -> str:
        worker = "" if self.worker is None else f" worker {self.worker}"
        return f"rank {self.rank}{worker} batch {self.batch}"


@dataclass(slots=True)
class WorkerTotals:
    """The totals of one worker of one rank. Workers with equal signatures delivered the same samples."""

    num_samples: int = 0
    id_sum: int = 0
    id_xor: int = 0
    last_batch: int = 0
    last_batch_size: int = 0
    largest_batch: int = 0

    @property
    def signature(self) -> tuple[int, int, int]:
        return self.num_samples, self.id_sum, self.id_xor

    def add(self, ids: Ids, batch: int) -> None:
        """Count a batch."""
        self.num_samples += len(ids)
        self.id_sum = (self.id_sum + int(ids.sum(dtype=np.uint64))) % 2**64
        self.id_xor ^= int(np.bitwise_xor.reduce(ids))
        if batch >= self.last_batch:
            self.last_batch_size = len(ids) + (self.last_batch_size if batch == self.last_batch else 0)
            self.last_batch = batch
        self.largest_batch = max(self.largest_batch, len(ids))


@dataclass(slots=True)
class _Block:
    ids: Ids = field(default_factory=lambda: np.empty(BLOCK, np.uint64))
    batches: NDArray[np.uint32] = field(default_factory=lambda: np.empty(BLOCK, np.uint32))
    sources: NDArray[np.uint16] = field(default_factory=lambda: np.empty(BLOCK, np.uint16))
    used: int = 0


class Coverage:
    """The deliveries of one epoch over all ranks."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._source_ids: dict[tuple[int, int], int] = {}
        self._orders: dict[int, xxhash.xxh3_64] = {}
        self.totals: dict[tuple[int, int], WorkerTotals] = {}
        self.names: dict[int, Hashable] = {}
        self.allowances: dict[int, Allowance] = {}  # By rank, for loaders with shardio's order.
        self.rank_epochs: dict[int, RankEpoch] = {}  # By rank.

    @property
    def allowance(self) -> Allowance | None:
        """The repeats and omissions that the remainder policy requires; None if unknown."""
        return next(iter(self.allowances.values()), None)

    @property
    def num_deliveries(self) -> int:
        """The number of delivered samples, including repeats."""
        return sum(block.used for block in self._blocks)

    def order_digest(self, rank: int) -> str:
        """Return a digest of a rank's samples in order of arrival."""
        return self._orders[rank].hexdigest() if rank in self._orders else ""

    @property
    def ranks(self) -> list[int]:
        """The ranks that delivered at least one sample."""
        return sorted(self._orders)

    def num_delivered_by(self, rank: int) -> int:
        """Return the number of samples that a rank delivered, including repeats."""
        return sum(totals.num_samples for (other, _), totals in self.totals.items() if other == rank)

    def add(self, keys: Iterable[Hashable], delivery: Delivery) -> None:
        """Count the samples of one batch by their keys."""
        keys = list(keys)
        ids = key_ids(keys)
        if len(self.names) < MAX_NAMES:
            self.names.update(zip(ids.tolist(), keys, strict=True))
        self.add_ids(ids, delivery)

    def add_ids(self, ids: Ids, delivery: Delivery) -> None:
        """Count the samples of one batch by their identities, uint64 [n]."""
        if not len(ids):
            return
        source = (delivery.rank, UNKNOWN if delivery.worker is None else delivery.worker)
        self.totals.setdefault(source, WorkerTotals()).add(ids, delivery.batch)
        self._orders.setdefault(delivery.rank, xxhash.xxh3_64()).update(ids.tobytes())
        source_id = self._source_ids.setdefault(source, len(self._source_ids))
        while len(ids):
            if not self._blocks or self._blocks[-1].used == BLOCK:
                self._blocks.append(_Block())
            block = self._blocks[-1]
            count = min(len(ids), BLOCK - block.used)
            where = slice(block.used, block.used + count)
            block.ids[where], block.batches[where], block.sources[where] = ids[:count], delivery.batch, source_id
            block.used += count
            ids = ids[count:]

    def arrays(self, rank: int | None = None) -> tuple[Ids, NDArray[np.int64], NDArray[np.int64]]:
        """Return the identities, batches and workers of one or all ranks, in order of arrival."""
        ranks = np.array([own for own, _ in self._source_ids], dtype=np.int64)
        workers = np.array([worker for _, worker in self._source_ids], dtype=np.int64)
        blocks = self._blocks or [_Block()]
        sources = np.concatenate([block.sources[: block.used] for block in blocks]).astype(np.int64)
        chosen = slice(None) if rank is None else ranks[sources] == rank
        return (
            np.concatenate([block.ids[: block.used] for block in blocks])[chosen],
            np.concatenate([block.batches[: block.used] for block in blocks])[chosen].astype(np.int64),
            workers[sources][chosen],
        )

    def add_arrays(self, rank: int, ids: Ids, batches: NDArray[np.int64], workers: NDArray[np.int64]) -> None:
        """Add a rank's deliveries, as returned by :meth:`arrays`."""
        if not len(ids):
            return
        starts = np.flatnonzero(np.diff(batches.astype(np.int64), prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ids)], strict=True):
            self.add_ids(ids[start:stop], _delivery(rank, int(workers[start]), int(batches[start])))

    def until(self, rank: int, num_batches: int) -> Coverage:
        """Return the coverage of a rank's first ``num_batches`` batches."""
        ids, batches, workers = self.arrays(rank)
        chosen = batches < num_batches
        first = Coverage()
        first.add_arrays(rank, ids[chosen], batches[chosen], workers[chosen])
        first.names, first.allowances = self.names, self.allowances
        first.rank_epochs[rank] = replace(self.rank_epochs[rank], num_batches=num_batches, is_whole=False)
        return first

    def sorted_parts(self) -> Iterator[SortedDeliveries]:
        """Yield the deliveries in NUM_PARTS parts, by their identities modulo NUM_PARTS."""
        sources, blocks = list(self._source_ids), self._blocks or [_Block()]
        last_batches = np.array([self.totals[source].last_batch for source in sources], dtype=np.uint32)
        for part in range(NUM_PARTS):
            selected = [_select(block, part, i * BLOCK) for i, block in enumerate(blocks)]
            ids, batches, source_ids, arrivals = (np.concatenate(columns) for columns in zip(*selected, strict=True))
            order = np.argsort(ids, kind="stable")
            is_late = batches == last_batches[source_ids]
            yield SortedDeliveries(
                ids[order], batches[order], source_ids[order], arrivals[order], is_late[order], sources
            )


@dataclass(frozen=True, slots=True)
class SortedDeliveries:
    """Deliveries sorted by identity, then by arrival. Arrays have one entry per delivery."""

    ids: Ids
    batches: NDArray[Any]
    source_ids: NDArray[Any]
    arrivals: NDArray[Any]
    is_late: NDArray[Any]
    sources: list[tuple[int, int]]

    def deliveries(self, start: int, stop: int) -> list[Delivery]:
        """Return the deliveries [start, stop), in order of arrival."""
        found = []
        for index in range(start, stop):
            rank, worker = self.sources[int(self.source_ids[index])]
            found.append(_delivery(rank, worker, int(self.batches[index])))
        return found


def _delivery(rank: int, worker: int, batch: int) -> Delivery:
    return Delivery(rank=rank, worker=None if worker == UNKNOWN else worker, batch=batch)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text, for messages.

    >>> name_ranks([0, 2, 3])
    'ranks 0, 2 and 3'
    """
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _select(block: _Block, part: int, base: int) -> tuple[NDArray[Any], ...]:
    chosen = np.flatnonzero(block.ids[: block.used] % np.uint64(NUM_PARTS) == np.uint64(part))
    return block.ids[chosen], block.batches[chosen], block.sources[chosen], chosen + base
