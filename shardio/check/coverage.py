"""The samples that an epoch delivered, each identified by a uint64.

An integer key from 0 to 2**63 - 1 is its own identity. All other keys are hashed to 2**63 and above, so the two kinds
never collide. Equal numbers (1 and 1.0) have the same identity, and so do a string and its UTF-8 bytes. A sample
without a key is identified by its content: the xxh3-64 hash of all its fields. Each delivery occupies 14 bytes.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, IdentityError

Ids = NDArray[np.uint64]

Key = Callable[[Any], Iterable[Hashable]] | str | int | None
"""The way to find the keys in a batch: a function of the batch, or a field's name or index.

If None, the values in a batch are its keys if they are strings or integers; otherwise, the samples are identified by
their content.
"""

HASHED = 2**63
"""The bit that is set in the identity of every hashed key."""

ASK_FOR_KEY = "To identify samples, pass key= (--key) where their batches are read or recorded"

_REMEDY = "use an integer, a string, or a tuple of these"


def key_ids(keys: Iterable[Hashable]) -> Ids:
    """Return the identities of keys, uint64 [n].

    Raises:
        IdentityError: If a key, such as None, NaN or a bool, cannot identify a sample.
    """
    if isinstance(keys, range):
        keys = np.arange(keys.start, keys.stop, keys.step)
    keys = keys.tolist() if isinstance(keys, np.ndarray) and keys.dtype.kind not in "iu" else keys
    if not isinstance(keys, np.ndarray | list):
        keys = list(keys)
    kinds = {type(key) for key in keys} if isinstance(keys, list) else {int}
    if kinds == {str}:
        return np.array([_hash_text(key) for key in keys], dtype=np.uint64)  # type: ignore[arg-type]  # all are strings
    if kinds == {int}:
        numbers = np.asarray(keys)
        if numbers.dtype.kind in "iu" and (not len(numbers) or (numbers.min() >= 0 and numbers.max() < HASHED)):
            return numbers.astype(np.uint64)
    return np.array([_key_id(key) for key in keys], dtype=np.uint64)


def keys_in(batch: Any, key: Key) -> list[Hashable] | None:
    """Return the keys of a batch; None if ``key`` is None and the batch contains more than just keys.

    Raises:
        IdentityError: If ``key`` does not fit the batch.
    """
    if key is None:
        return _as_keys(batch)
    try:
        is_name = isinstance(key, str) and isinstance(batch, tuple) and hasattr(batch, key)  # A field of a namedtuple.
        found = key(batch) if callable(key) else getattr(batch, str(key)) if is_name else batch[key]
    except (KeyError, IndexError, TypeError) as error:
        raise IdentityError(
            f"found nothing at key={key!r} in a batch of type {type(batch).__name__}: pass the name or index of the "
            "field that holds the keys, or a function of the batch"
        ) from error
    return _as_list(found, key)


def content_ids(batch: Any, *, is_collated: bool = False) -> Ids:
    """Return the identities of a batch's samples from their content, uint64 [n].

    Args:
        batch: Tensors or arrays whose first dimension enumerates the samples, and lists of values, possibly nested in
            tuples, lists and dicts.
        is_collated: Whether the batch is known to hold columns. If False, lists of images are rejected as ambiguous.

    Raises:
        IdentityError: If the batch cannot be split into samples.
    """
    columns: list[Any] = []
    _add_columns(batch, columns)
    if not columns:
        _refuse_layout(f"a batch of type {type(batch).__name__} holds no data")
    if (
        not is_collated
        and len(columns) > 1
        and isinstance(batch, list | tuple)
        and all(hasattr(value, "shape") and value.ndim > 1 for value in batch)
    ):
        _refuse_layout(
            f"a {type(batch).__name__} of {len(batch)} arrays may hold {len(batch)} samples or {len(batch)} fields"
        )
    lengths = sorted({len(column) for column in columns})
    if len(lengths) > 1:
        _refuse_layout(f"the fields of a batch have different lengths ({', '.join(map(str, lengths))})")
    ids = []
    for sample in range(lengths[0]):
        digest = xxhash.xxh3_64()
        for column in columns:
            content = _to_bytes(column[sample])
            digest.update(b"%d:" % len(content))  # Distinguishes ("ab", "c") from ("a", "bc").
            digest.update(content)
        ids.append(digest.intdigest())
    return np.array(ids, dtype=np.uint64)


def _refuse_layout(what: str) -> NoReturn:
    raise IdentityError(f"{what}, so samples cannot be identified by their content. {ASK_FOR_KEY}")


def _hash_text(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape")) | HASHED


def _key_id(key: Any) -> int:
    if getattr(key, "ndim", None) == 0:  # A numpy or torch scalar.
        key = key.item()
    match key:
        case None | bool():
            raise IdentityError(f"{key} cannot be a sample's key, because it does not identify the sample: {_REMEDY}")
        case int():
            return key if 0 <= key < HASHED else xxhash.xxh3_64_intdigest(b"int %d" % key) | HASHED
        case float():
            if key != key:
                raise IdentityError(f"NaN cannot be the key of a sample, because it does not equal itself: {_REMEDY}")
            return _key_id(int(key)) if key.is_integer() else xxhash.xxh3_64_intdigest(repr(key).encode()) | HASHED
        case str():
            return _hash_text(key)
        case bytes():
            return xxhash.xxh3_64_intdigest(key) | HASHED
        case tuple():
            parts = np.array([_key_id(part) for part in key], dtype=np.uint64).tobytes()
            return xxhash.xxh3_64_intdigest(b"tuple " + parts) | HASHED
    kind = type(key)
    texts: tuple[Any, ...] = (kind.__str__, kind.__repr__)
    if not isinstance(key, Hashable) or texts == (object.__str__, object.__repr__):
        raise IdentityError(f"a {kind.__name__} cannot be the key of a sample: {_REMEDY}")
    return _hash_text(str(key))


def _as_keys(batch: Any) -> list[Hashable] | None:
    if isinstance(batch, str | bytes) or type(batch) is int:
        return [batch]  # One sample that is not collated.
    if hasattr(batch, "tolist") and hasattr(batch, "ndim"):
        name = str(batch.dtype)
        is_key = "int" in name or getattr(batch.dtype, "kind", "") in ("S", "U")
        return _as_list(batch, None) if is_key and batch.ndim <= 1 else None
    if isinstance(batch, list | tuple):
        kinds = {type(value) for value in batch}
        if all(issubclass(kind, str | bytes) for kind in kinds) or all(
            type(value) is int or (getattr(value, "ndim", None) == 0 and "int" in str(value.dtype)) for value in batch
        ):
            return list(batch)
    return None


def _as_list(found: Any, key: Key) -> list[Hashable]:
    if isinstance(found, list):
        return found
    if isinstance(found, str | bytes | int | float):
        return [found]  # The key of one sample that is not collated.
    if hasattr(found, "tolist") and hasattr(found, "ndim"):
        if found.ndim == 2 and "int" in str(found.dtype):
            return [tuple(row) for row in found.tolist()]
        if found.ndim > 1:
            raise IdentityError(
                f"the values at key={key!r} have shape {list(found.shape)} and dtype {found.dtype}, but a sample's "
                "key must be one value or one row of integers"
            )
        return [found.item()] if found.ndim == 0 else list(found.tolist())
    if isinstance(found, Mapping) or not isinstance(found, Iterable):
        raise IdentityError(f"the value at key={key!r} is a {type(found).__name__}: a sample's key must be one value")
    return list(found)


def _add_columns(batch: Any, columns: list[Any]) -> None:
    if isinstance(batch, Mapping):
        for name in batch:
            _add_columns(batch[name], columns)
    elif hasattr(batch, "shape") and batch.ndim > 0:
        columns.append(batch)
    elif isinstance(batch, list | tuple):
        kinds = {type(value) for value in batch}
        if kinds and any(all(issubclass(kind, column) for kind in kinds) for column in (int | float, str | bytes)):
            columns.append(batch)
        else:
            for value in batch:
                _add_columns(value, columns)
    elif batch is not None:
        _refuse_layout(f"a batch holds a single {type(batch).__name__}, which is not one value per sample")


def _to_bytes(value: Any) -> bytes:
    if hasattr(value, "numpy"):
        value = value.detach().cpu().contiguous()
        if "bfloat16" in str(value.dtype):
            import torch

            value = value.view(dtype=torch.int16)
        value = value.numpy()
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode(errors="surrogateescape")


BLOCK = 1 << 20
"""The number of deliveries to compare at a time, to limit memory use."""

NUM_PARTS = 64
"""Deliveries are compared in this many parts, split by identity, to limit memory use."""

MAX_NAMES = 1_000_000
"""The number of keys to keep for messages. For later keys, messages show hashes instead."""

CLOCK_SLACK_S = 60.0
"""The tolerated difference between the clocks of two machines, in seconds."""

UNKNOWN = -1
"""The ID of an unknown worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The repeats and omissions that the remainder policy requires of an epoch.

    Attributes:
        num_samples: The number of samples in the dataset.
        num_repeats: The number of extra deliveries over all ranks, excluding marked repeats.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The arrival of one sample: its rank, its worker on that rank (None if unknown) and its batch."""

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


class Coverage:
    """The deliveries of one epoch over all ranks."""

    def __init__(self) -> None:
        self._columns = array("Q"), array("I"), array("H")  # The identity, batch and source of each delivery.
        self._source_ids: dict[tuple[int, int], int] = {}
        self._orders: dict[int, xxhash.xxh3_64] = {}
        self.totals: dict[tuple[int, int], WorkerTotals] = {}
        self.names: dict[int, Hashable] = {}
        self.allowances: dict[int, Allowance] = {}  # Only for ranks whose loaders use shardio's order.
        self.rank_epochs: dict[int, RankEpoch] = {}  # All ranks.

    @property
    def allowance(self) -> Allowance | None:
        """The repeats and omissions that the remainder policy requires; None if unknown."""
        return next(iter(self.allowances.values()), None)

    @property
    def num_deliveries(self) -> int:
        """The number of delivered samples, including repeats."""
        return len(self._columns[0])

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
        self._columns[0].frombytes(ids.tobytes())
        for column, value in zip(self._columns[1:], (delivery.batch, source_id), strict=True):
            column.extend(array(column.typecode, [value]) * len(ids))

    def arrays(self, rank: int | None = None) -> tuple[Ids, NDArray[np.int64], NDArray[np.int64]]:
        """Return the identity, batch and worker of each delivery to one rank or to all ranks, in order of arrival."""
        ranks, workers = np.array(list(self._source_ids), dtype=np.int64).reshape(-1, 2).T
        ids, batches, sources = map(np.array, self._columns)
        chosen = slice(None) if rank is None else ranks[sources] == rank
        return ids[chosen], batches[chosen].astype(np.int64), workers[sources][chosen]

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
        sources = list(self._source_ids)
        last_batches = np.array([self.totals[source].last_batch for source in sources], dtype=np.uint32)
        every, *others = map(np.asarray, self._columns)
        starts = range(0, len(every), BLOCK)
        for part in range(NUM_PARTS):
            found = [np.flatnonzero(every[i : i + BLOCK] % np.uint64(NUM_PARTS) == part) + i for i in starts]
            arrivals = np.concatenate([np.empty(0, np.int64), *found])
            arrivals = arrivals[np.argsort(every[arrivals], kind="stable")]
            batches, source_ids = (column[arrivals] for column in others)
            is_late = batches == last_batches[source_ids]
            yield SortedDeliveries(every[arrivals], batches, source_ids, arrivals, is_late, sources)


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
        places = zip(self.source_ids[start:stop].tolist(), self.batches[start:stop].tolist(), strict=True)
        return [_delivery(*self.sources[int(source)], batch) for source, batch in places]


@dataclass(slots=True, kw_only=True)
class Recording:
    """The deliveries that one rank received.

    Attributes:
        rank: The rank.
        world_size: The number of ranks; None if unknown.
        epochs: The coverage of each epoch.
        process: The machine and process that made the recording.
        started: The time at which the recording began, in seconds since 1970.
        written: The time at which the recording was last written, in seconds since 1970.
    """

    rank: int
    world_size: int | None
    epochs: list[Coverage] = field(default_factory=list)
    process: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    started: float = field(default_factory=time.time)
    written: float = field(default_factory=time.time)


def merge(recordings: Sequence[Recording], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch over all ranks.

    Raises:
        FormatError: If a rank is missing, or the recordings are from different runs.
    """
    sizes = sorted({recording.world_size for recording in recordings if recording.world_size is not None})
    if len(sizes) > 1:
        raise FormatError(
            f"the recordings are from runs with {' and '.join(map(str, sizes))} ranks: pass the recordings of one run"
        )
    ranks = sorted(recording.rank for recording in recordings)
    expected = world_size or (sizes[0] if sizes else max(ranks, default=-1) + 1)
    missing = sorted(set(range(expected)) - set(ranks))
    if missing:
        raise FormatError(
            f"there is no recording of {name_ranks(missing)} of {expected}: pass the files of all ranks. A rank that "
            "ended early may have written none"
        )
    for one in recordings:
        for other in recordings:
            if one.process != other.process and one.written + CLOCK_SLACK_S < other.started:
                raise FormatError(
                    f"the recording of rank {one.rank} was last written before that of rank {other.rank} began: they "
                    "are from different runs. Delete the files of the earlier run and record all ranks again"
                )
    merged = [Coverage() for _ in range(max((len(recording.epochs) for recording in recordings), default=0))]
    for recording in recordings:
        for whole, part in zip_longest(merged, recording.epochs):
            if part is None:
                whole.rank_epochs[recording.rank] = RankEpoch(is_whole=False)
                continue
            whole.add_arrays(recording.rank, *part.arrays())
            whole.names.update(part.names)
            whole.rank_epochs |= part.rank_epochs
            whole.allowances |= part.allowances
    return merged


def _delivery(rank: int, worker: int, batch: int) -> Delivery:
    return Delivery(rank=rank, worker=None if worker == UNKNOWN else worker, batch=batch)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text, for messages.

    >>> name_ranks([0, 2, 3])
    'ranks 0, 2 and 3'
    """
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
