"""A worker process that calls the user's dataset and sends batches in buffers.

The job is pickled once for all workers. It may hold everything that multiprocessing can send to a process that it
starts: locks, queues, tensors in shared memory. The memory of arrays stays outside the pickle. Each worker maps it, and
copies only the pages that it writes to.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

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

from shardio.errors import add_note
from shardio.loader.failures import Failure, describe_failure
from shardio.loader.fetching.fetchers import DATASET_STATE, FETCHER_STATE, FetchJob, UnknownState, make_failing_job
from shardio.loader.fetching.workers import (
    Answer,
    BeginEpoch,
    Begun,
    Fetched,
    FetchFailed,
    FetchTask,
    FetchWorker,
    seed_process,
)
from shardio.loader.memory import MIN_BYTES, make_memory, map_memory
from shardio.loader.pickles import ALIGNMENT, Arena, Memory, pack
from shardio.loader.processes.wire import MAX_DESCRIPTORS, ForgetBuffers, NewBuffer, receive_all, send, write_all
from shardio.process import describe_error, let_through

_MapOfFunctions = dict[Any, Callable[..., Any]]


def run_worker_process(end: socket.socket, job: FetchJob | None, worker_id: int, base_seed: int) -> None:
    """Run a worker in this process, which was started for it; see :class:`FetchWorker`.

    Args:
        end: This side's end of the socket pair.
        job: The settings of the loader; None if they come through the socket pair.
        worker_id: The number of the worker.
        base_seed: The seed of worker 0.
    """
    torch.set_num_threads(1)
    if job is None and (job := receive_job(end)) is None:
        return
    seed_process(base_seed, worker_id)  # After the modules of the dataset are imported: they may also seed.
    # torch has no public function for this, and user code asks torch.
    torch.utils.data._utils.worker._worker_info = torch.utils.data._utils.worker.WorkerInfo(
        id=worker_id, num_workers=job.num_workers, seed=base_seed + worker_id, dataset=job.dataset
    )
    with suppress(KeyboardInterrupt):  # The training process also raises it.
        FetchWorker(worker_id, job, SocketChannel(end)).run()


class SocketChannel:
    """The channel of a worker process.

    Args:
        end: The worker's end of the socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._messages = receive_all(end, os.getppid())
        self._buffers: dict[int, Memory] = {}
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
                case NewBuffer():
                    self._buffers[message.buffer_id] = map_memory(descriptors[0], message.layout.num_bytes)
                    os.close(descriptors[0])
                case ForgetBuffers():
                    for buffer_id in message.buffer_ids:
                        self._buffers.pop(buffer_id, None)
                case BeginEpoch() | FetchTask():
                    return message
        return None

    def find_collate(self, task: FetchTask, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes the same batches, if possible in the task's buffer."""
        memory = None if task.buffer_id is None else self._buffers.get(task.buffer_id)
        self._arena = None if memory is None else Arena(memory)
        return find_collate(collate_fn, self._arena)

    def describe(self, error: Exception) -> Failure:
        """Return an error with its traceback in this process."""
        return describe_failure(error)

    def send(self, answer: Answer) -> None:
        """Send an answer, a batch as an OutOfBandPickle."""
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
    """Return the answer that replaces one that cannot be sent."""
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
        arena: The buffer; None if there is none.
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
        and not other.is_nested  # It has no shape.
        and other.dtype == first.dtype
        and other.shape == first.shape
        and other.device.type == "cpu"
        and other.layout == torch.strided
        and not (other.requires_grad or other.is_quantized)
    )


