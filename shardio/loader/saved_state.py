"""The state of a loader without shardio's order: its format, and the states of objects and random generators in it.

States have the same keys as those of torchdata's StatefulDataLoader, because programs may read them. This loader can
also resume from states that StatefulDataLoader saved, unless they contain the state of torchdata's own samplers.
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
from typing import Any

import numpy as np
import torch

from shardio.errors import StateError
from shardio.process import describe_error, let_through
from shardio.values import count

SNAPSHOT, MAIN_SNAPSHOT, WORKER_SNAPSHOTS = "_snapshot", "_main_snapshot", "_worker_snapshots"
SNAPSHOT_STEP, STEPS_SINCE_SNAPSHOT = "_snapshot_step", "_steps_since_snapshot"
NUM_YIELDED, LAST_YIELDED_WORKER_ID, ITERATOR_FINISHED = "_num_yielded", "_last_yielded_worker_id", "_iterator_finished"
FETCHER_STATE, DATASET_ITER_STATE, FETCHER_ENDED = "fetcher_state", "dataset_iter_state", "fetcher_ended"
DATASET_STATE = "dataset_state"

# Only this loader's states have these keys.
GENERATORS, DELIVERED_AHEAD, NUM_SINCE_STATE = "_generators", "_delivered_ahead", "num_batches_since_state"

OF_SAMPLER = {
    "num_yielded": "_sampler_iter_yielded",
    "sampler_state": "_index_sampler_state",
    "iterator_state": "_sampler_iter_state",
    "num_samples": "_sampler_samples_yielded",
}
"""The keys of a SamplerPosition's attributes.

StatefulDataLoader's states have the first two keys, and some of them also have the third key.
"""

OF_EPOCH = {
    "len_called": "_IterableDataset_len_called",
    "base_seed": "_base_seed",
    "draws_seed": "_draws_seed",
    "batch_size": "_batch_size",
    "sampler_epoch": "_sampler_epoch",
    "num_samples": "_num_samples",
    "num_epochs_of_seed": "_num_epochs_of_seed",
}
"""The keys of some attributes of an EpochPosition.

