"""The training process's side of the workers that call the user's dataset: threads and processes."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

from shardio.errors import WorkerError
from shardio.loader.buffers import Buffer, BufferPool, ForgetBuffers, Layout, NewBuffer, find_num_buffers, map_in_torch
from shardio.loader.fetch_job import FetchJob
from shardio.loader.fetch_worker import (
    Answer,
    BeginEpoch,
    Begun,
    Fetched,
    FetchTask,
    QueueChannel,
    _Answers,
    _Requests,
    _run_thread,
    run_worker_process,
)
from shardio.loader.pickles import Memory, OutOfBandPickle, SharedJob, unpack
from shardio.loader.wire import make_pair, receive_ready, send_within
from shardio.process import Owned, call_at_fork, count_processors, describe_exit, is_stopped
from shardio.values import format_bytes

JOIN_S = 5.0
"""The time, in seconds, that workers are given to finish their batches and end. Then, processes are terminated."""


class FetchWorkers(Owned, ABC):
    """The workers of one loader that call the user's dataset.

    Attributes:
        members: The processes or threads.
        max_tasks: The number of batches that may currently be fetched in advance.
    """

    max_tasks: int

    @property
    @abstractmethod
    def members(self) -> Sequence[Any]: ...

    @abstractmethod
    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        """Begin an epoch with one request for each worker."""

    @abstractmethod
    def submit(self, worker_id: int, task: FetchTask) -> None:
        """Request a batch from a worker."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> list[Answer]:
        """Wait for answers; return an empty list after ``timeout_s``.

        Raises:
            WorkerError: If a worker has ended, or a worker process has been stopped and does not continue.
        """

    @abstractmethod
    def open(self, fetched: Fetched) -> Any:
        """Return the batch that a worker fetched. Call this once for each delivered answer."""

    @abstractmethod
    def drop(self, task_id: int) -> None:
        """Drop a task's batch, which is no longer needed."""

    @abstractmethod
    def release(self, worker_id: int) -> None:
        """End a worker that has nothing more to do."""


class FetchThreads(FetchWorkers):
    """The worker threads of one loader.

    Args:
        job: The settings of the loader.
        base_seed: The seed of the first worker's generators.
        max_tasks: The number of batches that are fetched in advance.
    """

    def __init__(self, job: FetchJob, base_seed: int, max_tasks: int) -> None:
        self.max_tasks, self._job = max_tasks, job
        self._has_warned = not job.is_iterable or job.num_workers == 1
        self._answers: _Answers = SimpleQueue()
        self._requests: list[_Requests] = [SimpleQueue() for _ in range(job.num_workers)]
        is_closed = threading.Event()
        self._channels = [QueueChannel(requests, self._answers, is_closed) for requests in self._requests]
        self._threads = [
            threading.Thread(
                target=_run_thread,
                args=(channel, self._answers, _share(job), worker_id, base_seed),
                name=f"shardio-worker-{worker_id}",
                daemon=True,
            )
            for worker_id, channel in enumerate(self._channels)
        ]
        super().__init__(partial(_close_threads, self._requests, self._threads, is_closed))
        for thread in self._threads:
            thread.start()

    @property
    def members(self) -> list[threading.Thread]:
        return self._threads

    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        for queue, request in zip(self._requests, requests, strict=True):
            queue.put(request)

    def submit(self, worker_id: int, task: FetchTask) -> None:
        self._requests[worker_id].put(task)

    def receive(self, timeout_s: float | None) -> list[Answer]:
        answers = list[Answer]()
        with suppress(Empty):
            answer = self._answers.get(timeout=timeout_s)
            while True:
                if isinstance(answer, WorkerError):
                    if not answers:
                        raise answer
                    self._answers.put(answer)  # Deliver the error after the answers that arrived earlier.
                    break
                answers.append(answer)
                answer = self._answers.get_nowait()
        return answers

    def open(self, fetched: Fetched) -> Any:
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
        self._requests[worker_id].put(None)


def _share(job: FetchJob) -> FetchJob:
    # Like a process, each thread iterates over its own (shallow) copy of an iterable dataset.
    return replace(job, dataset=copy(job.dataset)) if job.is_iterable else job


