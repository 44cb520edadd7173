"""Get samples from a dataset as torch's loader does, with the states of datasets and random generators.

States have the keys of torchdata's StatefulDataLoader. So programs find what they look for in a state, and this loader
can resume from states that StatefulDataLoader saved, unless they contain the state of torchdata's own samplers.
"""

from __future__ import annotations

import base64
import copy
import inspect
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import _DatasetKind

from shardio.bad_samples import BadSamples, keep_samples, read_around, read_samples
from shardio.errors import StateError, add_note
from shardio.order import derive_rng_key, make_rng_key
from shardio.process import describe_error, let_through

WorkerMethod = Literal["multiprocessing", "thread"]
"""The kinds of workers. The names are those of torch's ``WorkerInfo.worker_method``."""

# Keys of states that StatefulDataLoader also has.
SNAPSHOT = "_snapshot"
SNAPSHOT_STEP = "_snapshot_step"
STEPS_SINCE_SNAPSHOT = "_steps_since_snapshot"
LAST_YIELDED_WORKER_ID = "_last_yielded_worker_id"
MAIN_SNAPSHOT = "_main_snapshot"
WORKER_SNAPSHOTS = "_worker_snapshots"
ITERATOR_FINISHED = "_iterator_finished"
NUM_WORKERS = "_num_workers"
NUM_YIELDED = "_num_yielded"
INDEX_SAMPLER_STATE = "_index_sampler_state"
SAMPLER_ITER_STATE = "_sampler_iter_state"
SAMPLER_ITER_YIELDED = "_sampler_iter_yielded"
LEN_CALLED = "_IterableDataset_len_called"
SHARED_SEED = "_shared_seed"
BASE_SEED = "_base_seed"
WORKER_ID = "worker_id"
FETCHER_STATE = "fetcher_state"
DATASET_ITER_STATE = "dataset_iter_state"
FETCHER_ENDED = "fetcher_ended"
DATASET_STATE = "dataset_state"

# Keys of states that only this loader has.
GENERATORS = "_generators"
"""The random generators from which the sampler draws, at the beginning of the epoch."""

DRAWS_SEED = "_draws_seed"
"""Whether the seed of the workers was drawn when the epoch began, not earlier."""

DELIVERED_AHEAD = "_delivered_ahead"
"""With ``in_order=False``, the numbers of batches that were delivered before an earlier one."""

SAMPLER_EPOCH = "_sampler_epoch"
"""The epoch that was set on a sampler such as torch's DistributedSampler."""

NUM_SAMPLES = "_num_samples"
"""The number of delivered samples of the epoch, for the random numbers of shardio's transforms."""

SAMPLER_SAMPLES_YIELDED = "_sampler_samples_yielded"
"""The number of samples that torch's BatchSampler has yielded: a resumed run may have batches of another size."""

BATCH_SIZE = "_batch_size"
"""The size of the batches; 0 if a sampler determines it."""

NUM_EPOCHS_OF_SEED = "_num_epochs_of_seed"
"""The number of epochs that the workers' seed served before this one."""

NUM_SINCE_STATE = "num_batches_since_state"
"""The number of a worker's batches that were delivered after it reported its state."""

_GLOBALS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),  # Users' samplers draw from it.
}
"""The functions that get and set the state of each global generator of a process, by its name."""

States = dict[str, Any]
"""States of global generators by name: those of torch's CPU generator, and of the modules random and numpy.random."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchJob:
    """The settings that every worker of a loader needs.

    Attributes:
        dataset: The user's dataset.
        is_iterable: Whether it is an IterableDataset.
        is_batched: Whether the loader makes batches, instead of single samples.
        batch_size: The samples in a full batch of an iterable dataset.
        drop_last: Whether an iterable dataset's last batch is left out if it is not full.
        collate_fn: The function that makes a batch of samples or, without batches, converts one sample.
        worker_init_fn: The function that each worker calls before its first batch.
        num_workers: The number of workers; 0 if the calling process fetches.
        bad_samples: The policy for samples of a map-style dataset that raise errors; None raises them.
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


def is_iterable(loader: Any) -> bool:
    """Return whether a loader iterates over its dataset, instead of reading it by index."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)  # Subclasses may set it.


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


def capture(names: Iterable[str]) -> States:
    """Return the present states of some of the process's global generators."""
    return {name: _GLOBALS[name][0]() for name in names}


