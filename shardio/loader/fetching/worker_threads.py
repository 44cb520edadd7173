"""FetchWorkers that are threads: they share the dataset, and nothing is copied or pickled."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from shardio.errors import WorkerError
from shardio.interruptions import describe_error
from shardio.loader.failures import Failure
from shardio.loader.fetching.job import FetchJob
from shardio.loader.fetching.messages import Answer, BeginEpoch, Fetched, FetchTask
from shardio.loader.fetching.seeding import make_rng
from shardio.loader.fetching.worker import FetchWorker
from shardio.world import WorkerInfo, being_worker, has_asked

JOIN_S = 5.0
"""How long to wait for threads that are fetching, when the workers are closed. Afterwards, they end by themselves."""

_Requests = SimpleQueue["BeginEpoch | FetchTask | None"]
_Answers = SimpleQueue["Answer | WorkerError"]


class QueueChannel:
    """The channel of a worker thread.

    Args:
        requests: The worker's requests.
        answers: The answers of all workers.
        is_closed: Set when the requests that are left need no answer.

    Attributes:
        has_asked: Whether the dataset asked which worker it is in, when it had made a batch; None before.
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
        job: What they fetch.
        base_seed: The seed of the first one's generators.
        max_tasks: How many batches are fetched ahead.

    Attributes:
        members: The threads.
        max_tasks: How many batches are fetched ahead.
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
    """Return the job of one worker: as in processes, each iteration of an iterable dataset has its own attributes."""
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
