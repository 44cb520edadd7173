"""FetchWorkers that are processes: the loader's side."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from shardio.errors import WorkerError
from shardio.forks import call_at_fork
from shardio.loader.fetching.job import FetchJob
from shardio.loader.fetching.messages import Answer, BeginEpoch, Begun, Fetched, FetchTask
from shardio.loader.fetching.worker_process import run_worker_process
from shardio.loader.processes.messages import ForgetSlots, NewSlot
from shardio.loader.processes.wire import make_pair, receive, send_within
from shardio.loader.slots.budget import find_num_slots
from shardio.loader.slots.memory import Layout
from shardio.loader.slots.parcels import Memory, Parcel, unpack
from shardio.loader.slots.slot_pool import Slot, SlotPool, map_in_torch

CHECK_S = 5.0
"""How often a silent worker process is checked."""

JOIN_S = 5.0
"""How long a worker process may take to finish what it is fetching before it is terminated."""

MAX_SENT = 8
"""How many requests a worker process may have unanswered. More would fill its socket, and block both sides."""

SEND_S = 3600.0
"""How long a worker process may read nothing, while it fetches a batch, before its messages are dropped."""

GROWTH = 1.25
"""How much larger than the largest batch so far slots become when batches grow."""


class _Process:
    """One worker process: this side's end of the socket pair, and the requests that it has not answered."""

    def __init__(self, process: BaseProcess, end: socket.socket) -> None:
        self.process, self.end = process, end
        self.num_sent = 0
        self.waiting: deque[BeginEpoch | FetchTask] = deque()


class FetchProcesses:
    """The worker processes of one loader.

    Args:
        job: What they fetch.
        base_seed: The seed of the first one.
        context: Starts processes: a context of multiprocessing, or torch.multiprocessing.
        max_tasks: How many batches are fetched ahead.

    Attributes:
        members: The processes.
        max_tasks: How many batches may be fetched ahead; fewer if there is too little memory.
    """

    def __init__(self, job: FetchJob, base_seed: int, context: Any, max_tasks: int) -> None:
        self.max_tasks = max_tasks
        self._workers: list[_Process] = []
        self._slots = SlotPool(partial(_announce, self._workers), partial(_forget, self._workers), ())  # No cycle.
        self._slot_of_task: dict[int, Slot] = {}
        self._owns: dict[int, Memory] = {}  # Memory that a worker made for one batch, by task.
        self._process_id = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._workers, os.getpid())
        call_at_fork(self, after_in_child=FetchProcesses._leave_to_parent)
        for worker_id in range(job.num_workers):
            ours, theirs = make_pair()
            ours.setblocking(False)
            with theirs:
                process = context.Process(
                    target=run_worker_process, args=(theirs, job, worker_id, base_seed), daemon=True
                )
                worker = _Process(process, ours)
                self._workers.append(worker)  # Before the fork, so that the child closes this side's end.
                try:
                    process.start()
                except BaseException:
                    self._workers.remove(worker)
                    ours.close()
                    raise

    @property
    def members(self) -> list[BaseProcess]:
        """The processes."""
        return [worker.process for worker in self._workers]

    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        """Begin an epoch: one request for each worker."""
        for worker, request in zip(self._workers, requests, strict=True):
            worker.waiting.clear()  # They belong to an earlier epoch.
            self._request(worker, request)

    def submit(self, worker_id: int, task: FetchTask) -> None:
        """Request a batch of a worker."""
        self._request(self._workers[worker_id], task)

    def receive(self, timeout_s: float | None) -> list[Answer]:
        """Wait for answers; return an empty list after ``timeout_s``, or after a check of silent processes.

        Raises:
            WorkerError: If a worker process died.
        """
        if self._process_id != os.getpid():
            raise RuntimeError("this iterator belongs to the parent of this forked process: call iter(loader) again")
        poll, workers = (
            select.poll(),
            {worker.end.fileno(): worker for worker in self._workers if worker.end.fileno() >= 0},
        )
        for descriptor in workers:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(1000 * (CHECK_S if timeout_s is None else min(timeout_s, CHECK_S)))
        answers = list[Answer]()
        for descriptor, _ in ready:
            answers += self._read(workers[descriptor])
        if not ready:  # Another process may hold a copy of a dead one's end.
            for worker in workers.values():
                if not worker.process.is_alive():
                    raise _describe_death(worker.process)
        return answers

    def open(self, fetched: Fetched) -> Any:
        """Return the batch that a worker fetched."""
        parcel: Parcel = fetched.content
        slot, own = self._slot_of_task.pop(fetched.task_id, None), self._owns.pop(fetched.task_id, None)
        spans = {index: piece.span for index, piece in enumerate(parcel.pieces) if piece.content is None}
        if parcel.is_in_slot and spans:
            assert slot is not None, "the worker has put the batch there"
            views: dict[int, Memory] = self._slots.hand_out(slot, spans)
        else:
            if slot is not None:
                self._slots.put_back([slot])
            views = {} if own is None else {index: own[slice(*span)] for index, span in spans.items()}
        self._fit(parcel.num_bytes)
        return unpack(parcel, [views.get(index) for index in range(len(parcel.pieces))])

    def release(self, worker_id: int) -> None:
        """End a worker that has nothing more to do."""
        self._workers[worker_id].end.close()

    def close(self) -> None:
        """End all workers and wait for them."""
        self._finalizer()
        self._slots.close()
        self._slot_of_task.clear()
        self._owns.clear()

    def drop(self, task_id: int) -> None:
        """Take back the slot of a task that has no batch."""
        self._owns.pop(task_id, None)
        if (slot := self._slot_of_task.pop(task_id, None)) is not None:
            self._slots.put_back([slot])

    def _fit(self, num_bytes: int) -> None:
        """Use larger slots if a batch was larger than those."""
        layout = self._slots.layout
        if num_bytes <= (0 if layout is None else layout.num_bytes):
            return
        size = num_bytes if layout is None else int(num_bytes * GROWTH)
        self.max_tasks = min(self.max_tasks, find_num_slots(size, self.max_tasks + 1) - 1)
        self._slots.lay_out(Layout(num_rows=size, columns={0: ("|u1", ())}), self.max_tasks + 2)

    def _request(self, worker: _Process, request: BeginEpoch | FetchTask) -> None:
        worker.waiting.append(request)
        self._send_waiting(worker)

    def _send_waiting(self, worker: _Process) -> None:
        while worker.waiting and worker.num_sent < MAX_SENT:
            request = worker.waiting.popleft()
            if isinstance(request, FetchTask) and self._slots.layout is not None:
                slot = self._slots.take()
                self._slot_of_task[request.task_id] = slot
                request.slot_id = slot.slot_id
            worker.num_sent += 1
            _send(worker, request)

    def _read(self, worker: _Process) -> list[Answer]:
        answers = list[Answer]()
        while True:
            try:
                received = receive(worker.end)
            except BlockingIOError:
                self._send_waiting(worker)
                return answers
            if received is None:
                raise _describe_death(worker.process)
            answer, descriptors = received
            worker.num_sent -= 1
            if isinstance(answer, Fetched) and descriptors:
                (descriptor,) = descriptors
                self._owns[answer.task_id] = map_in_torch(descriptor, os.fstat(descriptor).st_size)
                os.close(descriptor)
            elif not isinstance(answer, Fetched | Begun):
                self.drop(answer.task_id)
            answers.append(answer)

    def _leave_to_parent(self) -> None:
        """Close all ends in a forked child, so that the worker processes do not outlive the parent."""
        for worker in self._workers:
            worker.end.close()


