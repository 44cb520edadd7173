"""Workers that call the user's dataset: their interface, their messages, and worker threads."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from shardio.errors import WorkerError
from shardio.loader.failures import Failure
from shardio.loader.fetching.fetchers import DatasetEndError, Fetcher, FetchJob, make_fetcher
from shardio.loader.processes.wire import StageTimes
from shardio.loader.stats import Tally
from shardio.process import describe_error, no_end
from shardio.world import WorkerInfo, WorkerRng, being_worker, has_asked

JOIN_S = 5.0
"""The time, in seconds, that closing workers waits for threads that are fetching. Later, they end by themselves."""

_Requests = SimpleQueue["BeginEpoch | FetchTask | None"]

_Answers = SimpleQueue["Answer | WorkerError"]


def count_samples(job: FetchJob, samples: Any) -> int:
    """Return the number of samples that a fetcher has returned."""
    return len(samples) if job.is_batched and hasattr(samples, "__len__") else 1


def measure_since(began: float, idle_s: float = 0.0) -> StageTimes:
    """Return the times of a batch. From its beginning on, only the user's code ran.

    Args:
        began: The time when it was begun, by ``time.perf_counter``.
        idle_s: The time that the worker waited before, in seconds.
    """
    python_s = time.perf_counter() - began
    return StageTimes(transform_s=python_s, python_s=python_s, idle_s=idle_s)


def begin_tally(job: FetchJob) -> Tally:
    """Return the counts of an epoch that begins."""
    names = [getattr(each, "__qualname__", type(each).__name__) for each in (job.dataset, job.collate_fn)]
    return Tally(num_workers=job.num_workers, in_python=tuple(names))


@dataclass(kw_only=True, eq=False)
class BeginEpoch:
    """A request to begin an epoch. The worker answers with :class:`Begun`.

    Attributes:
        epoch_id: The number of the epoch among those of these workers.
        state: The state in which the worker's part of the epoch begins; None for the beginning.
        num_to_skip: The number of batches to skip from there.
        follows_end: Whether the state was saved at the end of the previous epoch.
        state_every: The number of batches after which the worker reports its state; 0 for never.
    """

    epoch_id: int
    state: dict[str, Any] | None
    num_to_skip: int
    follows_end: bool
    state_every: int


@dataclass(kw_only=True, eq=False)
class FetchTask:
    """A request for one batch.

    Attributes:
        task_id: Its number, larger than that of every earlier one.
        index: The sampler's value: the indices of a batch, or the index of a sample.
        buffer_id: The memory for the batch's tensors; None if the worker makes some.
    """

    task_id: int
    index: Any
    buffer_id: int | None = None


@dataclass(kw_only=True, eq=False)
class Begun:
    """The answer to :class:`BeginEpoch`.

    Attributes:
        epoch_id: The number in the request.
        worker_id: The worker.
        state: The state of the worker's dataset and its iterator; None if they have none.
        failure: The reason why the worker cannot fetch anything. It answers every task with it.
    """

    epoch_id: int
    worker_id: int
    state: dict[str, Any] | None
    failure: Failure | None = None


@dataclass(kw_only=True, eq=False)
class Fetched:
    """A batch.

    Attributes:
        task_id: The number of its task.
        worker_id: The worker that fetched it.
        content: The batch; an OutOfBandPickle if it comes from another process.
        num_samples: The number of samples in it.
        times: The time that it took, and the time that the worker waited for the request.
        state: The state after the batch; None if there is none, or if it was not due.
    """

    task_id: int
    worker_id: int
    content: Any
    num_samples: int
    times: StageTimes
    state: dict[str, Any] | None = None


@dataclass(kw_only=True, eq=False)
class FetchFailed:
    """An error instead of a batch."""

    task_id: int
    worker_id: int
    failure: Failure


@dataclass(kw_only=True, eq=False)
class WorkerExhausted:
    """The end of a worker's part of an iterable dataset, instead of a batch. Only the first one has the state."""

    task_id: int
    worker_id: int
    state: dict[str, Any] | None = None


Answer = Begun | Fetched | FetchFailed | WorkerExhausted


class FetchWorkers(Protocol):
    """The workers of one loader. They end when they are closed or freed.

    Attributes:
        members: The processes or threads.
        max_tasks: The number of batches that may be fetched ahead now.
    """

    max_tasks: int

    @property
    def members(self) -> Sequence[Any]: ...

    @property
    def belongs_here(self) -> bool:
        """Whether this process started the workers; false in a forked child."""

    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        """Begin an epoch: one request for each worker."""

    def submit(self, worker_id: int, task: FetchTask) -> None:
        """Request a batch of a worker."""

    def receive(self, timeout_s: float | None) -> list[Answer]:
        """Wait for answers; return an empty list after ``timeout_s``.

        Raises:
            WorkerError: If a worker ended, or a worker process was stopped and does not continue.
        """

    def open(self, fetched: Fetched) -> Any:
        """Return the batch that a worker fetched. This is called once for each answer that is delivered."""

    def drop(self, task_id: int) -> None:
        """Drop the batch of a task, which is no longer needed."""

    def release(self, worker_id: int) -> None:
        """End a worker that has nothing more to do."""

    def close(self) -> None:
        """End all workers and wait for them."""


