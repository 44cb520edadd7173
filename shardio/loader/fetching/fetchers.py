"""Fetchers, which get samples from a dataset and collate them, and their states."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from shardio.bad_samples import BadSamples, keep_samples, read_around, read_samples
from shardio.errors import StateError, add_note
from shardio.interruptions import describe_error, let_through
from shardio.loader.fetching.job import FetchJob
from shardio.loader.fetching.state_keys import DATASET_ITER_STATE, DATASET_STATE, FETCHER_ENDED, FETCHER_STATE
from shardio.order import derive_rng_key, make_rng_key


class Fetcher(Protocol):
    """The interface of fetchers."""

    def fetch(self, index: Any) -> Any:
        """Return the samples for what the sampler yielded, or a single sample without batches.

        Raises:
            DatasetEndError: If an iterable dataset has no further batch.
        """

    def skip(self, num_batches: int) -> None:
        """Leave out batches of an iterable dataset."""

    def state(self) -> dict[str, Any] | None:
        """Return the state of the dataset and its iterator, which later changes do not affect; None without any."""


class DatasetEndError(Exception):
    """An iterable dataset has no further batch. People's own code may raise StopIteration by mistake."""


def make_fetcher(job: FetchJob, state: dict[str, Any] | None, *, follows_end: bool = False) -> Fetcher:
    """Return the fetcher for an epoch.

    The dataset's state is restored first, because its ``__iter__`` may depend on that.

    Args:
        job: What to fetch.
        state: The state to resume from; None to begin.
        follows_end: Whether the state is that of the end of the epoch before. It is restored, and an epoch begins.

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
        """Return the samples for a list of indices, or the sample for an index."""
        dataset, bad_samples = self._job.dataset, self._job.bad_samples
        if bad_samples is not None:
            samples = _get_around(dataset, bad_samples, index if self._job.is_batched else [index])
            return samples if self._job.is_batched else samples[0]
        if not self._job.is_batched:
            return _get(dataset, index)
        if not getattr(dataset, "__getitems__", None):
            return [_get(dataset, each) for each in index]
        try:
            return dataset.__getitems__(index)
        except Exception as error:
            add_note(error, f"while getting the samples {list(index)} of {type(dataset).__name__}")
            raise

    def skip(self, num_batches: int) -> None:
        """Do nothing: the sampler skips."""

    def state(self) -> dict[str, Any] | None:
        """Return the dataset's state; None without any."""
        dataset_state = dump_state(self._job.dataset)
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
        # Datasets often reset themselves at their end, so an iterator that is asked again would begin anew.
        self._has_ended = state[FETCHER_ENDED]

    def fetch(self, index: Any) -> Any:
        """Return the next samples, or the next sample; ``index`` determines only how many."""
        job = self._job
        if self._has_ended:
            raise DatasetEndError
        if not job.is_batched:
            return self._next()
        samples = []
        for _ in index:
            try:
                samples.append(self._next())
            except DatasetEndError:  # noqa: PERF203  # Each sample may be the last one.
                break
        if not samples or (job.drop_last and len(samples) < len(index)):
            raise DatasetEndError
        return samples

    def skip(self, num_batches: int) -> None:
        """Leave out batches."""
        for _ in range(num_batches * (self._job.batch_size or 1)):
            try:
                self._next()
            except DatasetEndError:  # noqa: PERF203
                return

    def state(self) -> dict[str, Any] | None:
        """Return the states of the iterator and the dataset; None without any."""
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


def has_state(value: Any) -> bool:
    """Return whether an object has the two methods of StatefulDataLoader's protocol.

    Those of a torch module do not count: its state is its weights, not a position.
    """
    if isinstance(value, torch.nn.Module) and type(value).state_dict is torch.nn.Module.state_dict:
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownState:
    """An object's state that could not be found. Only a loader's ``state_dict`` needs it, and raises an error.

    Attributes:
        reason: Why, as text.
    """

    reason: str


def takes_arguments(value: Any) -> bool:
    """Return whether an object has a state that cannot be asked for without arguments."""
    if not has_state(value):
        return False
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError:
        return True
    except ValueError:  # A compiled function may not say what it takes.
        return False
    return False


def dump_state(value: Any) -> Any:
    """Return a copy of an object's state; None if it has none, and an UnknownState if its method fails."""
    if not has_state(value):
        return None
    try:
        return copy.deepcopy(value.state_dict())
    except Exception as error:  # A user's method may fail in any way, and nobody may want the state.
        let_through(error)
        return UnknownState(reason=f"{type(value).__name__}.state_dict() raised {describe_error(error)}")


def check_known(state: Any) -> None:
    """Check that no part of a state is unknown.

    Raises:
        StateError: If one is.
    """
    if isinstance(state, UnknownState):
        raise StateError(
            f"the loader's position cannot be saved: {state.reason}. Use a state_dict that takes no arguments, and "
            "returns what can be copied and pickled, or none at all"
        )
    if isinstance(state, dict):
        for part in state.values():
            check_known(part)


def load_state(value: Any, state: Any) -> None:
    """Restore an object's state; the object receives a copy.

    Raises:
        StateError: If the object has no state.
    """
    if not has_state(value):
        raise StateError(
            f"the loader's state contains that of a {type(value).__name__} with state_dict and load_state_dict, but "
            "this one lacks these methods, so its position is not known: load the state into a loader with the same "
            "classes of datasets and samplers. (torchdata's StatefulDataLoader adds them to torch's RandomSampler)"
        )
    value.load_state_dict(copy.deepcopy(state))


def _get_around(dataset: Any, bad_samples: BadSamples, index: Sequence[Any]) -> list[Any]:
    """Return samples, with others instead of those that raise errors, or without these."""
    indices = np.array(index)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"on_error={bad_samples.on_error!r} requires integers as indices; got {index!r}")
    keys = derive_rng_key(make_rng_key(0, "samples"), indices.astype(np.uint64))  # The loader does not know the epoch.
    indices = indices.astype(np.int64)
    samples = read_around(
        bad_samples, lambda some, _: read_samples(dataset, some), indices, keys, keys, epoch=None, describe=None
    )
    return keep_samples(samples)


def _get(dataset: Any, index: Any) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        add_note(error, f"while getting sample {index!r} of {type(dataset).__name__}")
        raise
