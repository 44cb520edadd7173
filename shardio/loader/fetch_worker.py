"""Workers that call the user's dataset in a thread or a process, and their requests, answers and channels."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
import torch.utils.data._utils.worker
from torch.utils.data._utils.collate import (
    collate,
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate,
    default_collate_fn_map,
)

from shardio.errors import WorkerError
from shardio.loader.buffers import MIN_BYTES, MappedBuffers, make_memory, map_memory
from shardio.loader.fetch_job import DatasetEndError, Fetcher, FetchJob, make_fetcher
from shardio.loader.pickles import Arena, Memory, pack, receive_job
from shardio.loader.saved_state import DATASET_STATE, FETCHER_STATE, UnknownState
from shardio.loader.wire import Failure, StageTimes, describe_failure, receive_all, send
from shardio.process import describe_error, no_end
from shardio.world import WorkerInfo, WorkerRng, being_worker, has_asked

_Requests = SimpleQueue["BeginEpoch | FetchTask | None"]

_Answers = SimpleQueue["Answer | WorkerError"]


def count_samples(job: FetchJob, samples: Any) -> int:
    """Return the number of samples that a fetcher has returned."""
    return len(samples) if job.is_batched and hasattr(samples, "__len__") else 1


def measure_since(began: float, idle_s: float = 0.0) -> StageTimes:
    """Return the times of a batch, given that only user code has run since the worker began the batch.

    Args:
        began: The time when the worker began the batch, according to ``time.perf_counter``.
        idle_s: The time that the worker spent waiting before the batch, in seconds.
    """
    python_s = time.perf_counter() - began
    return StageTimes(
        transform_s=python_s,
        python_s=python_s,
        idle_s=idle_s,
        began=began,
        process_id=os.getpid(),
        thread_id=threading.get_native_id(),
    )


@dataclass(kw_only=True, eq=False)
class BeginEpoch:
    """A request to begin an epoch. The worker answers with :class:`Begun`.

    Attributes:
        epoch_id: The epoch's number, which is unique for these workers.
        state: The state in which the worker's part of the epoch begins; None for the beginning.
        num_to_skip: The number of batches to skip after that state.
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
        task_id: The task's number, larger than that of every earlier task.
        index: The sampler's value: the indices of a batch, or the index of a sample.
        buffer_id: The buffer for the batch's tensors; None if the worker allocates memory.
    """

    task_id: int
    index: Any
    buffer_id: int | None = None


@dataclass(kw_only=True, eq=False)
class Begun:
    """The answer to :class:`BeginEpoch`.

    Attributes:
        epoch_id: The epoch's number in the request.
        worker_id: The worker.
        state: The state of the worker's dataset and its iterator; None if neither has a state.
        failure: The reason why the worker cannot fetch anything. The worker answers every task with this failure.
    """

    epoch_id: int
    worker_id: int
    state: dict[str, Any] | None
    failure: Failure | None = None


@dataclass(kw_only=True, eq=False)
class Fetched:
    """A batch.

    Attributes:
        task_id: The number of the batch's task.
        worker_id: The worker that fetched the batch.
        content: The batch; an OutOfBandPickle if it comes from another process.
        num_samples: The number of samples in the batch.
        times: The time that the batch took, and the time that the worker spent waiting for the request.
        state: The state after the batch; None if there is no state, or if no report was due.
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
    """The answer that a worker sends instead of a batch once its part of an iterable dataset has ended.

    Only the worker's first answer of this kind contains the state.
    """

    task_id: int
    worker_id: int
    state: dict[str, Any] | None = None


Answer = Begun | Fetched | FetchFailed | WorkerExhausted


def seed_process(base_seed: int, worker_id: int) -> None:
    """Seed the global generators of Python, torch and numpy in a worker process."""
    random.seed(base_seed + worker_id)
    torch.manual_seed(base_seed + worker_id)
    np.random.seed(_find_numpy_seed(base_seed, worker_id))  # User code may draw from numpy's generator.


def make_rng(base_seed: int, worker_id: int) -> WorkerRng:
    """Return the generators of a worker that shares its process with other workers."""
    seed = base_seed + worker_id
    return WorkerRng(
        random_generator=random.Random(seed),
        torch_generator=torch.Generator().manual_seed(seed),
        numpy_generator=np.random.default_rng(_find_numpy_seed(base_seed, worker_id)),
    )