class OwnGenerators:
    """The loader's own generators, which continue from a loaded state in place of the process's generators.

    The generators of the process belong to the program. If one of them is already in the loaded state, the loader draws
    from it, as the stopped run did, and has none of its own.

    Args:
        states: The states from which to continue.
        process: The states of the process's generators when the state was loaded.
    """

    def __init__(self, states: States, process: States) -> None:
        self._process = process
        self._states = {name: states[name] for name in _find_differences(states, capture(states))}

    def without_changed(self) -> OwnGenerators:
        """Return those generators whose counterparts in the process have not been seeded, restored or used."""
        return OwnGenerators(self.cover({}), self._process)

    def cover(self, states: States) -> States:
        """Return states of the process, replaced by the states of these generators where the next epoch uses them."""
        changed = _find_differences(self._process, capture(self._states))
        return states | {name: state for name, state in self._states.items() if name not in changed}

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from these generators in the block. Those of the process stay as they were."""
        before = capture(self._states)
        _apply(self._states)
        try:
            yield
        finally:
            self._states = capture(self._states)
            _apply(before)


def drawing_from(generators: OwnGenerators | None) -> AbstractContextManager[None]:
    """Return a context that draws from these generators, or from the process's."""
    return nullcontext() if generators is None else generators.drawing()


@dataclass(kw_only=True, eq=False)
class RandomStates:
    """The states of all generators from which a sampler may draw.

    Attributes:
        globals: The states of the process's global generators, perhaps without those from which it does not draw.
        own: The states of the generators that the user passed to the loader or its samplers, uint8 [n] each.
    """

    globals: States
    own: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def capture(cls, generators: Sequence[torch.Generator], *, includes_others: bool) -> RandomStates:
        """Return the present states.

        Args:
            generators: The user's generators.
            includes_others: Whether to include the generators of Python and numpy.
        """
        return cls(
            globals=capture(_GLOBALS if includes_others else ["torch"]),
            own=[generator.get_state() for generator in generators],
        )

    def encode(self) -> dict[str, Any]:
        """Return the states as JSON-serializable values."""
        python, array = self.globals.get("python"), self.globals.get("numpy")
        return {
            "torch": _encode(self.globals["torch"].numpy()),
            "python": None if python is None else [python[0], _encode(np.array(python[1], np.uint32)), python[2]],
            "numpy": None if array is None else [array[0], _encode(array[1]), *array[2:]],
            "own": [_encode(state.numpy()) for state in self.own],
        }

    @classmethod
    def decode(cls, states: dict[str, Any]) -> RandomStates:
        """Return the states that :meth:`encode` returned."""
        python, array = states["python"], states["numpy"]
        found: States = {"torch": torch.from_numpy(_decode(states["torch"], np.uint8))}
        if python is not None:
            found["python"] = python[0], tuple(_decode(python[1], np.uint32).tolist()), python[2]
        if array is not None:
            found["numpy"] = array[0], _decode(array[1], np.uint32), *array[2:]
        return cls(globals=found, own=[torch.from_numpy(_decode(state, np.uint8)) for state in states["own"]])


def _apply(states: States) -> None:
    for name, state in states.items():
        _GLOBALS[name][1](state)


def _find_differences(one: States, other: States) -> set[str]:
    return {name for name in one.keys() & other.keys() if not _are_equal(one[name], other[name])}


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one[1], np.ndarray):
        return one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2:] == other[2:]
    return bool(one == other)


def _encode(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes())).decode()


def _decode(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()


class Fetcher(Protocol):
    """The interface of fetchers."""

    def fetch(self, index: Any) -> Any:
        """Return the samples for a value of the sampler or, without batches, a single sample.

        Raises:
            DatasetEndError: If an iterable dataset has no further batch.
        """

    def skip(self, num_batches: int) -> None:
        """Leave out batches of an iterable dataset."""

    def state(self) -> dict[str, Any] | None:
        """Return a copy of the state of the dataset and its iterator; None if neither has one."""


class DatasetEndError(Exception):
    """An iterable dataset has no further batch. It is not a StopIteration, which user code may raise by mistake."""


def make_fetcher(job: FetchJob, state: dict[str, Any] | None, *, follows_end: bool = False) -> Fetcher:
    """Return the fetcher for an epoch.

    The dataset's state is restored first, because its ``__iter__`` may depend on that.

    Args:
        job: The settings of the loader.
        state: The state to resume from; None to begin.
        follows_end: Whether the state was saved at the end of the previous epoch. It is restored, and an epoch begins.

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
        """Return the dataset's state; None if it has none."""
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
        """Return the states of the iterator and the dataset; None if neither has one."""
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

    The methods of a torch module do not count: its state is its weights, not a position.
    """
    if isinstance(value, torch.nn.Module) and type(value).state_dict is torch.nn.Module.state_dict:
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownState:
    """A placeholder for a state that could not be obtained. A loader's ``state_dict`` raises an error for it.

    Attributes:
        reason: The reason, as text.
    """

    reason: str


def takes_arguments(value: Any) -> bool:
    """Return whether an object has a ``state_dict`` that requires arguments."""
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
        StateError: If a part is.
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
    """Return samples, with replacements for those that raise errors, or without those."""
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