def _make(arena: Arena | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return an empty tensor in the buffer; None if it is small, or does not fit."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if arena is None or num_bytes < MIN_BYTES or (memory := arena.take(num_bytes)) is None:
        return None
    return torch.from_numpy(memory).view(dtype).view(shape)


class SharedJob:
    """A job that worker processes can receive.

    Args:
        job: The job. It must live as long as this object.

    Raises:
        Exception: If it cannot be pickled; the message names the attribute at fault.
    """

    def __init__(self, job: FetchJob) -> None:
        self._memory = make_memory(0)
        weakref.finalize(self, os.close, self._memory)
        self._stop = 0
        buffers = list[pickle.PickleBuffer]()
        with _sending() as sending:
            try:
                # As in Python's own, positions are all that its __init__ takes.
                ForkingPickler(self, 5, True, buffers.append).dump(job)  # write() is all it calls
            except Exception as error:
                let_through(error)
                _name_attribute(error, job)
                raise
        self._descriptors = sending.descriptors
        pickle_bytes = self._stop
        spans = [self._add(buffer) for buffer in buffers]
        self._message = JobMemory(
            num_bytes=self._stop, pickle_bytes=pickle_bytes, spans=spans, num_descriptors=len(self._descriptors)
        )

    def write(self, content: bytes) -> int:
        """Append bytes; the pickler calls this."""
        write_all(self._memory, content)
        self._stop += len(content)
        return len(content)

    def send(self, send: Callable[[Any, Sequence[int]], object]) -> None:
        """Send the job to a worker process.

        Args:
            send: Sends it a message with open files.
        """
        send(self._message, [self._memory])
        for start in range(0, len(self._descriptors), MAX_DESCRIPTORS):
            send(MoreDescriptors(), self._descriptors[start : start + MAX_DESCRIPTORS])

    def _add(self, buffer: pickle.PickleBuffer) -> tuple[int, int]:
        self.write(bytes(-self._stop % ALIGNMENT))
        start = self._stop
        with buffer.raw() as content:
            self.write(content)  # type: ignore[arg-type]  # any buffer
        buffer.release()
        return start, self._stop


@dataclass(kw_only=True, eq=False)
class JobMemory:
    """The place of a job in the memory that comes with this message.

    Attributes:
        num_bytes: The size of the memory.
        pickle_bytes: The size of the pickle, with which it begins.
        spans: The first byte of each buffer, and the one after its last.
        num_descriptors: The number of descriptors that follow, in :class:`MoreDescriptors`.
    """

    num_bytes: int
    pickle_bytes: int
    spans: list[tuple[int, int]]
    num_descriptors: int


@dataclass(kw_only=True, eq=False)
class MoreDescriptors:
    """A message with descriptors that the job needs."""


def receive_job(end: socket.socket) -> FetchJob | None:
    """Return the job that was sent to this process; None if the other end is closed.

    If the job cannot be loaded, return one that answers every request with the error.
    """
    messages = receive_all(end, os.getppid())
    if (received := next(messages, None)) is None:
        return None
    message, (descriptor,) = received
    assert isinstance(message, JobMemory), "it is sent first"
    memory = map_memory(descriptor, message.num_bytes, is_private=True)
    os.close(descriptor)
    descriptors = list[int]()
    while len(descriptors) < message.num_descriptors:
        if (received := next(messages, None)) is None:
            return None
        descriptors += received[1]
    content = io.BytesIO(memory[: message.pickle_bytes].tobytes())
    try:
        job: FetchJob = _Unpickler(content, [memory[slice(*span)] for span in message.spans], descriptors).load()
    except Exception as error:  # User modules may raise anything.
        let_through(error)
        add_note(error, "while loading the dataset in a worker process")
        return make_failing_job(error)
    return job


class _Sending:
    """A stand-in for the process that is being started, to which multiprocessing's reductions add descriptors."""

    def __init__(self) -> None:
        self.descriptors = list[int]()

    def duplicate_for_child(self, descriptor: int) -> int:
        """Add a descriptor to be sent, and return its number."""
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1

    DupFd = staticmethod(lambda number: _Sent(number))


class _Sent:
    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _take, (self._number,)


@dataclass(frozen=True, slots=True)
class _Received:
    descriptor: int

    def detach(self) -> int:
        """Return the descriptor; the caller closes it."""
        return self.descriptor


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[Memory], descriptors: Sequence[int]) -> None:
        super().__init__(file, buffers=buffers)
        self._find = partial(_find, descriptors)  # Not a method: the unpickler would keep itself.

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a name, and for :func:`_take` a function that has the descriptors."""
        if (module, name) == (__name__, _take.__name__):
            return self._find
        return super().find_class(module, name)


def _take(number: int) -> _Received:
    """Stand for a descriptor in pickles."""
    raise RuntimeError("only receive_job can read this pickle")


def _find(descriptors: Sequence[int], number: int) -> _Received:
    return _Received(descriptors[number])


@contextmanager
def _sending() -> Iterator[_Sending]:
    """Pretend in the block that a process is being started, because multiprocessing's reductions work only then."""
    sending = _Sending()
    context.set_spawning_popen(sending)  # type: ignore[arg-type]  # it has what they use
    try:
        yield sending
    finally:
        context.set_spawning_popen(None)


def _name_attribute(error: Exception, job: FetchJob) -> None:
    """Add the attribute at fault, and a remedy, to an error of pickling a job."""
    for field in fields(FetchJob):
        if not _can_pickle(value := getattr(job, field.name)):
            path, found = _find_attribute(field.name, value)
            remedy = (
                f"{path} cannot be pickled, but worker processes that are not forked receive it as a pickle: define "
                f"functions and classes ({type(found).__name__}) at the top of a module, create what cannot be sent "
                "in the worker, or use worker_method='thread' or multiprocessing_context='fork'"
            )
            error.args = (f"{error} ({remedy})", *error.args[1:])
            return


def _find_attribute(path: str, value: Any) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be pickled, after its path."""
    seen = set[int]()
    while id(value) not in seen:
        seen.add(id(value))
        broken = next((part for part in _parts(path, value) if not _can_pickle(part[1])), None)
        if broken is None:
            break
        path, value = broken
    return path, value


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, partial):
        yield f"{path}.func", value.func
        yield from _parts(f"{path}.args", value.args)
        yield from _parts(f"{path}.keywords", value.keywords)
    else:
        if (owner := getattr(value, "__self__", None)) is not None:
            yield f"{path}.__self__", owner
        yield from ((f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _can_pickle(value: Any) -> bool:
    nowhere: Callable[[pickle.PickleBuffer], None] = lambda _: None  # noqa: E731  # as short as it can be
    with _sending():
        try:
            ForkingPickler(io.BytesIO(), 5, True, nowhere).dump(value)
        except Exception as error:
            let_through(error)
            return False
    return True
