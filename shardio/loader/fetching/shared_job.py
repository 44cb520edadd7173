"""A job in memory that all worker processes of a loader share, for those that are not forked from its process.

The job is pickled once, with what multiprocessing can send to a process that it starts: locks, queues, tensors in
shared memory. Large buffers, such as those of arrays, are outside of the pickle. Each worker maps them: it has a copy
of the pages that it writes to, and of no others.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shardio.errors import add_note
from shardio.interruptions import let_through
from shardio.loader.fetching.job import FetchJob, make_failing_job
from shardio.loader.processes.wire import MAX_DESCRIPTORS, receive_all, write_all
from shardio.loader.slots.memory import make_memory, map_memory
from shardio.loader.slots.structures import Memory

_ALIGNMENT = 64
"""Where buffers begin, in bytes: a multiple of the size of every dtype."""


@dataclass(kw_only=True, eq=False)
class JobMemory:
    """Where a job is in the memory that comes with this message.

    Attributes:
        num_bytes: The size of the memory.
        pickle_bytes: The size of the pickle, with which it begins.
        spans: The first byte of each buffer, and the one after its last.
        num_descriptors: How many descriptors follow, in :class:`MoreDescriptors`.
    """

    num_bytes: int
    pickle_bytes: int
    spans: list[tuple[int, int]]
    num_descriptors: int


@dataclass(kw_only=True, eq=False)
class MoreDescriptors:
    """A message with descriptors that the job needs."""


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
        self.write(bytes(-self._stop % _ALIGNMENT))
        start = self._stop
        with buffer.raw() as content:
            self.write(content)  # type: ignore[arg-type]  # any buffer
        buffer.release()
        return start, self._stop


def receive_job(end: socket.socket) -> FetchJob | None:
    """Return the job that was sent to this process; None if the other end is closed.

    If the job cannot be loaded, return one that begins with the error.
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
    except Exception as error:  # People's modules may raise anything.
        let_through(error)
        add_note(error, "while loading the dataset in a worker process")
        return make_failing_job(error)
    return job


class _Sending:
    """What Python's reductions look for: the process that is being started, which receives descriptors."""

    def __init__(self) -> None:
        self.descriptors = list[int]()

    def duplicate_for_child(self, descriptor: int) -> int:
        """Add a descriptor to those that are sent; return its number among them."""
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1

    DupFd = staticmethod(lambda number: _Sent(number))


class _Sent:
    """A descriptor in a job's pickle."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _take, (self._number,)


@dataclass(frozen=True, slots=True)
class _Received:
    """A descriptor that was received."""

    descriptor: int

    def detach(self) -> int:
        """Return the descriptor; the caller closes it."""
        return self.descriptor


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[Memory], descriptors: Sequence[int]) -> None:
        super().__init__(file, buffers=buffers)
        self._find = partial(_find, descriptors)  # Not a method: the unpickler would keep itself.

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for: instead of :func:`_take`, what has the descriptors."""
        if (module, name) == (__name__, _take.__name__):
            return self._find
        return super().find_class(module, name)


def _take(number: int) -> _Received:
    """Stand for a descriptor in pickles."""
    raise RuntimeError("only receive_job can read this pickle")


def _find(descriptors: Sequence[int], number: int) -> _Received:
    """Return a descriptor that was received."""
    return _Received(descriptors[number])


@contextmanager
def _sending() -> Iterator[_Sending]:
    """Pretend in the block that a process is being started: multiprocessing's reductions work only then."""
    sending = _Sending()
    context.set_spawning_popen(sending)  # type: ignore[arg-type]  # it has what they use
    try:
        yield sending
    finally:
        context.set_spawning_popen(None)


def _name_attribute(error: Exception, job: FetchJob) -> None:
    """Add to an error of pickling the attribute and the argument at fault, and what to do."""
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
    """Return the path of the innermost part of a value that cannot be pickled, and that part."""
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