def _announce(workers: Sequence[_Process], slot_id: int, layout: Layout, descriptor: int) -> None:
    for worker in workers:
        _send(worker, NewSlot(slot_id=slot_id, layout=layout), [descriptor])


def _forget(workers: Sequence[_Process], slot_ids: tuple[int, ...]) -> None:
    for worker in workers:
        _send(worker, ForgetSlots(slot_ids=slot_ids))


def _send(worker: _Process, message: Any, descriptors: Sequence[int] = ()) -> None:
    if worker.end.fileno() >= 0:  # Otherwise it was released.
        with suppress(ConnectionError):  # It has died; the next answer that is missing shows it.
            send_within(SEND_S, worker.end, message, descriptors)


def _describe_death(process: BaseProcess) -> WorkerError:
    """Return the error for a worker process that has closed its end."""
    process.join(JOIN_S)
    code = process.exitcode
    what = f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"
    if code is None:
        return WorkerError(f"{what}: it closed its connection but still runs; it may have closed all of its files")
    if code >= 0:
        return WorkerError(f"{what} with exit code {code}: standard error may show why. Use num_workers=0 to debug")
    name = signal.Signals(-code).name
    causes = {
        signal.SIGKILL: "Memory has probably run out: use fewer workers, a smaller prefetch_factor or smaller batches",
        signal.SIGBUS: "Shared memory has probably run out: use fewer workers or smaller batches, or give the "
        "container more memory (docker run --memory, --shm-size)",
        signal.SIGSEGV: "A library crashed in the dataset or collate_fn: use num_workers=0 and faulthandler to find it",
    }
    why = causes.get(signal.Signals(-code), "Another process may have ended it")
    return WorkerError(f"{what}: it was killed by signal: {name}. {why}")


def _close(workers: list[_Process], process_id: int) -> None:
    if os.getpid() != process_id:
        return
    for worker in workers:
        worker.end.close()
    deadline = time.monotonic() + JOIN_S
    for worker in workers:
        worker.process.join(max(deadline - time.monotonic(), 0.0))
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()
            worker.process.join(JOIN_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