def _close_threads(
    requests: Sequence[_Requests], threads: Sequence[threading.Thread], is_closed: threading.Event
) -> None:
    is_closed.set()
    for queue in requests:
        queue.put(None)
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        # A worker thread that drops the last reference to the pool runs this function itself.
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))


STOPPED_S = 30.0
"""The longest time, in seconds, that a worker process may be stopped while the loader waits for it."""

CHECK_S = 5.0
"""The interval between checks of a silent worker process, in seconds."""

MAX_SENT = 8
"""The maximum number of unanswered requests per worker process; more would fill its socket and block both sides."""

GROWTH = 1.25
"""When batches grow, the size of new buffers relative to the largest batch so far."""


class FetchProcesses(FetchWorkers):
    """The worker processes of one loader.

    Args:
        job: The settings of the loader.
        base_seed: The seed of the first worker.
        context: A multiprocessing context, or torch.multiprocessing, to start the processes with.
        max_tasks: The number of batches that are fetched in advance.
    """

    def __init__(self, job: FetchJob, base_seed: int, context: Any, max_tasks: int) -> None:
        self.max_tasks = max_tasks
        self._workers = [_Process() for _ in range(job.num_workers)]
        self._buffers = BufferPool(partial(_announce, self._workers), partial(_forget, self._workers))  # No cycle.
        self._buffer_of_task: dict[int, Buffer] = {}
        self._owns: dict[int, Memory] = {}  # Memory that a worker allocated for one batch, by task.
        self._has_warned = False
        super().__init__(partial(_close_processes, self._workers))
        call_at_fork(self, after_in_child=FetchProcesses._leave_to_parent)
        self._context, self._job, self._base_seed = context, job, base_seed
        self._unstarted = deque(range(job.num_workers))
        self._shared: SharedJob | None = None
        is_forked = context.get_start_method() == "fork"
        try:
            for _ in range(job.num_workers if is_forked else 1):
                self._start_next(job if is_forked else None)
            if not is_forked:
                self._shared = SharedJob(job)  # Meanwhile, the first process imports torch.
                self._send_job(self._workers[0])
                # The import takes a second of CPU time, so no more processes than processors start at the same time.
                for _ in range(1, min(count_processors(), job.num_workers)):
                    self._start_another()
        except BaseException:  # No process may remain, even after Ctrl-C.
            self.close()
            raise

    @property
    def members(self) -> list[BaseProcess]:
        return [worker.process for worker in self._workers if worker.process is not None]

    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        for worker, request in zip(self._workers, requests, strict=True):
            worker.waiting.clear()  # The waiting requests belong to an earlier epoch.
            self._request(worker, request)

    def submit(self, worker_id: int, task: FetchTask) -> None:
        self._request(self._workers[worker_id], task)

    def receive(self, timeout_s: float | None) -> list[Answer]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        workers = {worker.end.fileno(): worker for worker in self._workers if worker.is_open and worker.end}
        for descriptor in workers:
            poll.register(descriptor, select.POLLIN)
        while True:
            answers = list[Answer]()
            left_s = max(deadline - time.monotonic(), 0.0)
            ready = poll.poll(1000 * min(left_s, CHECK_S))
            for descriptor, _ in ready:
                answers += self._read(workers[descriptor])
            if not ready:  # While any process holds a copy of a dead worker's socket, poll() reports nothing.
                for worker in workers.values():
                    worker.check_life()
            if answers or not left_s:
                return answers

    def open(self, fetched: Fetched) -> Any:
        pickled: OutOfBandPickle = fetched.content
        buffer, own = self._buffer_of_task.pop(fetched.task_id, None), self._owns.pop(fetched.task_id, None)
        spans = {index: piece.span for index, piece in enumerate(pickled.pieces) if piece.content is None}
        if pickled.is_in_buffer and spans:
            assert buffer is not None, "the worker has put the batch into the buffer"
            views: dict[int, Memory] = self._buffers.hand_out(buffer, spans)
        else:
            if buffer is not None:
                self._buffers.put_back([buffer])
            views = {} if own is None else {index: own[slice(*span)] for index, span in spans.items()}
        self._fit(pickled.num_bytes)
        return unpack(pickled, [views.get(index) for index in range(len(pickled.pieces))])

    def release(self, worker_id: int) -> None:
        self._workers[worker_id].close()

    def close(self) -> None:
        super().close()
        self._buffers.close()
        self._buffer_of_task.clear()
        self._owns.clear()

    def drop(self, task_id: int) -> None:
        self._owns.pop(task_id, None)
        if (buffer := self._buffer_of_task.pop(task_id, None)) is not None:
            self._buffers.put_back([buffer])

    def _fit(self, num_bytes: int) -> None:
        layout = self._buffers.layout
        if num_bytes <= (0 if layout is None else layout.num_bytes) or self._unstarted:
            return  # Only workers that have started receive buffers.
        size = num_bytes if layout is None else int(num_bytes * GROWTH)
        self.max_tasks = min(self.max_tasks, find_num_buffers(size, self.max_tasks + 1) - 1)
        if self.max_tasks < len(self._workers) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"memory is low: only {self.max_tasks} of {len(self._workers)} workers can fetch at once, because "
                f"each batch takes {format_bytes(num_bytes)}. Use a smaller batch_size or fewer workers, or give the "
                "container more memory (docker run --memory)",
                RuntimeWarning,
                stacklevel=2,
            )
        self._buffers.lay_out(Layout(num_rows=size, columns={0: ("|u1", ())}), self.max_tasks + 2)

    def _start_next(self, job: FetchJob | None) -> None:
        worker_id = self._unstarted.popleft()
        self._workers[worker_id].start(self._context, job, worker_id, self._base_seed)

    def _start_another(self) -> None:
        if self._unstarted and self._shared is not None:
            worker = self._workers[self._unstarted[0]]
            self._start_next(None)
            self._send_job(worker)

    def _send_job(self, worker: _Process) -> None:
        if self._shared is not None:
            self._shared.send(worker.send)
            self._send_waiting(worker)

    def _request(self, worker: _Process, request: BeginEpoch | FetchTask) -> None:
        worker.waiting.append(request)
        self._send_waiting(worker)

    def _send_waiting(self, worker: _Process) -> None:
        while worker.is_open and worker.waiting and worker.num_sent < MAX_SENT:
            request = worker.waiting.popleft()
            if isinstance(request, FetchTask) and self._buffers.layout is not None:
                buffer = self._buffers.take()
                self._buffer_of_task[request.task_id] = buffer
                request.buffer_id = buffer.buffer_id
            worker.num_sent += 1
            worker.send(request)

    def _read(self, worker: _Process) -> list[Answer]:
        answers = list[Answer]()
        assert worker.end is not None, "it was polled"
        assert worker.process is not None, "it was started"
        for received in receive_ready(worker.end):
            if received is None:
                raise describe_death(worker.process)
            answer, descriptors = received
            worker.num_sent -= 1
            if isinstance(answer, Fetched) and descriptors:
                (descriptor,) = descriptors
                self._owns[answer.task_id] = map_in_torch(descriptor, os.fstat(descriptor).st_size)
                os.close(descriptor)
            elif isinstance(answer, Begun):
                self._start_another()
            elif not isinstance(answer, Fetched):
                self.drop(answer.task_id)
            answers.append(answer)
        self._send_waiting(worker)
        return answers

    def _leave_to_parent(self) -> None:
        for worker in self._workers:
            worker.close()