StatefulDataLoader's states have the first key, and some of them also have the second key.
"""

REQUIRED = (OF_SAMPLER["num_yielded"], OF_SAMPLER["sampler_state"], OF_EPOCH["len_called"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPosition:
    """The position of a sampler.

    Attributes:
        num_yielded: The number of values that the sampler has yielded.
        num_samples: The number of samples in these values; None if the batches are not those of torch's BatchSampler.
        sampler_state: The state of the sampler; None if the sampler has no state.
        iterator_state: The state of the sampler's iterator; None if the iterator has no state.
    """

    num_yielded: int = 0
    num_samples: int | None = None
    sampler_state: Any = None
    iterator_state: Any = None


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerPosition:
    """The position of a worker.

    Attributes:
        state: The latest known state of the worker's dataset and iterator, after a batch that the user received; None
            at the beginning, or if neither has a state.
        num_since: The number of the worker's batches that were delivered after that state.
        is_exhausted: Whether the worker's part of an iterable dataset was at its end.
    """

    state: dict[str, Any] | None = None
    num_since: int = 0
    is_exhausted: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class EpochPosition:
    """A position in an epoch: after the batches that the user received, not after those that were requested in advance.

    Attributes:
        num_workers: The number of workers; 0 if the calling process fetches.
        is_iterable: Whether the dataset is an IterableDataset.
        random_states: The states of the generators at the beginning of the epoch.
        workers: The position of each worker. The calling process counts as a worker.
        num_yielded: The number of delivered batches.
        num_samples: The number of samples in the delivered batches; 0 if the user's dataset makes the batches.
        batch_size: The size of the batches; 0 if a sampler determines it, and None if it is not known.
        sampler_epoch: The epoch that was set on the sampler; None if the sampler has no ``set_epoch``.
        sampler: The position of the sampler after the batches that were delivered without a gap.
        ahead: The numbers that identify the batches delivered ahead of an earlier batch.
        last_worker_id: The worker that made the latest batch.
        base_seed: The seed of the workers; None if it is not known.
        draws_seed: Whether that seed was drawn when the epoch began, not earlier.
        num_epochs_of_seed: The number of earlier epochs with that seed.
        follows_end: Whether the states of the workers were saved at the end of the previous epoch.
        len_called: The value of ``len(loader)`` with an iterable dataset, as in StatefulDataLoader's states.
        is_finished: Whether the epoch is over. If so, ``random_states`` are the states at the end of the epoch.
        num_to_replay: The number of batches after this position that were delivered before the state was saved; only in
            the states of StatefulDataLoader.
    """

    num_workers: int
    is_iterable: bool
    random_states: RandomStates | None
    workers: list[WorkerPosition]
    num_yielded: int = 0
    num_samples: int = 0
    batch_size: int | None = None
    sampler_epoch: int | None = None
    sampler: SamplerPosition = field(default_factory=SamplerPosition)
    ahead: set[int] = field(default_factory=set)
    last_worker_id: int = -1
    base_seed: int | None = None
    draws_seed: bool = True
    num_epochs_of_seed: int = 0
    follows_end: bool = False
    len_called: int | None = None
    is_finished: bool = False
    num_to_replay: int = 0

    @classmethod
    def begin(cls, num_workers: int, *, is_iterable: bool, random_states: RandomStates | None) -> EpochPosition:
        """Return the beginning of an epoch."""
        return cls(
            num_workers=num_workers,
            is_iterable=is_iterable,
            random_states=random_states,
            workers=[WorkerPosition() for _ in range(max(num_workers, 1))],
            last_worker_id=num_workers - 1,
        )

    def begin_next(self, random_states: RandomStates, *, keeps_workers: bool) -> EpochPosition:
        """Return the beginning of the next epoch, given that this epoch is over.

        Args:
            random_states: The current states of the generators.
            keeps_workers: Whether the workers of this epoch serve the next epoch and keep the states of their datasets.
        """
        position = self.begin(self.num_workers, is_iterable=self.is_iterable, random_states=random_states)
        position.sampler_epoch, position.batch_size = self.sampler_epoch, self.batch_size
        if keeps_workers:
            position.workers = [WorkerPosition(state=worker.state) for worker in self.workers]
            position.follows_end = True
            position.base_seed, position.draws_seed = self.base_seed, not self.num_workers
            position.num_epochs_of_seed = 0 if position.draws_seed else self.num_epochs_of_seed + 1
        return position

    def fit(self, num_workers: int) -> None:
        """Convert this position to that of a loader with ``num_workers`` workers.

        Raises:
            WorkerCountError: If the position depends on the number of workers, and that number differs.
        """
        if num_workers == self.num_workers:
            return
        if any(worker.state is not None for worker in self.workers) or (
            self.is_iterable and self.num_yielded and not self.is_finished
        ):
            raise WorkerCountError(
                f"this state holds the position of each of {count(self.num_workers, 'worker')} in its own part of the "
                f"dataset, but the loader has num_workers={num_workers}: use num_workers={self.num_workers}"
            )
        self.workers = [WorkerPosition() for _ in range(max(num_workers, 1))]
        self.num_workers, self.last_worker_id = num_workers, (self.num_yielded - 1) % max(num_workers, 1)

    def fit_batches(self, batch_size: int) -> None:
        """Convert this position to that of a loader with batches of this size (0 if a sampler determines it).

        Raises:
            StateError: If the position counts batches of a different size.
        """
        saved, self.batch_size = self.batch_size, batch_size
        if saved in (None, batch_size) or self.is_finished or not (self.num_yielded or self.ahead):
            return
        counts_samples = saved and batch_size and not self.ahead
        if counts_samples and (not self.is_iterable or not any(worker.num_since for worker in self.workers)):
            return
        raise StateError(
            f"this state counts batches, and was saved with batch_size={saved or None}, but the loader has "
            f"batch_size={batch_size or None}: use batch_size={saved or None}"
        )

    def dump(self) -> dict[str, Any]:
        """Return a deep copy of the state.

        Raises:
            StateError: If the state of a user's object is not known.
        """
        for state in (self.sampler.sampler_state, self.sampler.iterator_state, *(each.state for each in self.workers)):
            check_known(state)
        main = {
            "_num_workers": self.num_workers,
            "_shared_seed": None,
            **{key: getattr(self.sampler, name) for name, key in OF_SAMPLER.items()},
            **{key: getattr(self, name) for name, key in OF_EPOCH.items()},
            GENERATORS: None if self.random_states is None else self.random_states.encode(),
            DELIVERED_AHEAD: sorted(self.ahead),
        }
        workers = [self._dump_worker(worker) for worker in self.workers]
        if not self.num_workers:
            state = {**main, **workers[0], NUM_YIELDED: self.num_yielded}
        else:
            state = {
                SNAPSHOT: {
                    SNAPSHOT_STEP: self.num_yielded,
                    LAST_YIELDED_WORKER_ID: self.last_worker_id,
                    MAIN_SNAPSHOT: main,
                    WORKER_SNAPSHOTS: {f"worker_{i}": {"worker_id": i, **worker} for i, worker in enumerate(workers)},
                },
                STEPS_SINCE_SNAPSHOT: 0,
            }
        return copy.deepcopy({**state, ITERATOR_FINISHED: self.is_finished})

    def _dump_worker(self, worker: WorkerPosition) -> dict[str, Any]:
        state = worker.state or {FETCHER_STATE: None, DATASET_STATE: None}
        if self.is_iterable and state[FETCHER_STATE] is None:
            state = {**state, FETCHER_STATE: {DATASET_ITER_STATE: None, FETCHER_ENDED: False}}
        if worker.is_exhausted and state[FETCHER_STATE] is not None:
            state = {**state, FETCHER_STATE: {**state[FETCHER_STATE], FETCHER_ENDED: True}}
        return {**state, NUM_SINCE_STATE: worker.num_since}


class WorkerCountError(StateError, AssertionError):
    """A state was saved with a different number of workers. As in StatefulDataLoader, this is an AssertionError."""


def load_position(state: dict[str, Any], *, is_iterable: bool) -> EpochPosition:
    """Return the position that a state describes.

    Args:
        state: A state of this loader or of torchdata's StatefulDataLoader.
        is_iterable: Whether the loader's dataset is an IterableDataset.

    Raises:
        StateError: If the state has a different format.
    """
    state = copy.deepcopy(state)
    try:
        return _load(state, is_iterable=is_iterable)
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"this state was not saved by a loader of this kind ({error!r} while reading it): load the state of a "
            "loader with the same kind of dataset and sampler"
        ) from error


def _load(state: dict[str, Any], *, is_iterable: bool) -> EpochPosition:
    if is_alone := SNAPSHOT not in state:
        main, workers = state, [state]
        num_yielded, last_worker_id = state[NUM_YIELDED], -1
    else:
        snapshot = state[SNAPSHOT]
        main, workers = snapshot[MAIN_SNAPSHOT], list(snapshot[WORKER_SNAPSHOTS].values())
        num_yielded, last_worker_id = snapshot[SNAPSHOT_STEP], snapshot[LAST_YIELDED_WORKER_ID]
    num_to_replay = state.get(STEPS_SINCE_SNAPSHOT, 0)
    positions = [_load_worker(worker, num_yielded, is_alone=is_alone) for worker in workers]
    is_counted = any(NUM_SINCE_STATE in worker for worker in workers)
    if is_iterable and not is_alone and not is_counted and not any(worker.state for worker in positions):
        # StatefulDataLoader does not save the progress of each worker.
        num_to_replay, num_yielded, last_worker_id = num_to_replay + num_yielded, 0, len(workers) - 1
    if missing := [key for key in REQUIRED if key not in main]:
        raise KeyError(missing[0])
    generators = main.get(GENERATORS)
    return EpochPosition(
        num_workers=0 if is_alone else len(workers),
        is_iterable=is_iterable,
        random_states=None if generators is None else RandomStates.decode(generators),
        workers=positions,
        num_yielded=num_yielded,
        sampler=SamplerPosition(**{name: main[key] for name, key in OF_SAMPLER.items() if key in main}),
        ahead=set(main.get(DELIVERED_AHEAD, ())),
        last_worker_id=last_worker_id,
        is_finished=state[ITERATOR_FINISHED],
        num_to_replay=num_to_replay,
        **{name: main[key] for name, key in OF_EPOCH.items() if key in main},
    )


def _load_worker(worker: dict[str, Any], num_yielded: int, *, is_alone: bool) -> WorkerPosition:
    fetcher_state = worker[FETCHER_STATE]
    is_stateless = worker[DATASET_STATE] is None and (
        fetcher_state is None or fetcher_state[DATASET_ITER_STATE] is None
    )
    # StatefulDataLoader does not save this number: without workers, the calling process fetched all batches.
    num_since = worker.get(NUM_SINCE_STATE, num_yielded if is_alone and is_stateless else 0)
    return WorkerPosition(
        state=None if is_stateless else {FETCHER_STATE: fetcher_state, DATASET_STATE: worker[DATASET_STATE]},
        num_since=num_since,
        is_exhausted=bool(fetcher_state and fetcher_state[FETCHER_ENDED]),
    )


def has_state(value: Any) -> bool:
    """Return whether an object has the two methods of StatefulDataLoader's protocol.

    The methods of a torch module do not count: its state is its weights, not a position.
    """
    if isinstance(value, torch.nn.Module) and type(value).state_dict is torch.nn.Module.state_dict:
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownState:
    """A placeholder for a state that could not be obtained.

    A loader's ``state_dict`` raises an error if its state contains a placeholder.

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
    except ValueError:  # Some compiled functions have no signature.
        return False
    return False


