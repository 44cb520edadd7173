"""Fetchers, which get samples from any dataset as torch's loader does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import _DatasetKind

from shardio.bad_samples import BadSamples, Skipped, keep_samples, read_around, read_samples
from shardio.errors import add_note
from shardio.images import use_one_thread
from shardio.loader.saved_state import (
    DATASET_ITER_STATE,
    DATASET_STATE,
    FETCHER_ENDED,
    FETCHER_STATE,
    dump_state,
    has_state,
    load_state,
)
from shardio.order import Words, derive_rng_key, make_rng_key

WorkerMethod = Literal["multiprocessing", "thread"]
"""The kinds of workers. The names are those of torch's ``WorkerInfo.worker_method``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchJob:
    """The settings that every worker of a loader needs.

    Attributes:
        dataset: The user's dataset.
        is_iterable: Whether the dataset is an IterableDataset.
        is_batched: Whether the loader makes batches, instead of single samples.
        batch_size: The number of samples in a full batch of an iterable dataset.
        drop_last: Whether an iterable dataset's last batch is left out if it is not full.
        collate_fn: The function that makes a batch from samples or, without batches, converts one sample.
        worker_init_fn: The function that each worker calls before its first batch.
        num_workers: The number of workers; 0 if the calling process fetches.
        bad_samples: The policy for samples of a map-style dataset that raise errors; None raises the errors.
        keeps_state: Whether the loader's state contains the states of the dataset and its iterator.
    """

    dataset: Any
    is_iterable: bool
    is_batched: bool
    batch_size: int | None
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    bad_samples: BadSamples | None = None
    keeps_state: bool = True

    @property
    def is_stateful(self) -> bool:
        """Whether the loader's state contains the dataset's state."""
        return self.keeps_state and has_state(self.dataset)


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """A ``worker_init_fn`` that makes each worker resize images in one thread, because workers run in parallel.

    Attributes:
        init_fn: The user's ``worker_init_fn``.
    """

    init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        use_one_thread()
        if self.init_fn is not None:
            self.init_fn(worker_id)


@dataclass(kw_only=True, eq=False)
class OrderedIndices:
    """The indices of a batch in shardio's order, with the seed and epoch of the samples' random parameters.

    Attributes:
        indices: int64 [n].
        seed: The seed of the order.
        epoch: The epoch's number.
        valid: bool [n], false for repeats; None if samples are not marked.
    """

    indices: NDArray[np.int64]
    seed: int
    epoch: int
    valid: NDArray[np.bool_] | None


