"""Where an epoch without shardio's order is, and the state that describes it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from shardio.errors import StateError
from shardio.loader.fetching import state_keys as keys
from shardio.loader.fetching.fetchers import check_known
from shardio.loader.fetching.indices import SamplerPosition
from shardio.loader.fetching.random_states import RandomStates


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerPosition:
    """Where a worker is.

    Attributes:
        state: The latest state of its dataset and iterator that the user has received batches up to; None if there is
            none, or if it is at the beginning.
        num_since: How many of its batches were delivered since.
        is_exhausted: Whether its part of an iterable dataset was at its end.
    """

    state: dict[str, Any] | None = None
    num_since: int = 0
    is_exhausted: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class EpochPosition:
    """Where an epoch is: the batches that the user received, not those that were requested ahead.

    Attributes:
        num_workers: How many workers there are; 0 if the calling process fetches.
        is_iterable: Whether the dataset is an IterableDataset.
        random_states: The generators as they were when the epoch began.
        workers: Where each worker is. The calling process counts as one.
        num_yielded: How many batches were delivered.
        num_samples: How many samples they had; 0 if the user's dataset makes them.
        batch_size: The size of the batches; 0 if a sampler determines it, and None if it is not known.
        sampler_epoch: The epoch that was set on the sampler; None if it has no ``set_epoch``.
        sampler: Where the sampler was after the batches that were delivered without a gap.
        ahead: The numbers of batches that were delivered although an earlier one was not.
        last_worker_id: The worker that made the latest batch.
        base_seed: The seed of the workers; None if it is not known.
        draws_seed: Whether it was drawn when the epoch began, not earlier.
        num_epochs_of_seed: How many epochs of that seed were begun before.
        follows_end: Whether the states of the workers are those of the end of the epoch before.
        len_called: What ``len(loader)`` said of an iterable dataset, as StatefulDataLoader's states have it.
        is_finished: Whether the epoch is over. The generators are those of its end then.
        num_to_replay: How many batches from here on were delivered before the state was saved; only in the states of
            StatefulDataLoader.
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
            random_states: The generators now.
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
        """Make this the position of a loader with some number of workers.

        Raises:
            WorkerCountError: If it depends on the number of workers, and that differs.
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
        """Make this the position of a loader with batches of some size; 0 if a sampler determines it.

        Raises:
            StateError: If it counts batches, and theirs is another size.
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
        """Return the state, with copies of everything in it.

        Raises:
            StateError: If that of a user's object is not known.
        """
        for state in (self.sampler.sampler_state, self.sampler.iterator_state, *(each.state for each in self.workers)):
            check_known(state)
        main = {
            keys.NUM_WORKERS: self.num_workers,
            keys.INDEX_SAMPLER_STATE: self.sampler.sampler_state,
            keys.SAMPLER_ITER_STATE: self.sampler.iterator_state,
            keys.SAMPLER_ITER_YIELDED: self.sampler.num_yielded,
            keys.SAMPLER_SAMPLES_YIELDED: self.sampler.num_samples,
            keys.BATCH_SIZE: self.batch_size,
            keys.LEN_CALLED: self.len_called,
            keys.SHARED_SEED: None,
            keys.BASE_SEED: self.base_seed,
            keys.DRAWS_SEED: self.draws_seed,
            keys.GENERATORS: None if self.random_states is None else self.random_states.encode(),
            keys.DELIVERED_AHEAD: sorted(self.ahead),
            keys.SAMPLER_EPOCH: self.sampler_epoch,
            keys.NUM_SAMPLES: self.num_samples,
            keys.NUM_EPOCHS_OF_SEED: self.num_epochs_of_seed,
        }
        workers = [self._dump_worker(worker) for worker in self.workers]
        if not self.num_workers:
            state = {
                **main,
                **workers[0],
                keys.NUM_YIELDED: self.num_yielded,
                keys.ITERATOR_FINISHED: self.is_finished,
            }
        else:
            state = {
                keys.SNAPSHOT: {
                    keys.SNAPSHOT_STEP: self.num_yielded,
                    keys.LAST_YIELDED_WORKER_ID: self.last_worker_id,
                    keys.MAIN_SNAPSHOT: main,
                    keys.WORKER_SNAPSHOTS: {
                        f"worker_{i}": {keys.WORKER_ID: i, **worker} for i, worker in enumerate(workers)
                    },
                },
                keys.STEPS_SINCE_SNAPSHOT: 0,
                keys.ITERATOR_FINISHED: self.is_finished,
            }
        return copy.deepcopy(state)

    def _dump_worker(self, worker: WorkerPosition) -> dict[str, Any]:
        state = worker.state or {keys.FETCHER_STATE: None, keys.DATASET_STATE: None}
        if self.is_iterable and state[keys.FETCHER_STATE] is None:
            state = {**state, keys.FETCHER_STATE: {keys.DATASET_ITER_STATE: None, keys.FETCHER_ENDED: False}}
        if worker.is_exhausted and state[keys.FETCHER_STATE] is not None:
            state = {**state, keys.FETCHER_STATE: {**state[keys.FETCHER_STATE], keys.FETCHER_ENDED: True}}
        return {**state, keys.NUM_SINCE_STATE: worker.num_since}