def dump_state(value: Any) -> Any:
    """Return a copy of an object's state; None if the object has no state, and an UnknownState if its method fails."""
    if not has_state(value):
        return None
    try:
        return copy.deepcopy(value.state_dict())
    except Exception as error:  # A user's method may fail in any way, and the state may never be requested.
        let_through(error)
        return UnknownState(reason=f"{type(value).__name__}.state_dict() raised {describe_error(error)}")


def check_known(state: Any) -> None:
    """Check that no part of a state is unknown.

    Raises:
        StateError: If a part is unknown.
    """
    if isinstance(state, UnknownState):
        raise StateError(
            f"the loader's position cannot be saved: {state.reason}. Define a state_dict that takes no arguments "
            "and returns values that can be copied and pickled, or define none"
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
            "this object lacks these methods, so its position is not known: load the state into a loader with the same "
            "classes of datasets and samplers. (torchdata's StatefulDataLoader adds the methods to torch's "
            "RandomSampler)"
        )
    value.load_state_dict(copy.deepcopy(state))


_GLOBALS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),  # User samplers may draw from numpy's generator.
}
"""The functions that get and set the state of each global generator of a process, by the generator's name."""

States = dict[str, Any]
"""States of global generators by name: those of torch's CPU generator, and those of random and numpy.random."""