def _announce(workers: Sequence[_Process], buffer_id: int, layout: Layout, descriptor: int) -> None:
    for worker in workers:
        worker.send(NewBuffer(buffer_id=buffer_id, layout=layout), [descriptor])


def _forget(workers: Sequence[_Process], buffer_ids: tuple[int, ...]) -> None:
    for worker in workers:
        worker.send(ForgetBuffers(buffer_ids=buffer_ids))


def _close_processes(workers: list[_Process]) -> None:
    for worker in workers:
        worker.close()
    processes = [worker.process for worker in workers if worker.process is not None]
    for process in processes:
        if is_stopped(process.pid or 0):
            process.kill()  # A stopped process cannot end by itself.
    _join(processes)
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in (left := [process for process in processes if process.is_alive()]):
            end(process)
        _join(left)


def _join(processes: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + JOIN_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))


class _Process:
    """A worker process, perhaps not started yet: this side's end of the socket pair, and the unsent requests."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.end: socket.socket | None = None
        self.num_sent = 0
        self.waiting: deque[BeginEpoch | FetchTask] = deque()
        self._next_look, self._stopped_from = 0.0, math.inf

    def start(self, context: Any, job: FetchJob | None, worker_id: int, base_seed: int) -> None:
        self.end, theirs = make_pair()  # Create the pair before the fork: the child must close this side's end.
        self.end.setblocking(False)
        with theirs:
            if context.get_start_method() == "forkserver":
                _await_fork_server()
            arguments = theirs, job, worker_id, base_seed, os.getpid()
            process = context.Process(target=run_worker_process, args=arguments, daemon=True)
            process.start()
        self.process = process

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, unless the process was released or has died.

        A dead process is noticed because its answer is missing.

        Raises:
            WorkerError: If the process has died or does not continue while its socket is full.
        """
        if self.end is not None and self.is_open:
            with suppress(ConnectionError):
                while not send_within(CHECK_S, self.end, message, descriptors):  # Fetching a batch may be slow.
                    self.check_life()

    def check_life(self) -> None:
        """Raise WorkerError if the process has died or has been stopped for too long, but not if it is slow."""
        process, now = self.process, time.monotonic()
        assert process is not None, "it was started"
        if not process.is_alive():
            raise describe_death(process)
        if now < self._next_look:
            return
        self._next_look = now + CHECK_S
        self._stopped_from = min(self._stopped_from, now) if is_stopped(process.pid or 0) else math.inf
        if now - self._stopped_from >= STOPPED_S:
            raise describe_stop(process)

    def close(self) -> None:
        if self.end is not None:
            self.end.close()

    @property
    def is_open(self) -> bool:
        return self.end is not None and self.end.fileno() >= 0


