"""What a worker does, in a process or in a thread: it fetches the batches that it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from shardio.interruptions import no_end
from shardio.loader.failures import Failure
from shardio.loader.fetching.counting import count_samples, measure_since
from shardio.loader.fetching.fetchers import DatasetEndError, Fetcher, make_fetcher
from shardio.loader.fetching.job import FetchJob
from shardio.loader.fetching.messages import (
    Answer,
    BeginEpoch,
    Begun,
    Fetched,
    FetchFailed,
    FetchTask,
    WorkerExhausted,
)


class Channel(Protocol):
    """A worker's way to its loader."""

    def receive(self) -> BeginEpoch | FetchTask | None:
        """Return the next request; None if the worker must end."""

    def send(self, answer: Answer) -> None:
        """Send an answer. If a batch cannot be sent, its error is sent instead."""

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes the same batches, in memory from which a task's batch can be sent."""

    def describe(self, error: Exception) -> Failure:
        """Return an error as it can be sent."""


class FetchWorker:
    """A worker.

    Args:
        worker_id: Its number.
        job: What to fetch. In a process of its own, a copy.
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
        """Return the state after a batch; None if it is not due, or if there is none."""
        self._num_since_state += 1
        if not self._state_every or self._num_since_state < self._state_every:
            return None
        self._num_since_state = 0
        return fetcher.state()
