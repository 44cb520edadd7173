"""Coverage: which samples an epoch delivered, in which batches and from which workers.

Each delivery takes 14 bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.check.allowance import Allowance
from shardio.check.claims import RankEpoch
from shardio.check.identity import Ids, key_ids

BLOCK = 1 << 20
"""The number of deliveries in a block of memory."""

NUM_PARTS = 64
"""Deliveries are compared in this many parts, split by identity, to limit memory use."""

MAX_NAMES = 1_000_000
"""The number of keys that are kept for messages. Messages show the hashes of later keys."""

UNKNOWN = -1
"""The ID of an unknown worker."""


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
    """The totals of one worker of one rank.

    Equal signatures show that two workers delivered the same samples.
    """

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
            worker = int(workers[start])
            delivery = Delivery(rank=rank, worker=None if worker == UNKNOWN else worker, batch=int(batches[start]))
            self.add_ids(ids[start:stop], delivery)

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
            found.append(
                Delivery(rank=rank, worker=None if worker == UNKNOWN else worker, batch=int(self.batches[index]))
            )
        return found


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