def _find_numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    # uint32 [4], the words that torch's workers compute. numpy's SeedSequence makes the same words from this entropy.
    entropy = (worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0)
    words: list[int] = np.random.SeedSequence(entropy).generate_state(4).tolist()
    return words


class Channel(Protocol):
    """A worker's connection to its loader."""

    def receive(self) -> BeginEpoch | FetchTask | None:
        """Return the next request; None if the worker must end."""

    def send(self, answer: Answer) -> None:
        """Send an answer. If a batch cannot be sent, send the error instead."""

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes ``collate_fn``'s batches, if possible in memory that is sent without a copy."""

    def describe(self, error: Exception) -> Failure:
        """Return an error in a form that can be sent."""


class FetchWorker:
    """A worker, which answers requests one after another.

    Args:
        worker_id: The worker's number.
        job: The settings. A worker process has a copy.
        channel: The connection to the loader.
    """

    def __init__(self, worker_id: int, job: FetchJob, channel: Channel) -> None:
        self._worker_id, self._job, self._channel = worker_id, job, channel
        self._fetcher: Fetcher | None = None
        self._init_failure: Failure | None = None
        self._failure: Failure | None = None  # If set, the answer to every task of this epoch.
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
            del request  # Otherwise, the request may keep millions of indices alive during the wait.
            idled_from = time.perf_counter()

    def _begin(self, request: BeginEpoch) -> Begun:
        self._is_exhausted = False
        self._state_every, self._num_since_state = request.state_every, request.num_to_skip
        state, self._failure = None, self._init_failure
        if self._failure is None:
            self._fetcher = None  # The old fetcher's iterator may hold resources that the new one needs.
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
        has_asked: Whether the dataset had called ``get_worker_info`` when it made its latest batch; None before its
            first batch.
    """

    def __init__(self, requests: _Requests, answers: _Answers, is_closed: threading.Event) -> None:
        self._requests, self._answers, self._is_closed = requests, answers, is_closed
        self.has_asked: bool | None = None

    def receive(self) -> BeginEpoch | FetchTask | None:
        request = self._requests.get()
        return None if self._is_closed.is_set() else request

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return collate_fn

    def describe(self, error: Exception) -> Failure:
        return Failure(error=error)

    def send(self, answer: Answer) -> None:
        if isinstance(answer, Fetched):
            self.has_asked = has_asked()
        self._answers.put(answer)


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
    except BaseException as error:  # Such as SystemExit. Without an answer, the loader would wait forever.
        ended = WorkerError(f"worker thread {worker_id} of the DataLoader ended with {describe_error(error)}")
        ended.__cause__ = error
        answers.put(ended)


_MapOfFunctions = dict[Any, Callable[..., Any]]


def run_worker_process(
    end: socket.socket, job: FetchJob | None, worker_id: int, base_seed: int, parent_id: int
) -> None:
    """Run a worker in this process, which was started for it; see :class:`FetchWorker`.

    Args:
        end: This side's end of the socket pair.
        job: The settings of the loader; None if the settings come through the socket pair.
        worker_id: The number of the worker.
        base_seed: The seed of worker 0.
        parent_id: The process ID of the training process. If that process has ended, the worker also ends.
    """
    torch.set_num_threads(1)
    if job is None and (job := receive_job(end, parent_id)) is None:
        return
    seed_process(base_seed, worker_id)  # Seed after importing the dataset's modules, which may also seed.
    # User code calls torch's get_worker_info, and torch has no public function to set its result.
    torch.utils.data._utils.worker._worker_info = torch.utils.data._utils.worker.WorkerInfo(
        id=worker_id, num_workers=job.num_workers, seed=base_seed + worker_id, dataset=job.dataset
    )
    with suppress(KeyboardInterrupt):  # The training process also raises this error.
        FetchWorker(worker_id, job, SocketChannel(end, parent_id)).run()


class SocketChannel:
    """The channel of a worker process.

    Args:
        end: The worker's end of the socket pair.
        parent_id: The process ID of the training process.
    """

    def __init__(self, end: socket.socket, parent_id: int) -> None:
        self._end = end
        self._messages = receive_all(end, parent_id)
        self._buffers = MappedBuffers()
        self._arena: Arena | None = None
        self._is_closed = False  # If true, requests that were sent earlier stay unanswered.

    def receive(self) -> BeginEpoch | FetchTask | None:
        while not self._is_closed:
            received = next(self._messages, None)
            if received is None:
                break
            message, descriptors = received
            if not self._buffers.update(message, descriptors):
                request: BeginEpoch | FetchTask = message
                return request
        return None

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        buffer = None if task.buffer_id is None else self._buffers.get(task.buffer_id)
        self._arena = None if buffer is None else Arena(buffer[1])
        return find_collate(collate_fn, self._arena)

    def describe(self, error: Exception) -> Failure:
        return describe_failure(error)

    def send(self, answer: Answer) -> None:
        descriptors = list[int]()
        arena, self._arena = self._arena, None
        try:
            if isinstance(answer, Fetched):

                def make_own(num_bytes: int) -> Memory:
                    descriptors.append(make_memory(num_bytes))
                    return map_memory(descriptors[0], num_bytes)

                try:
                    answer.content = pack(answer.content, arena, make_own)
                except Exception as error:
                    answer = _fail(answer, error)
            try:
                send(self._end, answer, descriptors)
            except ConnectionError:
                raise
            except Exception as error:  # The state of the dataset cannot be pickled.
                answer = _without_state(answer, error)
                send(self._end, answer, descriptors if isinstance(answer, Fetched) else ())
        except ConnectionError:
            self._is_closed = True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _fail(answer: Answer, error: Exception) -> Answer:
    failure = describe_failure(error)
    if isinstance(answer, Begun):
        return replace(answer, state=None, failure=failure)
    return FetchFailed(task_id=answer.task_id, worker_id=answer.worker_id, failure=failure)


def _without_state(answer: Answer, error: Exception) -> Answer:
    """Return an answer with an UnknownState in place of a state that cannot be sent."""
    if isinstance(answer, FetchFailed) or answer.state is None:
        return _fail(answer, error)
    unknown = UnknownState(reason=f"the state of the dataset cannot be pickled ({describe_error(error)})")
    return replace(answer, state={FETCHER_STATE: None, DATASET_STATE: unknown})


def find_collate(collate_fn: Callable[[Any], Any], arena: Arena | None) -> Callable[[Any], Any]:
    """Return a function that makes the same batches as ``collate_fn``, if possible with their tensors in a buffer.

    Args:
        collate_fn: The loader's function.
        arena: The buffer, or None to use separate memory.
    """
    if collate_fn is not default_collate:
        return collate_fn
    functions: _MapOfFunctions = dict(default_collate_fn_map)
    # The user may have registered other functions for these types.
    if functions.get(torch.Tensor) is collate_tensor_fn:
        functions[torch.Tensor] = partial(_collate_tensors, arena)
        if functions.get(np.ndarray) is collate_numpy_array_fn:
            functions[np.ndarray] = partial(_collate_arrays, arena)
    return partial(collate, collate_fn_map=functions)


def _collate_tensors(arena: Arena | None, batch: Sequence[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if first.is_nested or not all(map(partial(_is_like, first), batch)):
        collated: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return collated
    out = _make(arena, first.dtype, (len(batch), *first.shape))
    return torch.stack(tuple(batch), out=out)


def _collate_arrays(arena: Arena | None, batch: Sequence[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    is_plain = first.dtype.kind in "biufc" and first.dtype.isnative and first.ndim
    if is_plain and all(
        type(each) is np.ndarray and each.dtype == first.dtype and each.shape == first.shape for each in batch
    ):
        out = _make(arena, torch.from_numpy(np.empty(0, first.dtype)).dtype, (len(batch), *first.shape))
        if out is not None:
            np.stack(batch, out=out.numpy())
            return out
    collated: torch.Tensor = collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)
    return collated


def _is_like(first: torch.Tensor, other: Any) -> bool:
    return (
        type(other) is torch.Tensor
        and not other.is_nested  # Nested tensors have no shape.
        and other.dtype == first.dtype
        and other.shape == first.shape
        and other.device.type == "cpu"
        and other.layout == torch.strided
        and not (other.requires_grad or other.is_quantized)
    )


def _make(arena: Arena | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return an empty tensor in the buffer; None if the tensor is small or does not fit, or if there is no buffer."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if arena is None or num_bytes < MIN_BYTES or (memory := arena.take(num_bytes)) is None:
        return None
    return torch.from_numpy(memory).view(dtype).view(shape)
