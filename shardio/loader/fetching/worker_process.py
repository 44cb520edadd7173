"""A worker that is a process: its channel is a socket pair, and its batches are sent in slots."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.utils.data._utils.worker

from shardio.interruptions import describe_error
from shardio.loader.failures import Failure, describe_failure
from shardio.loader.fetching.collating import find_collate
from shardio.loader.fetching.fetchers import UnknownState
from shardio.loader.fetching.job import FetchJob
from shardio.loader.fetching.messages import Answer, BeginEpoch, Begun, Fetched, FetchFailed, FetchTask
from shardio.loader.fetching.seeding import seed_process
from shardio.loader.fetching.shared_job import receive_job
from shardio.loader.fetching.state_keys import DATASET_STATE, FETCHER_STATE
from shardio.loader.fetching.worker import FetchWorker
from shardio.loader.processes.messages import ForgetSlots, NewSlot
from shardio.loader.processes.wire import receive_all, send
from shardio.loader.slots.memory import make_memory, map_memory
from shardio.loader.slots.parcels import Arena, pack
from shardio.loader.slots.structures import Memory


class SocketChannel:
    """The channel of a worker process.

    Args:
        end: The worker's end of the socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._messages = receive_all(end, os.getppid())
        self._slots: dict[int, Memory] = {}
        self._arena: Arena | None = None
        self._is_closed = False  # Requests that were sent before are not answered any more.

    def receive(self) -> BeginEpoch | FetchTask | None:
        """Return the next request; None if the other end is closed."""
        while not self._is_closed:
            received = next(self._messages, None)
            if received is None:
                break
            message, descriptors = received
            match message:
                case NewSlot():
                    self._slots[message.slot_id] = map_memory(descriptors[0], message.layout.num_bytes)
                    os.close(descriptors[0])
                case ForgetSlots():
                    for slot_id in message.slot_ids:
                        self._slots.pop(slot_id, None)
                case BeginEpoch() | FetchTask():
                    return message
        return None

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes the same batches, if possible in the task's slot."""
        memory = None if task.slot_id is None else self._slots.get(task.slot_id)
        self._arena = None if memory is None else Arena(memory)
        return find_collate(collate_fn, self._arena)

    def describe(self, error: Exception) -> Failure:
        """Return an error with its traceback in this process."""
        return describe_failure(error)

    def send(self, answer: Answer) -> None:
        """Send an answer, a batch as a parcel."""
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
    """Return what to answer instead of something that cannot be sent."""
    failure = describe_failure(error)
    if isinstance(answer, Begun):
        return replace(answer, state=None, failure=failure)
    return FetchFailed(task_id=answer.task_id, worker_id=answer.worker_id, failure=failure)


def _without_state(answer: Answer, error: Exception) -> Answer:
    """Return an answer with an unknown state in place of one that cannot be sent."""
    if isinstance(answer, FetchFailed) or answer.state is None:
        return _fail(answer, error)
    unknown = UnknownState(reason=f"the state of the dataset cannot be pickled ({describe_error(error)})")
    return replace(answer, state={FETCHER_STATE: None, DATASET_STATE: unknown})


def run_worker_process(end: socket.socket, job: FetchJob | None, worker_id: int, base_seed: int) -> None:
    """Run a worker in this process, which was started for it; see :class:`FetchWorker`.

    Args:
        end: This side's end of the socket pair.
        job: What to fetch; None if it comes through the socket pair.
        worker_id: The number of the worker.
        base_seed: The seed of worker 0.
    """
    torch.set_num_threads(1)
    if job is None and (job := receive_job(end)) is None:
        return
    seed_process(base_seed, worker_id)  # After the modules of the dataset are imported: they may seed, too.
    # torch has no public function for this, and people's code asks torch.
    torch.utils.data._utils.worker._worker_info = torch.utils.data._utils.worker.WorkerInfo(
        id=worker_id, num_workers=job.num_workers, seed=base_seed + worker_id, dataset=job.dataset
    )
    with suppress(KeyboardInterrupt):  # The training process raises it, too.
        FetchWorker(worker_id, job, SocketChannel(end)).run()