def capture(names: Iterable[str]) -> States:
    """Return the current states of some of the process's global generators."""
    return {name: _GLOBALS[name][0]() for name in names}


class OwnGenerators:
    """The loader's own generators, which continue from a loaded state in place of the process's generators.

    The generators of the process belong to the program. If the state of such a generator is already the loaded
    state, the loader draws from it directly, as the stopped run did, and needs no generator of its own.

    Args:
        states: The states from which to continue.
        process: The states of the process's generators when the state was loaded.
    """

    def __init__(self, states: States, process: States) -> None:
        self._process = process
        self._states = {name: states[name] for name in _find_differences(states, capture(states))}

    def without_changed(self) -> OwnGenerators:
        """Return the generators whose counterparts in the process have not been seeded, restored or used."""
        return OwnGenerators(self.cover({}), self._process)

    def cover(self, states: States) -> States:
        """Return the given states, with this object's state for each generator that the process has not changed."""
        changed = _find_differences(self._process, capture(self._states))
        return states | {name: state for name, state in self._states.items() if name not in changed}

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """In the block, draw from these generators. The process's generators keep their states."""
        before = capture(self._states)
        _apply(self._states)
        try:
            yield
        finally:
            self._states = capture(self._states)
            _apply(before)


def drawing_from(generators: OwnGenerators | None) -> AbstractContextManager[None]:
    """Return a context in which samplers draw from the given generators or, for None, from those of the process."""
    return nullcontext() if generators is None else generators.drawing()


@dataclass(kw_only=True, eq=False)
class RandomStates:
    """The states of all generators from which a sampler may draw.

    Attributes:
        globals: The states of the process's global generators, perhaps without those that the sampler does not use.
        own: The states of the generators that the user passed to the loader or its samplers, uint8 [n] each.
    """

    globals: States
    own: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def capture(cls, generators: Sequence[torch.Generator], *, includes_others: bool) -> RandomStates:
        """Return the current states.

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
        """Return the states that :meth:`encode` encoded."""
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