def _await_fork_server() -> None:
    """Wait while multiprocessing's fork server is stopped, because starting a process would otherwise block forever.

    Raises:
        WorkerError: If the fork server does not continue.
    """
    # Python has no public name for the fork server's process id, which is None until the first process starts.
    process_id = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    deadline = time.monotonic() + STOPPED_S
    while process_id is not None and is_stopped(process_id):
        if time.monotonic() >= deadline:
            raise WorkerError(
                f"multiprocessing's fork server (pid {process_id}) has been stopped by a signal for {STOPPED_S:.0f} s, "
                f"so no worker can start: continue it (kill -CONT {process_id})"
            )
        time.sleep(min(CHECK_S, STOPPED_S) / 10)  # Poll, because no event reports that a stopped process has resumed.


def describe_stop(process: BaseProcess) -> WorkerError:
    """Return the error for a worker process that was stopped and has not continued."""
    return WorkerError(
        f"DataLoader worker (pid(s) {process.pid}) has been stopped by a signal for {STOPPED_S:.0f} s, so its batch "
        "does not arrive. Iterate over the loader again. If a job must be suspended, suspend all of its processes"
    )


def describe_death(process: BaseProcess) -> WorkerError:
    """Return the error for a worker process that has closed its end of the socket."""
    process.join(JOIN_S)
    code = process.exitcode
    what = f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"
    if code is None:
        return WorkerError(f"{what}: it closed its connection but is still running; perhaps it closed all of its files")
    what = f"{what}: {describe_exit(f'DataLoader worker (pid {process.pid})', code)}"
    if code >= 0:
        return WorkerError(f"{what}. Standard error may show why. Use num_workers=0 to debug")
    causes: dict[int, str] = {
        signal.SIGKILL: "Memory has probably run out: use fewer workers, a smaller prefetch_factor or smaller batches",
        signal.SIGBUS: "Shared memory has probably run out: use fewer workers or smaller batches, or give the "
        "container more memory (docker run --memory, and --shm-size if the dataset shares tensors itself)",
        signal.SIGSEGV: "A library crashed in the dataset or collate_fn: use num_workers=0 and faulthandler to find it",
    }
    return WorkerError(f"{what}. {causes.get(-code, 'Another process may have ended it')}")