def seed_process(base_seed: int, worker_id: int) -> None:
    """Seed the global generators of Python, torch and numpy of a worker process."""
    random.seed(base_seed + worker_id)
    torch.manual_seed(base_seed + worker_id)
    np.random.seed(_find_numpy_seed(base_seed, worker_id))  # User code draws from it.


def make_rng(base_seed: int, worker_id: int) -> WorkerRng:
    """Return the generators of a worker that shares its process with others."""
    seed = base_seed + worker_id
    return WorkerRng(
        random_generator=random.Random(seed),
        torch_generator=torch.Generator().manual_seed(seed),
        numpy_generator=np.random.default_rng(_find_numpy_seed(base_seed, worker_id)),
    )


def _find_numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    # uint32 [4]. torch computes the same words, by numpy's SeedSequence with this entropy.
    entropy = (worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0)
    words: list[int] = np.random.SeedSequence(entropy).generate_state(4).tolist()
    return words


class Channel(Protocol):
    """A worker's way to its loader."""

    def receive(self) -> BeginEpoch | FetchTask | None:
        """Return the next request; None if the worker must end."""

    def send(self, answer: Answer) -> None:
        """Send an answer. If a batch cannot be sent, its error is sent instead."""

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes the same batches, if possible in memory that need not be copied to be sent."""

    def describe(self, error: Exception) -> Failure:
        """Return an error in a form that can be sent."""


class FetchWorker:
    """A worker, which answers requests one after another.

    Args:
        worker_id: Its number.
        job: The settings. A worker process has a copy.
        channel: The way to the loader.
    """

    def __init__(self, worker_id: int, job: FetchJob, channel: Channel) -> None:
        self._worker_id, self._job, self._channel = worker_id, job, channel
        self._fetcher: Fetcher | None = None
        self._init_failure: Failure | None = None
        self._failure: Failure | None = None  # Every task of this epoch is answered with it.
        self._is_exhausted = False
        self._state_every = self._num_since_state = 0

    def run(self) -> None:
        """Answer requests until there are no more."""
        if self._job.worker_init_fn is not None:
            try:
                self._job.worker_init_fn(self._worker_id)
            except Exception as error:
                self._init_failure = self._channel.describe(error)
        idled_from = time.perf_counter()
        while (request := self._channel.receive()) is not None:
            if isinstance(request, BeginEpoch):
                self._channel.send(self._begin(request))
            else:
                self._channel.send(self._fetch(request, time.perf_counter() - idled_from))
            del request  # It may hold millions of indices while this waits.
            idled_from = time.perf_counter()

    def _begin(self, request: BeginEpoch) -> Begun:
        self._is_exhausted = False
        self._state_every, self._num_since_state = request.state_every, request.num_to_skip
        state, self._failure = None, self._init_failure
        if self._failure is None:
            self._fetcher = None  # The old one's iterator may hold what the new one needs.
            try:
                self._fetcher = make_fetcher(self._job, request.state, follows_end=request.follows_end)
                self._fetcher.skip(request.num_to_skip)
                state = self._fetcher.state()
            except Exception as error:
                self._failure = self._channel.describe(no_end(error))
        failure = None if self._failure is None else self._failure.renewed()
        return Begun(epoch_id=request.epoch_id, worker_id=self._worker_id, state=state, failure=failure)

    def _fetch(self, task: FetchTask, idle_s: float) -> Answer:
        began = time.perf_counter()
        named: Any = {"task_id": task.task_id, "worker_id": self._worker_id}
        if self._failure is not None:
            return FetchFailed(**named, failure=self._failure.renewed())
        if self._is_exhausted:
            return WorkerExhausted(**named)
        fetcher = self._fetcher
        assert fetcher is not None, "an epoch has begun"
        try:
            try:
                samples = fetcher.fetch(task.index)
            except DatasetEndError:
                self._is_exhausted = True
                return WorkerExhausted(**named, state=fetcher.state())
            num_samples = count_samples(self._job, samples)
            content = self._channel.find_collate(task, self._job.collate_fn)(samples)
            times = measure_since(began, idle_s)
            state = self._due_state(fetcher)
            return Fetched(**named, content=content, num_samples=num_samples, times=times, state=state)
        except Exception as error:
            return FetchFailed(**named, failure=self._channel.describe(no_end(error)))

    def _due_state(self, fetcher: Fetcher) -> dict[str, Any] | None:
        self._num_since_state += 1
        if not self._state_every or self._num_since_state < self._state_every:
            return None
        self._num_since_state = 0
        return fetcher.state()


class QueueChannel:
    """The channel of a worker thread.

    Args:
        requests: The worker's requests.
        answers: The answers of all workers.
        is_closed: Set when the remaining requests need no answer.

    Attributes:
        has_asked: Whether the dataset had asked which worker it is in when it made its latest batch; None before.
    """

    def __init__(self, requests: _Requests, answers: _Answers, is_closed: threading.Event) -> None:
        self._requests, self._answers, self._is_closed = requests, answers, is_closed
        self.has_asked: bool | None = None

    def receive(self) -> BeginEpoch | FetchTask | None:
        """Return the next request; None if the worker must end."""
        request = self._requests.get()
        return None if self._is_closed.is_set() else request

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the user's function."""
        return collate_fn

    def describe(self, error: Exception) -> Failure:
        """Return an error, which keeps its traceback."""
        return Failure(error=error)

    def send(self, answer: Answer) -> None:
        """Send an answer."""
        if isinstance(answer, Fetched):
            self.has_asked = has_asked()
        self._answers.put(answer)