def is_iterable(loader: Any) -> bool:
    """Return whether a loader iterates over its dataset, instead of reading it by index."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)  # Subclasses may set the kind.


def make_failing_job(error: Exception) -> FetchJob:
    """Return a job whose workers answer every request with an error."""

    def fail(_: object) -> None:
        raise error

    return FetchJob(
        dataset=None,
        is_iterable=False,
        is_batched=False,
        batch_size=None,
        drop_last=False,
        collate_fn=fail,
        worker_init_fn=fail,
        num_workers=1,
    )


class Fetcher(Protocol):
    """The interface of fetchers."""

    def fetch(self, index: Any) -> Any:
        """Return the samples for a value of the sampler or, without batches, a single sample.

        Raises:
            DatasetEndError: If an iterable dataset has no more batches.
        """

    def skip(self, num_batches: int) -> None:
        """Skip the next ``num_batches`` batches of an iterable dataset."""

    def state(self) -> dict[str, Any] | None:
        """Return a copy of the state of the dataset and its iterator; None if neither has a state."""


class DatasetEndError(Exception):
    """An iterable dataset has no more batches.

    User code may raise StopIteration by mistake, so the end of a dataset has an error of its own.
    """


def make_fetcher(job: FetchJob, state: dict[str, Any] | None, *, follows_end: bool = False) -> Fetcher:
    """Return the fetcher for an epoch.

    The dataset's state is restored first, because its ``__iter__`` may depend on the state.

    Args:
        job: The settings of the loader.
        state: The state to resume from; None to start at the beginning.
        follows_end: Whether the state was saved at the end of the previous epoch. If so, the state is restored, and a
            new epoch begins.

    Raises:
        StateError: If the dataset or its iterator cannot load the state.
    """
    dataset_state = None if state is None else state[DATASET_STATE]
    if dataset_state is not None:
        load_state(job.dataset, dataset_state)
    if not job.is_iterable:
        return MapFetcher(job)
    fetcher = IterableFetcher(job)
    if state is not None and state[FETCHER_STATE] is not None:
        fetcher.restore(state[FETCHER_STATE])
    return IterableFetcher(job) if follows_end else fetcher


class MapFetcher:
    """A fetcher for map-style datasets."""

    def __init__(self, job: FetchJob) -> None:
        self._job = job

    def fetch(self, index: Any) -> Any:
        dataset, bad_samples = self._job.dataset, self._job.bad_samples
        if isinstance(index, OrderedIndices):
            samples = keep_samples(_get_ordered(dataset, bad_samples, index))
            return samples if self._job.is_batched else samples[0]
        if bad_samples is not None:
            samples = _get_around(dataset, bad_samples, index if self._job.is_batched else [index])
            return samples if self._job.is_batched else samples[0]
        if not self._job.is_batched:
            return _get(dataset, index)
        if not getattr(dataset, "__getitems__", None):
            return _get_all(dataset, index)
        try:
            return dataset.__getitems__(index)
        except Exception as error:
            add_note(error, f"while getting the samples {list(index)} of {type(dataset).__name__}")
            raise

    def skip(self, num_batches: int) -> None:
        """Do nothing, because the sampler skips the batches."""

    def state(self) -> dict[str, Any] | None:
        dataset_state = dump_state(self._job.dataset) if self._job.keeps_state else None
        return None if dataset_state is None else {FETCHER_STATE: None, DATASET_STATE: dataset_state}


class IterableFetcher:
    """A fetcher for iterable datasets."""

    def __init__(self, job: FetchJob) -> None:
        self._job = job
        self._iterator = iter(job.dataset)
        self._has_ended = False
        self._num_got = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the iterator's state."""
        if state[DATASET_ITER_STATE] is not None:
            load_state(self._iterator, state[DATASET_ITER_STATE])
        # Datasets often reset themselves when they end, so another call to next() would restart them.
        self._has_ended = state[FETCHER_ENDED]

    def fetch(self, index: Any) -> Any:
        job = self._job
        if self._has_ended:
            raise DatasetEndError
        if not job.is_batched:
            return keep_samples([self._next()])[0]
        samples = []
        for _ in index:
            try:
                samples.append(self._next())
            except DatasetEndError:  # noqa: PERF203  # Each sample may be the last one.
                break
        if not samples or (job.drop_last and len(samples) < len(index)):
            raise DatasetEndError
        return keep_samples(samples)

    def skip(self, num_batches: int) -> None:
        for _ in range(num_batches * (self._job.batch_size or 1)):
            try:
                self._next()
            except DatasetEndError:  # noqa: PERF203
                return

    def state(self) -> dict[str, Any] | None:
        if not self._job.keeps_state:
            return None
        iterator_state = dump_state(self._iterator)
        dataset_state = None if self._iterator is self._job.dataset else dump_state(self._job.dataset)
        if iterator_state is None and dataset_state is None:
            return None
        return {
            FETCHER_STATE: {DATASET_ITER_STATE: iterator_state, FETCHER_ENDED: self._has_ended},
            DATASET_STATE: dataset_state,
        }

    def _next(self) -> Any:
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._has_ended = True
            raise DatasetEndError from None
        except Exception as error:
            add_note(error, f"while getting sample {self._num_got} of this worker's {type(self._job.dataset).__name__}")
            raise
        self._num_got += 1
        return sample


def _get_around(dataset: Any, bad_samples: BadSamples, index: Sequence[Any]) -> list[Any]:
    indices = np.array(index)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"on_error={bad_samples.on_error!r} requires integers as indices; got {index!r}")
    keys = derive_rng_key(make_rng_key(0, "samples"), indices.astype(np.uint64))  # The epoch is not known.
    indices = indices.astype(np.int64)
    samples = read_around(
        bad_samples, lambda some, _: read_samples(dataset, some), indices, keys, keys, epoch=None, describe=None
    )
    return keep_samples(samples)


def _get(dataset: Any, index: Any) -> Any:
    (sample,) = _get_all(dataset, [index])
    return sample


def _get_all(dataset: Any, indices: Iterable[Any]) -> list[Any]:
    index: Any = None
    samples = list[Any]()
    add = samples.append
    try:
        for index in indices:
            add(dataset[index])
    except Exception as error:
        add_note(error, f"while getting sample {index!r} of {type(dataset).__name__}")
        raise
    return samples


def _get_ordered(dataset: Any, bad_samples: BadSamples | None, request: OrderedIndices) -> list[Any]:
    """Return samples in shardio's order, with Skipped in the rows of those that were left out."""
    from shardio.datasets import MapDataset, Unwrapped, known_epoch, mark_valid, takes_rng_keys, unwrap

    indices, seed, epoch = request.indices, request.seed, request.epoch
    unwrapped = unwrap(dataset)
    if not takes_rng_keys(unwrapped.dataset):  # Read the dataset as torch does.
        unwrapped = Unwrapped(dataset=dataset, subsets=())

    def read(some: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        inner: Any = unwrapped.dataset
        if takes_rng_keys(inner):
            return list(inner.read(unwrapped.inner_indices(some), rng_keys))  # A replacement keeps the row's rng key.
        return read_samples(inner, some)

    with known_epoch(seed, epoch):
        samples = read_around(
            bad_samples,
            read,
            indices,
            *unwrapped.rng_keys(seed, epoch, indices),
            epoch=epoch,
            describe=unwrapped.describe if isinstance(unwrapped.dataset, MapDataset) else None,
        )
    if request.valid is None:
        return samples
    marked = zip(samples, request.valid.tolist(), strict=True)
    return [sample if isinstance(sample, Skipped) else mark_valid(sample, is_valid) for sample, is_valid in marked]
