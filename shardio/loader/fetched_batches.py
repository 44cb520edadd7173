"""The batches of an epoch, fetched by workers or by the calling process, and delivered in order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

from shardio.epochs import Count, find_held, hand_over
from shardio.loader.executor import IN_ANOTHER_PROCESS, BatchIterator
from shardio.loader.fetch_job import DatasetEndError, FetchJob, make_fetcher
from shardio.loader.fetch_pool import FetchWorkers
from shardio.loader.fetch_worker import (
    Answer,
    BeginEpoch,
    Begun,
    Fetched,
    FetchFailed,
    FetchTask,
    WorkerExhausted,
    count_samples,
    measure_since,
)
from shardio.loader.sampler_epochs import Indices
from shardio.loader.saved_state import EpochPosition, SamplerPosition
from shardio.loader.statistics import Tally
from shardio.loader.wire import Failure
from shardio.process import let_through, no_end

_WORKERS_ENDED = (
    "this iterator's workers were shut down before its last batch: iterate over the loader again. Workers end when "
    "another iterator resumes from a loaded state, or when a framework shuts them down"
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    number: int
    worker_id: int
    after: SamplerPosition
    answer: Fetched | FetchFailed | WorkerExhausted | None = None


class TimedOutError(RuntimeError):
    """No batch arrived within ``timeout``."""


class WorkerBatches(BatchIterator):
    """The batches of one epoch.

    Args:
        workers: The workers that fetch the batches.
        indices: The indices of each batch.
        position: The position at which the epoch begins; it is updated with each batch that the user receives.
        task_ids: An iterator over unused numbers for tasks.
        tally: The counts of the epoch.
        in_order: Whether the batches are delivered in the order of the indices.
        timeout_s: The longest wait for a batch, in seconds; 0 waits indefinitely.
        state_every: The number of batches that a worker fetches between reports of its state; 0 for never.
        closes_workers: Whether the workers end with the epoch.

    Attributes:
        workers: The workers.
        indices: The indices of each batch.
    """

    def __init__(
        self,
        workers: FetchWorkers,
        indices: Indices,
        position: EpochPosition,
        task_ids: Iterator[int],
        tally: Tally,
        *,
        in_order: bool,
        timeout_s: float,
        state_every: int,
        closes_workers: bool,
    ) -> None:
        self.workers = workers
        self._indices, self._position, self._task_ids = indices, position, task_ids
        self._tally = tally
        self._in_order, self._timeout_s, self._closes_workers = in_order, timeout_s, closes_workers
        self._pending: dict[int, _Pending] = {}  # Keyed by task id, in the order of the indices.
        self._num_before = position.sampler.num_yielded - indices.position.num_yielded
        self._begun = [False] * len(position.workers)
        self._epoch_id = next(task_ids)
        self._afters: dict[int, SamplerPosition] = {}  # The sampler's positions after batches delivered early.
        self.is_open, self._has_ended = True, False
        self._late_counts = list[Count]()  # A failed batch is counted when the next one is requested.
        self._sampler_error: Exception | None = None
        self._exhausted = [False] * len(position.workers)
        num_workers = len(position.workers)
        self._turns = islice(cycle(range(num_workers)), (position.last_worker_id + 1) % num_workers, None)
        workers.begin(
            [
                BeginEpoch(
                    epoch_id=self._epoch_id,
                    state=worker.state,
                    num_to_skip=worker.num_since,
                    follows_end=position.follows_end,
                    state_every=state_every,
                )
                for worker in position.workers
            ]
        )
        self._fill_up()

    @property
    def members(self) -> Sequence[Any]:
        return self.workers.members

    @property
    def indices(self) -> Indices:
        return self._indices

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead.

        Raises:
            StopIteration: If the epoch has no further batch.
            RuntimeError: If the workers have been shut down, or belong to another process.
            WorkerError: If a worker has ended, or a worker process has been stopped and does not continue.
        """
        if self._has_ended:
            raise StopIteration
        if not self.is_open:
            raise RuntimeError(_WORKERS_ENDED)
        if not self.workers.belongs_here:
            raise RuntimeError(IN_ANOTHER_PROCESS)
        began = time.perf_counter()
        hand_over(self._late_counts)
        self._late_counts = []
        try:
            taken = self._take()
        except TimedOutError as error:  # The batch may still arrive, so the epoch continues.
            return Failure(error=error)
        if isinstance(taken, Failure):
            return taken
        pending, answer = taken
        self._fill_up()
        if isinstance(answer, FetchFailed):
            self._late_counts = [partial(self._advance, pending, None)]
            return Failure(error=answer.failure.restore())
        batch = self.workers.open(answer)
        self._tally.count_times(answer.times)
        self._tally.count_batch(answer.num_samples, Counter(), time.perf_counter() - began)
        hand_over([partial(self._advance, pending, answer.state)])
        return batch

    def is_ready(self, timeout_s: float) -> bool:
        if not self.is_open or not self._pending or not self.workers.belongs_here:
            return True  # Requesting the next batch shows what happened.
        for answer in self.workers.receive(timeout_s):
            self._apply(answer)
        waiting = list(self._pending.values())
        return any(pending.answer is not None for pending in (waiting[:1] if self._in_order else waiting))

    def await_workers(self, *, raises: bool) -> None:
        """Wait until all workers have begun the epoch.

        Args:
            raises: Whether to raise an error from a ``worker_init_fn``, or from a dataset's ``__iter__`` or
                ``load_state_dict``, instead of delivering it in place of each batch.
        """
        while not all(self._begun):
            self._receive(raises=raises)

    def update_position(self) -> None:
        """Wait until the initial states of all workers are known, unless the epoch is over."""
        if self.is_open:
            self.await_workers(raises=False)

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if self._closes_workers:
            self.workers.close()
        else:
            for task_id, pending in self._pending.items():
                if pending.answer is not None:
                    self.workers.drop(task_id)
        self._pending.clear()

    def _take(self) -> tuple[_Pending, Fetched | FetchFailed] | Failure:
        """Wait for the answer to the next pending batch; remove and return the batch and the answer."""
        while True:
            for task_id, pending in self._pending.items():
                if isinstance(pending.answer, WorkerExhausted):
                    del self._pending[task_id]
                    hand_over([partial(self._note_end, pending.answer)])
                    break
                if pending.answer is not None:
                    del self._pending[task_id]
                    return pending, pending.answer
                if self._in_order:
                    self._receive()
                    break
            else:
                if not self._pending:
                    return self._end()
                self._receive()

    def _end(self) -> Failure:
        """If the sampler has failed, return its failure; otherwise, end the epoch."""
        if self._sampler_error is not None:
            return Failure(error=self._sampler_error)
        hand_over([self._finish])
        self._has_ended = True
        self.close()
        raise StopIteration

    def _finish(self) -> None:
        self._position.is_finished = True
        if not self._position.is_iterable:
            self._position.sampler = self._indices.position

    def _receive(self, *, raises: bool = False) -> None:
        """Wait for answers. If ``raises`` is true, raise the error of a worker that cannot start."""
        answers = self.workers.receive(self._timeout_s or None)
        if not answers and self._timeout_s:
            raise TimedOutError(
                f"DataLoader timed out after {self._timeout_s} seconds: no batch arrived. Increase timeout, or find "
                "out what the dataset is waiting for"
            )
        for answer in answers:
            self._apply(answer)
            if raises and isinstance(answer, Begun) and answer.failure is not None:
                raise answer.failure.restore()

    def _apply(self, answer: Answer) -> None:
        if isinstance(answer, Begun):
            if answer.epoch_id == self._epoch_id:
                self._begun[answer.worker_id] = True
                worker = self._position.workers[answer.worker_id]
                if worker.state is None and answer.state is not None:
                    worker.state, worker.num_since = answer.state, 0
        elif answer.task_id not in self._pending:  # The answer belongs to an earlier epoch.
            self.workers.drop(answer.task_id)
        else:
            self._pending[answer.task_id].answer = answer
            if isinstance(answer, WorkerExhausted):
                self._exhaust(answer.worker_id)

    def _exhaust(self, worker_id: int) -> None:
        self._exhausted[worker_id] = True
        for task_id, pending in list(self._pending.items()):
            if pending.worker_id == worker_id and pending.answer is None:
                del self._pending[task_id]
                self.workers.drop(task_id)
        if self._closes_workers:
            self.workers.release(worker_id)
        self._fill_up()

    def _note_end(self, answer: WorkerExhausted) -> None:
        worker = self._position.workers[answer.worker_id]
        worker.is_exhausted = True
        if answer.state is not None:
            worker.state, worker.num_since = answer.state, 0

    def _fill_up(self) -> None:
        while (
            self._sampler_error is None
            and len(self._pending) < self.workers.max_tasks
            and (worker_id := self._next_worker()) is not None
        ):
            try:
                index = next(self._indices)
            except StopIteration:
                return
            except Exception as error:  # The user's sampler failed. The error is raised after the earlier batches.
                let_through(error)
                self._sampler_error = error
                return
            number = self._num_before + self._indices.position.num_yielded - 1
            if number in self._position.ahead:
                self._pass(number, self._indices.position)
                continue
            task_id = next(self._task_ids)
            self._pending[task_id] = _Pending(number=number, worker_id=worker_id, after=self._indices.position)
            self.workers.submit(worker_id, FetchTask(task_id=task_id, index=index))

    def _next_worker(self) -> int | None:
        """Return the worker that fetches the next batch; None if each worker is exhausted or has enough tasks."""
        num_active = self._exhausted.count(False)
        for _ in range(len(self._exhausted)):
            worker_id = next(self._turns)
            if self._exhausted[worker_id]:
                continue
            num_tasks = sum(each.worker_id == worker_id for each in self._pending.values())
            if self._in_order or num_tasks < max(self.workers.max_tasks // num_active, 1):
                return worker_id
        return None

    def _advance(self, pending: _Pending, state: dict[str, Any] | None) -> None:
        position = self._position
        position.num_yielded += 1
        position.last_worker_id = pending.worker_id
        worker = position.workers[pending.worker_id]
        if state is None:
            worker.num_since += 1
        else:
            worker.state, worker.num_since = state, 0
        if position.is_iterable:
            position.sampler = SamplerPosition(num_yielded=position.num_yielded)
        else:
            position.ahead.add(pending.number)
            self._pass(pending.number, pending.after)

    def _pass(self, number: int, after: SamplerPosition) -> None:
        """Move the sampler's position past a delivered batch, and past all delivered batches directly after it."""
        position = self._position
        self._afters[number] = after
        while (next_number := position.sampler.num_yielded) in self._afters:
            position.ahead.remove(next_number)
            position.sampler = self._afters.pop(next_number)


class CallerBatches(BatchIterator):
    """The batches of one epoch. Each batch is fetched when it is requested.

    Args:
        job: The settings of the loader.
        indices: The indices of each batch.
        position: The position at which the epoch begins; it is updated with each batch that the user receives.
        tally: The counts of the epoch.

    Attributes:
        indices: The indices of each batch.
    """

    def __init__(self, job: FetchJob, indices: Indices, position: EpochPosition, tally: Tally) -> None:
        self._job, self._indices, self._position, self._tally = job, indices, position, tally
        (worker,) = position.workers
        self._fetcher = make_fetcher(job, worker.state, follows_end=position.follows_end)
        self._fetcher.skip(worker.num_since)
        self._late_counts = list[Count]()  # A failed batch is counted when the next one is requested.
        self._sampler_error: Exception | None = None
        self.is_open = True
        self._is_ahead = False  # Whether the dataset may be ahead of the user, because a wrapper holds batches back.
        self._is_between = True  # Whether the user has received or skipped every fetched batch.
        self._save()

    @property
    def indices(self) -> Indices:
        return self._indices

    def __next__(self) -> Any:
        if not self.is_open:
            raise StopIteration
        if self._sampler_error is not None:
            return Failure(error=self._sampler_error)
        if not self._is_ahead and find_held() is not None:
            self.update_position()
            self._is_ahead = True
        began = time.perf_counter()
        hand_over(self._late_counts)
        self._late_counts, self._is_between = [], True
        try:
            index = next(self._indices)
        except StopIteration:
            self._end()
            raise
        except Exception as error:  # The user's sampler failed.
            let_through(error)
            self._sampler_error = error
            return Failure(error=error)
        self._is_between = False
        try:
            samples = self._fetcher.fetch(index)
            state = self._fetcher.state() if self._is_ahead else None
            num_samples = count_samples(self._job, samples)
            batch = self._job.collate_fn(samples)
        except DatasetEndError:
            self._is_between = True
            self._end()
            raise StopIteration from None
        except Exception as error:
            let_through(error)
            self._late_counts = [partial(self._advance, self._indices.position, None)]
            return Failure(error=no_end(error))
        hand_over([partial(self._advance, self._indices.position, state)])
        self._is_between = True
        self._tally.count_times(times := measure_since(began))
        self._tally.count_batch(num_samples, Counter(), times.python_s)
        return batch

    def update_position(self) -> None:
        """Store the dataset's state in the position."""
        if self._job.is_stateful and not self._position.num_yielded:
            self._indices.prepare()  # If the sampler and the dataset share generators, the sampler draws first.
        self._save()

    def close(self) -> None:
        if self.is_open:
            self._save()  # The state may be requested after the iterator is dropped.
            self.is_open = False

    def _save(self) -> None:
        if self.is_open and self._is_between and not self._is_ahead:
            self._set_state(self._fetcher.state())

    def _advance(self, sampler: SamplerPosition, state: dict[str, Any] | None) -> None:
        position = self._position
        position.num_yielded += 1
        position.sampler = sampler
        position.workers[0].num_since += 1
        self._set_state(state)

    def _set_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            worker = self._position.workers[0]
            worker.state, worker.num_since = state, 0

    def _end(self) -> None:
        hand_over([partial(self._finish, self._fetcher.state() if self._is_ahead else None)])
        self.close()

    def _finish(self, state: dict[str, Any] | None) -> None:
        self._position.is_finished = True
        self._position.sampler = self._indices.position
        self._set_state(state)