class FetchThreads:
    """The worker threads of one loader.

    Args:
        job: The settings of the loader.
        base_seed: The seed of the first one's generators.
        max_tasks: The number of batches that are fetched ahead.

    Attributes:
        members: The threads.
        max_tasks: The number of batches that are fetched ahead.
    """

    def __init__(self, job: FetchJob, base_seed: int, max_tasks: int) -> None:
        self.max_tasks, self._job = max_tasks, job
        self._has_warned = not job.is_iterable or job.num_workers == 1
        self._answers: _Answers = SimpleQueue()
        self._process_id = os.getpid()
        self._requests: list[_Requests] = [SimpleQueue() for _ in range(job.num_workers)]
        is_closed = threading.Event()
        self._channels = [QueueChannel(requests, self._answers, is_closed) for requests in self._requests]
        self.members = [
            threading.Thread(
                target=_run_thread,
                args=(channel, self._answers, _share(job), worker_id, base_seed),
                name=f"shardio-worker-{worker_id}",
                daemon=True,
            )
            for worker_id, channel in enumerate(self._channels)
        ]
        self._finalizer = weakref.finalize(self, _close, self._requests, self.members, is_closed)
        for thread in self.members:
            thread.start()

    @property
    def belongs_here(self) -> bool:
        """Whether the threads run in this process: a forked child has none of them."""
        return self._process_id == os.getpid()

    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        """Begin an epoch: one request for each worker."""
        for queue, request in zip(self._requests, requests, strict=True):
            queue.put(request)

    def submit(self, worker_id: int, task: FetchTask) -> None:
        """Request a batch of a worker."""
        self._requests[worker_id].put(task)

    def receive(self, timeout_s: float | None) -> list[Answer]:
        """Wait for answers; return an empty list after ``timeout_s``.

        Raises:
            WorkerError: If a worker thread ended.
        """
        answers = list[Answer]()
        with suppress(Empty):
            answer = self._answers.get(timeout=timeout_s)
            while True:
                if isinstance(answer, WorkerError):
                    if not answers:
                        raise answer
                    self._answers.put(answer)  # After what arrived before it.
                    break
                answers.append(answer)
                answer = self._answers.get_nowait()
        return answers

    def open(self, fetched: Fetched) -> Any:
        """Return the batch that a worker fetched; warn if the dataset cannot know its share."""
        if not self._has_warned and self._channels[fetched.worker_id].has_asked is False:
            self._has_warned = True
            warnings.warn(
                f"{type(self._job.dataset).__name__} did not call shardio.get_worker_info(), so each of "
                f"{self._job.num_workers} worker threads may yield the whole dataset: call it in __iter__ instead of "
                "torch's function, which returns None in threads",
                RuntimeWarning,
                stacklevel=2,
            )
        return fetched.content

    def drop(self, task_id: int) -> None:
        """Do nothing: the batch is freed with the answer."""

    def release(self, worker_id: int) -> None:
        """End a worker that has nothing more to do."""
        self._requests[worker_id].put(None)

    def close(self) -> None:
        """End all workers and wait for them."""
        self._finalizer()


def _share(job: FetchJob) -> FetchJob:
    # As in processes, each worker's iteration of an iterable dataset has its own attributes.
    return replace(job, dataset=copy(job.dataset)) if job.is_iterable else job


def _run_thread(channel: QueueChannel, answers: _Answers, job: FetchJob, worker_id: int, base_seed: int) -> None:
    info = WorkerInfo(
        id=worker_id,
        num_workers=job.num_workers,
        seed=base_seed + worker_id,
        dataset=job.dataset,
        rng=make_rng(base_seed, worker_id),
    )
    try:
        with being_worker(info):
            FetchWorker(worker_id, job, channel).run()
    except BaseException as error:  # Such as SystemExit. Without an answer, the loader would wait for ever.
        ended = WorkerError(f"worker thread {worker_id} of the DataLoader ended with {describe_error(error)}")
        ended.__cause__ = error
        answers.put(ended)


def _close(requests: Sequence[_Requests], threads: Sequence[threading.Thread], is_closed: threading.Event) -> None:
    is_closed.set()
    for queue in requests:
        queue.put(None)
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        if thread is not threading.current_thread():  # The last reference may be dropped in one of them.
            thread.join(max(deadline - time.monotonic(), 0.0))