class WorkerCountError(StateError, AssertionError):
    """A state was saved with another number of workers. StatefulDataLoader raises an AssertionError for it."""


def load_position(state: dict[str, Any], *, is_iterable: bool) -> EpochPosition:
    """Return the position that a state describes.

    Args:
        state: A state of this loader's, or of torchdata's StatefulDataLoader.
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
    if is_alone := keys.SNAPSHOT not in state:
        main, workers = state, [state]
        num_yielded, last_worker_id = state[keys.NUM_YIELDED], -1
    else:
        snapshot = state[keys.SNAPSHOT]
        main, workers = snapshot[keys.MAIN_SNAPSHOT], list(snapshot[keys.WORKER_SNAPSHOTS].values())
        num_yielded, last_worker_id = snapshot[keys.SNAPSHOT_STEP], snapshot[keys.LAST_YIELDED_WORKER_ID]
    num_to_replay = state.get(keys.STEPS_SINCE_SNAPSHOT, 0)
    positions = [_load_worker(worker, num_yielded, is_alone=is_alone) for worker in workers]
    is_counted = any(keys.NUM_SINCE_STATE in worker for worker in workers)
    if is_iterable and not is_alone and not is_counted and not any(worker.state for worker in positions):
        # StatefulDataLoader does not say how far each worker was.
        num_to_replay, num_yielded, last_worker_id = num_to_replay + num_yielded, 0, len(workers) - 1
    generators = main.get(keys.GENERATORS)
    return EpochPosition(
        num_workers=0 if is_alone else len(workers),
        is_iterable=is_iterable,
        random_states=None if generators is None else RandomStates.decode(generators),
        workers=positions,
        num_yielded=num_yielded,
        sampler=SamplerPosition(
            num_yielded=main[keys.SAMPLER_ITER_YIELDED],
            num_samples=main.get(keys.SAMPLER_SAMPLES_YIELDED),
            sampler_state=main[keys.INDEX_SAMPLER_STATE],
            iterator_state=main.get(keys.SAMPLER_ITER_STATE),
        ),
        ahead=set(main.get(keys.DELIVERED_AHEAD, ())),
        last_worker_id=last_worker_id,
        base_seed=main.get(keys.BASE_SEED),
        draws_seed=main.get(keys.DRAWS_SEED, True),
        batch_size=main.get(keys.BATCH_SIZE),
        sampler_epoch=main.get(keys.SAMPLER_EPOCH),
        num_samples=main.get(keys.NUM_SAMPLES, 0),
        num_epochs_of_seed=main.get(keys.NUM_EPOCHS_OF_SEED, 0),
        len_called=main[keys.LEN_CALLED],
        is_finished=state[keys.ITERATOR_FINISHED],
        num_to_replay=num_to_replay,
    )


def _load_worker(worker: dict[str, Any], num_yielded: int, *, is_alone: bool) -> WorkerPosition:
    fetcher_state = worker[keys.FETCHER_STATE]
    is_stateless = worker[keys.DATASET_STATE] is None and (
        fetcher_state is None or fetcher_state[keys.DATASET_ITER_STATE] is None
    )
    # StatefulDataLoader keeps no count: in one process, all batches are the caller's.
    num_since = worker.get(keys.NUM_SINCE_STATE, num_yielded if is_alone and is_stateless else 0)
    return WorkerPosition(
        state=None
        if is_stateless
        else {keys.FETCHER_STATE: fetcher_state, keys.DATASET_STATE: worker[keys.DATASET_STATE]},
        num_since=num_since,
        is_exhausted=bool(fetcher_state and fetcher_state[keys.FETCHER_ENDED]),
    )
