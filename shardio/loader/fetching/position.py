"""The positions of samplers, workers and epochs, and their states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler

from shardio.errors import StateError
from shardio.loader.fetching import fetchers
from shardio.loader.fetching.fetchers import (
    OwnGenerators,
    RandomStates,
    check_known,
    drawing_from,
    dump_state,
    has_state,
    load_state,
)

_SAMPLES_YIELDED, _SAMPLER_STATE, _SAMPLER_ITER_STATE = "samples_yielded", "sampler_state", "sampler_iter_state"
_HAS_ENDED = "has_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPosition:
    """The position of a sampler.

    Attributes:
        num_yielded: The number of values that it has yielded.
        num_samples: The number of samples in these values; None if the batches are not those of torch's BatchSampler.
        sampler_state: The state of the sampler; None if it has none.
        iterator_state: The state of its iterator; None if it has none.
    """

    num_yielded: int = 0
    num_samples: int | None = None
    sampler_state: Any = None
    iterator_state: Any = None


class Indices:
    """An epoch of a loader's sampler.

    A sampler with its own state is asked for it, and receives it to resume. Any other sampler yields the same values
    again, given the same generators, and the earlier ones are dropped without reading samples.

    Args:
        sampler: The loader's batch sampler or, without batches, its sampler.
        generators: The generators from which the sampler draws; None for the process's generators.

    Attributes:
        position: The position of the sampler.
    """

    def __init__(self, sampler: Any, generators: OwnGenerators | None) -> None:
        self._sampler, self._generators = sampler, generators
        self._batches = _BatchIterator(sampler) if type(sampler) is BatchSampler else None
        with drawing_from(self._generators):
            self._iterator: Iterator[Any] = self._batches or iter(sampler)
        self._prepared = list[Any]()  # Drawn, but not yielded.
        self.position = SamplerPosition()
        self._track()

    def resume(self, position: SamplerPosition, skip: Callable[[Any], None] | None = None) -> None:
        """Go to a position in the epoch.

        Args:
            position: The position.
            skip: Called with each earlier value, if the sampler has no state.
        """
        with drawing_from(self._generators):
            if not self._restore(position):
                for batch in self._before(position):
                    if skip is not None:
                        skip(batch)
        self.position = position

    def begin_after(self, position: SamplerPosition) -> None:
        """Begin the epoch that follows one that ended at a position."""
        with drawing_from(self._generators):
            if not self._restore(position):
                return
            if self._batches is not None:
                self._batches.has_ended = False
            # Some samplers' states say where the next epoch begins, others that this one is over.
            first = list(itertools.islice(self._iterator, 1))
            if first:
                self._iterator = itertools.chain(first, self._iterator)
            else:
                self._batches = None if self._batches is None else _BatchIterator(self._sampler)
                self._iterator = self._batches or iter(self._sampler)
        self.position = SamplerPosition()
        self._track()

    def prepare(self) -> None:
        """Make a sampler without a state draw its random numbers now, not with the first batch."""
        if not self._prepared and self.position.sampler_state is None and self.position.iterator_state is None:
            with drawing_from(self._generators):
                self._prepared = list(itertools.islice(self._iterator, 1))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.draw()

    def draw(self) -> Any:
        """Return the sampler's next value.

        Raises:
            StopIteration: At the end.
        """
        with drawing_from(self._generators):
            try:
                index = self._prepared.pop() if self._prepared else next(self._iterator)
            except StopIteration:
                self._track()
                raise
        self._track(1)
        return index

    def _before(self, position: SamplerPosition) -> Iterator[Any]:
        """Return an iterator over the values before a position. Batches may have had another size when it was saved."""
        num_samples = position.num_samples
        if num_samples is None and isinstance(position.iterator_state, dict):
            num_samples = position.iterator_state.get(_SAMPLES_YIELDED)  # StatefulDataLoader counts them there.
        if self._batches is None or num_samples is None:
            return itertools.islice(self._iterator, position.num_yielded)
        return self._batches.pass_over(num_samples)

    def _restore(self, position: SamplerPosition) -> bool:
        if self._batches is not None:
            return self._batches.restore(position.iterator_state)
        if position.sampler_state is not None:
            load_state(self._sampler, position.sampler_state)
            self._iterator = iter(self._sampler)
        if position.iterator_state is not None:
            load_state(self._iterator, position.iterator_state)
        return position.sampler_state is not None or position.iterator_state is not None

    def _track(self, num_drawn: int = 0) -> None:
        is_batched = self._batches is not None
        self.position = SamplerPosition(
            num_yielded=self.position.num_yielded + num_drawn,
            num_samples=None if self._batches is None else self._batches.num_samples,
            sampler_state=None if is_batched else dump_state(self._sampler),
            iterator_state=self._batches.state() if self._batches is not None else dump_state(self._iterator),
        )


class _BatchIterator(Iterator[list[Any]]):
    """The batches of torch's BatchSampler, with the states of the sampler in it and of its iterator.

    As in torch, a batch size that the program sets applies to the next batch or, with ``drop_last``, the next epoch.

    Attributes:
        num_samples: The number of yielded samples.
        has_ended: Whether the sampler has yielded all.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._batch_sampler = batch_sampler
        self._sampler: Any = batch_sampler.sampler
        self._iterator: Iterator[Any] | None = None  # Made by the first batch, as in torch: samplers may draw then.
        self._only_size: int | None = None  # Of all batches of the epoch, with drop_last.
        self.num_samples = 0
        self.has_ended = False

    def __next__(self) -> list[Any]:
        iterator = self._begun()
        size = self._only_size or self._batch_sampler.batch_size
        batch = [] if self.has_ended else list(itertools.islice(iterator, size))
        self.num_samples += len(batch)
        self.has_ended = len(batch) < size  # Samplers often reset themselves then.
        if not batch or (self._only_size is not None and self.has_ended):
            raise StopIteration
        return batch

    def pass_over(self, num_samples: int) -> Iterator[list[Any]]:
        """Yield a number of samples, in batches of any sizes."""
        size = self._batch_sampler.batch_size
        while self.num_samples < num_samples:
            batch = list(itertools.islice(self._begun(), min(size, num_samples - self.num_samples)))
            if not batch:
                return
            self.num_samples += len(batch)
            yield batch

    def state(self) -> Any:
        states: dict[str, Any] = {_SAMPLES_YIELDED: self.num_samples, _HAS_ENDED: self.has_ended}
        if has_state(self._sampler):
            states[_SAMPLER_STATE] = dump_state(self._sampler)
        if self._iterator is not None and has_state(self._iterator):
            states[_SAMPLER_ITER_STATE] = dump_state(self._iterator)
        return states if len(states) > 2 else None

    def restore(self, states: Any) -> bool:
        if states is None or not (_SAMPLER_STATE in states or _SAMPLER_ITER_STATE in states):
            return False
        if _SAMPLER_STATE in states:
            load_state(self._sampler, states[_SAMPLER_STATE])
        self._iterator = None
        if _SAMPLER_ITER_STATE in states:
            load_state(self._begun(), states[_SAMPLER_ITER_STATE])
        self.num_samples, self.has_ended = states[_SAMPLES_YIELDED], states.get(_HAS_ENDED, False)
        return True

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._sampler)
            self._only_size = self._batch_sampler.batch_size if self._batch_sampler.drop_last else None
        return self._iterator


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerPosition:
    """The position of a worker.

    Attributes:
        state: The latest state of its dataset and iterator that the user has received batches up to; None if there is
            none, or if it is at the beginning.
        num_since: The number of its batches that were delivered since.
        is_exhausted: Whether its part of an iterable dataset was at its end.
    """

    state: dict[str, Any] | None = None
    num_since: int = 0
    is_exhausted: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class EpochPosition:
    """The position of an epoch: after the batches that the user received, not those that were requested ahead.

    Attributes:
        num_workers: The number of workers; 0 if the calling process fetches.
        is_iterable: Whether the dataset is an IterableDataset.
        random_states: The states of the generators at the beginning of the epoch.
        workers: The position of each worker. The calling process counts as one.
        num_yielded: The number of delivered batches.
        num_samples: The number of samples in them; 0 if the user's dataset makes the batches.
        batch_size: The size of the batches; 0 if a sampler determines it, and None if it is not known.
        sampler_epoch: The epoch that was set on the sampler; None if it has no ``set_epoch``.
        sampler: The position of the sampler after the batches that were delivered without a gap.
        ahead: The numbers of batches that were delivered before an earlier one.
        last_worker_id: The worker that made the latest batch.
        base_seed: The seed of the workers; None if it is not known.
        draws_seed: Whether it was drawn when the epoch began, not earlier.
        num_epochs_of_seed: The number of earlier epochs with that seed.
        follows_end: Whether the states of the workers were saved at the end of the previous epoch.
        len_called: The value of ``len(loader)`` with an iterable dataset, as in StatefulDataLoader's states.
        is_finished: Whether the epoch is over. ``random_states`` are then those at its end.
        num_to_replay: The number of batches from here on that were delivered before the state was saved; only in the
            states of StatefulDataLoader.
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
    def begin(cls, num_workers: int, *, is_iterable: bool, random_states: RandomStates) -> EpochPosition:
        """Return the beginning of an epoch."""
        return cls(
            num_workers=num_workers,
            is_iterable=is_iterable,
            random_states=random_states,
            workers=[WorkerPosition() for _ in range(max(num_workers, 1))],
            last_worker_id=num_workers - 1,
        )

    def begin_next(self, random_states: RandomStates, *, keeps_workers: bool) -> EpochPosition:
        """Return the beginning of the epoch after this one, which is over.

        Args:
            random_states: The present states of the generators.
            keeps_workers: Whether the workers of this epoch serve the next one, with the states of their datasets.
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
        """Convert this to the position of a loader with some number of workers.

        Raises:
            WorkerCountError: If the position depends on the number of workers, and that differs.
        """
        if num_workers == self.num_workers:
            return
        if any(worker.state is not None for worker in self.workers) or (
            self.is_iterable and self.num_yielded and not self.is_finished
        ):
            raise WorkerCountError(
                f"this state says how far each of {self.num_workers} workers is in its own part of the dataset, but "
                f"the loader has num_workers={num_workers}: use num_workers={self.num_workers}"
            )
        self.workers = [WorkerPosition() for _ in range(max(num_workers, 1))]
        self.num_workers, self.last_worker_id = num_workers, (self.num_yielded - 1) % max(num_workers, 1)

    def fit_batches(self, batch_size: int) -> None:
        """Convert this to the position of a loader with batches of some size; 0 if a sampler determines it.

        Raises:
            StateError: If the position counts batches of another size.
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
            fetchers.NUM_WORKERS: self.num_workers,
            fetchers.INDEX_SAMPLER_STATE: self.sampler.sampler_state,
            fetchers.SAMPLER_ITER_STATE: self.sampler.iterator_state,
            fetchers.SAMPLER_ITER_YIELDED: self.sampler.num_yielded,
            fetchers.SAMPLER_SAMPLES_YIELDED: self.sampler.num_samples,
            fetchers.BATCH_SIZE: self.batch_size,
            fetchers.LEN_CALLED: self.len_called,
            fetchers.SHARED_SEED: None,
            fetchers.BASE_SEED: self.base_seed,
            fetchers.DRAWS_SEED: self.draws_seed,
            fetchers.GENERATORS: None if self.random_states is None else self.random_states.encode(),
            fetchers.DELIVERED_AHEAD: sorted(self.ahead),
            fetchers.SAMPLER_EPOCH: self.sampler_epoch,
            fetchers.NUM_SAMPLES: self.num_samples,
            fetchers.NUM_EPOCHS_OF_SEED: self.num_epochs_of_seed,
        }
        workers = [self._dump_worker(worker) for worker in self.workers]
        if not self.num_workers:
            state = {
                **main,
                **workers[0],
                fetchers.NUM_YIELDED: self.num_yielded,
                fetchers.ITERATOR_FINISHED: self.is_finished,
            }
        else:
            state = {
                fetchers.SNAPSHOT: {
                    fetchers.SNAPSHOT_STEP: self.num_yielded,
                    fetchers.LAST_YIELDED_WORKER_ID: self.last_worker_id,
                    fetchers.MAIN_SNAPSHOT: main,
                    fetchers.WORKER_SNAPSHOTS: {
                        f"worker_{i}": {fetchers.WORKER_ID: i, **worker} for i, worker in enumerate(workers)
                    },
                },
                fetchers.STEPS_SINCE_SNAPSHOT: 0,
                fetchers.ITERATOR_FINISHED: self.is_finished,
            }
        return copy.deepcopy(state)

    def _dump_worker(self, worker: WorkerPosition) -> dict[str, Any]:
        state = worker.state or {fetchers.FETCHER_STATE: None, fetchers.DATASET_STATE: None}
        if self.is_iterable and state[fetchers.FETCHER_STATE] is None:
            state = {
                **state,
                fetchers.FETCHER_STATE: {fetchers.DATASET_ITER_STATE: None, fetchers.FETCHER_ENDED: False},
            }
        if worker.is_exhausted and state[fetchers.FETCHER_STATE] is not None:
            state = {**state, fetchers.FETCHER_STATE: {**state[fetchers.FETCHER_STATE], fetchers.FETCHER_ENDED: True}}
        return {**state, fetchers.NUM_SINCE_STATE: worker.num_since}


class WorkerCountError(StateError, AssertionError):
    """A state was saved with another number of workers. StatefulDataLoader raises an AssertionError for it."""


def load_position(state: dict[str, Any], *, is_iterable: bool) -> EpochPosition:
    """Return the position that a state describes.

    Args:
        state: A state of this loader or of torchdata's StatefulDataLoader.
        is_iterable: Whether the loader's dataset is an IterableDataset.

    Raises:
        StateError: If it is not such a state.
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
    if is_alone := fetchers.SNAPSHOT not in state:
        main, workers = state, [state]
        num_yielded, last_worker_id = state[fetchers.NUM_YIELDED], -1
    else:
        snapshot = state[fetchers.SNAPSHOT]
        main, workers = snapshot[fetchers.MAIN_SNAPSHOT], list(snapshot[fetchers.WORKER_SNAPSHOTS].values())
        num_yielded, last_worker_id = snapshot[fetchers.SNAPSHOT_STEP], snapshot[fetchers.LAST_YIELDED_WORKER_ID]
    num_to_replay = state.get(fetchers.STEPS_SINCE_SNAPSHOT, 0)
    positions = [_load_worker(worker, num_yielded, is_alone=is_alone) for worker in workers]
    is_counted = any(fetchers.NUM_SINCE_STATE in worker for worker in workers)
    if is_iterable and not is_alone and not is_counted and not any(worker.state for worker in positions):
        # StatefulDataLoader does not say how far each worker was.
        num_to_replay, num_yielded, last_worker_id = num_to_replay + num_yielded, 0, len(workers) - 1
    generators = main.get(fetchers.GENERATORS)
    return EpochPosition(
        num_workers=0 if is_alone else len(workers),
        is_iterable=is_iterable,
        random_states=None if generators is None else RandomStates.decode(generators),
        workers=positions,
        num_yielded=num_yielded,
        sampler=SamplerPosition(
            num_yielded=main[fetchers.SAMPLER_ITER_YIELDED],
            num_samples=main.get(fetchers.SAMPLER_SAMPLES_YIELDED),
            sampler_state=main[fetchers.INDEX_SAMPLER_STATE],
            iterator_state=main.get(fetchers.SAMPLER_ITER_STATE),
        ),
        ahead=set(main.get(fetchers.DELIVERED_AHEAD, ())),
        last_worker_id=last_worker_id,
        base_seed=main.get(fetchers.BASE_SEED),
        draws_seed=main.get(fetchers.DRAWS_SEED, True),
        batch_size=main.get(fetchers.BATCH_SIZE),
        sampler_epoch=main.get(fetchers.SAMPLER_EPOCH),
        num_samples=main.get(fetchers.NUM_SAMPLES, 0),
        num_epochs_of_seed=main.get(fetchers.NUM_EPOCHS_OF_SEED, 0),
        len_called=main[fetchers.LEN_CALLED],
        is_finished=state[fetchers.ITERATOR_FINISHED],
        num_to_replay=num_to_replay,
    )


def _load_worker(worker: dict[str, Any], num_yielded: int, *, is_alone: bool) -> WorkerPosition:
    fetcher_state = worker[fetchers.FETCHER_STATE]
    is_stateless = worker[fetchers.DATASET_STATE] is None and (
        fetcher_state is None or fetcher_state[fetchers.DATASET_ITER_STATE] is None
    )
    # StatefulDataLoader keeps no count: in one process, all batches are the caller's.
    num_since = worker.get(fetchers.NUM_SINCE_STATE, num_yielded if is_alone and is_stateless else 0)
    return WorkerPosition(
        state=None
        if is_stateless
        else {fetchers.FETCHER_STATE: fetcher_state, fetchers.DATASET_STATE: worker[fetchers.DATASET_STATE]},
        num_since=num_since,
        is_exhausted=bool(fetcher_state and fetcher_state[fetchers.FETCHER_ENDED]),
    )
