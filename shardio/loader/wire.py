"""Messages between the training process, its fork server and its worker processes.

A message is one packet: a pickle or, if the pickle is long, the descriptor of anonymous memory that holds it. So a
sender never waits in the middle of a message. No other program can write to the socket pairs.

The dataclasses have no ``__slots__``, because Python pickles dataclasses with slots ten times more slowly. The messages
are neither frozen nor comparable, because frozen or comparable dataclasses take three times as long to define, and each
fork server defines them when it starts.

Objects that a worker process can import are sent by name. Other objects, such as lambdas, closures and definitions in
the user's script or notebook, are sent by value, so the script does not run again.
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
import select
import socket
import sys
import traceback
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import add_note, copy_mark
from shardio.loader.buffers import make_memory
from shardio.process import describe_error, has_ended, let_through

if TYPE_CHECKING:
    from shardio.decoding import FieldDecoder
    from shardio.images import DecoderName
    from shardio.loader.batches import Collation
    from shardio.loader.buffers import Column
    from shardio.order import Words
    from shardio.reading import Reader

MAX_INLINE = 8 * 1024
"""The maximum size in bytes of a pickle sent in the packet itself. A socket's buffer holds dozens of such packets."""

MAX_DESCRIPTORS = 2
"""The maximum number of descriptors in a packet: one for the pickle, and one for a buffer."""

CHECK_PARENT_S = 1.0
"""The interval between checks that the parent is alive, in seconds. Another process may hold the other end open."""


_INLINE, _IN_MEMORY = b"\0", b"\1"


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new socket pair."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Any, descriptors: Sequence[int] = (), *, flags: int = 0) -> None:
    """Send a message.

    Args:
        end: The end to send from.
        message: Any value that can be pickled.
        descriptors: Open files to send with the message.
        flags: Flags for the system call, such as MSG_DONTWAIT.

    Raises:
        BlockingIOError: If the socket is full and this end is nonblocking.
        OSError: If the other end is closed.
    """
    content = pickle.dumps(message, protocol=5)
    if len(content) <= MAX_INLINE:
        _send(end, [_INLINE, content], descriptors, flags)
        return
    memory = make_memory(0)
    try:
        write_all(memory, content)
        _send(end, [_IN_MEMORY], [memory, *descriptors], flags)
    finally:
        os.close(memory)


def send_within(patience_s: float, end: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> bool:
    """Send a message from a nonblocking end; return False if the other end has read nothing for too long.

    This call waits while the socket is full. The call cannot deadlock, because the main threads of the fork server and
    of worker processes only read and never wait for room to write. Other threads may wait.

    Raises:
        OSError: If the other end is closed.
    """
    room = select.poll()
    room.register(end, select.POLLOUT)
    while True:
        with suppress(BlockingIOError):
            send(end, message, descriptors)
            return True
        if not room.poll(1000 * patience_s):
            return False


def receive_all(end: socket.socket, parent_id: int) -> Iterator[tuple[Any, list[int]]]:
    """Yield messages and the descriptors that came with them, until the other end is closed or the parent has ended."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        if poll.poll(1000 * CHECK_PARENT_S):
            if (received := receive(end)) is None:
                return
            yield received
        elif has_ended(parent_id):  # Another process may hold a copy of the other end.
            return


def receive_ready(end: socket.socket) -> Iterator[tuple[Any, list[int]] | None]:
    """Yield the messages that have arrived at a nonblocking end, and finally None if the other end is closed."""
    with suppress(BlockingIOError):
        while (received := receive(end)) is not None:
            yield received
        yield None


def receive(end: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the next message and the descriptors that came with it; None if the other end is closed.

    Raises:
        BlockingIOError: If there is no message and this end is nonblocking.
        OSError: If this process has no descriptors left.
    """
    descriptors = array("i")
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize)
    try:
        packet, ancillary, flags, _ = end.recvmsg(1 + MAX_INLINE, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other end was closed while it had unread messages. Linux reports this once, before that end's messages.
        packet, ancillary, flags, _ = end.recvmsg(1 + MAX_INLINE, space, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        return None
    if flags & socket.MSG_CTRUNC:
        raise OSError(
            errno.EMFILE, "too many open files: no file descriptor is left for a batch. Raise the limit (ulimit -n)"
        )
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    if packet[:1] == _INLINE:
        return pickle.loads(memoryview(packet)[1:]), list(descriptors)
    memory, *rest = descriptors
    try:
        return pickle.loads(_read_all(memory)), rest
    finally:
        os.close(memory)


def _send(end: socket.socket, parts: list[bytes], descriptors: Sequence[int], flags: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    end.sendmsg(parts, rights, flags)


def write_all(descriptor: int, content: bytes) -> None:
    """Write bytes to a file."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]  # On Linux, a single write transfers at most 2 GiB.


def _read_all(descriptor: int) -> bytes | bytearray:
    size = os.fstat(descriptor).st_size
    content: bytes | bytearray = os.pread(descriptor, size, 0)
    while len(content) < size:
        content = bytearray(content) + os.pread(descriptor, size - len(content), len(content))
    return content


@dataclass(kw_only=True, eq=False)
class WorkerSetup:
    """The settings that worker processes need before their first chunk, sent to the fork server as bytes.

    Attributes:
        reader: Reads samples.
        decoder: Decodes them.
        collation: Makes whole batches, if that requires user code; None if a batch consists of columns.
    """

    reader: Reader
    decoder: FieldDecoder
    collation: Collation | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether worker processes run user code."""
        return self.decoder.runs_user_code or self.collation is not None


@dataclass(kw_only=True, eq=False)
class StartWorker:
    """A request to the fork server for a worker process, sent with the process's end of the socket pair.

    Attributes:
        worker_id: The worker process's number, larger than that of every earlier worker process.
        num_threads: The number of chunks that the process makes at once.
    """

    worker_id: int
    num_threads: int


@dataclass(kw_only=True, eq=False)
class EndWorker:
    """A request to the fork server to kill a worker process that does not exit within ``patience_s``."""

    worker_id: int
    patience_s: float


@dataclass(kw_only=True, eq=False)
class WorkerEnded:
    """The answer to :class:`EndWorker`. As in ``subprocess``, exit code -N means that signal N ended the process."""

    process_id: int
    exit_code: int


@dataclass(kw_only=True, eq=False)
class EndAllWorkers:
    """A request to the fork server to kill all its worker processes."""


@dataclass(kw_only=True, eq=False)
class AllWorkersEnded:
    """The answer to :class:`EndAllWorkers`."""


@dataclass(kw_only=True, eq=False)
class Chunk:
    """A request to make some rows of a batch.

    Attributes:
        chunk_id: The chunk's number, larger than that of every earlier chunk.
        samples: n samples, in the form that the reader accepts.
        rng_keys: uint64 [n], one for each sample's transforms.
        buffer_id: The buffer for the fixed-size columns; None if all columns are sent in the answer.
        row: The first row in the buffer.
        valid: bool [n], false for repeats; None unless ``remainder`` is ``mask`` and a Collation makes the batch.
        epoch_began: The start of the epoch, according to ``time.perf_counter``, which all processes share on Linux.
        takes_tiles: Whether images are collected as tiles, for a device to decode.
    """

    chunk_id: int
    samples: Any
    rng_keys: Words
    buffer_id: int | None
    row: int
    valid: NDArray[np.bool_] | None = None
    epoch_began: float
    takes_tiles: bool = False

    @property
    def rows(self) -> slice:
        """The chunk's rows in the batch."""
        return slice(self.row, self.row + len(self.rng_keys))


@dataclass(kw_only=True, eq=False)
class Cancel:
    """A request to drop all chunks that were sent earlier. The worker process finishes the chunks in flight."""


@dataclass(kw_only=True, eq=False)
class Ping:
    """A request for a :class:`Pong`, to show that the process is alive."""


@dataclass(kw_only=True, eq=False)
class Pong:
    """The answer to :class:`Ping`, and the first message of a worker process."""


@dataclass(kw_only=True, eq=False)
class WorkerMemory:
    """The memory of a worker process in bytes, as :func:`read_private_bytes` returns it."""

    num_bytes: int


@dataclass(kw_only=True, eq=False)
class StageTimes:
    """The time that a thread spent in each stage of a chunk, in seconds; ``python_s`` is part of ``transform_s``.

    Attributes:
        began: The start of the chunk, according to ``time.perf_counter``; 0 in a sum.
        process_id: The process of the thread; 0 in a sum.
        thread_id: The system's id of the thread; 0 in a sum.
    """

    read_s: float = 0.0
    transform_s: float = 0.0
    python_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    began: float = 0.0
    process_id: int = 0
    thread_id: int = 0

    def __add__(self, other: StageTimes) -> StageTimes:
        # Written out for speed, because this method runs for each chunk or batch.
        return StageTimes(
            read_s=self.read_s + other.read_s,
            transform_s=self.transform_s + other.transform_s,
            python_s=self.python_s + other.python_s,
            decode_s=self.decode_s + other.decode_s,
            idle_s=self.idle_s + other.idle_s,
        )


@dataclass(kw_only=True, eq=False)
class Made:
    """A finished chunk.

    Attributes:
        chunk_id: The chunk's number.
        columns: One column for each field; if a Collation made the batch in a worker process, one for each piece of the
            batch's memory, with a single row.
        times: The time that the chunk took.
        num_images_by_decoder: The number of images by decoder.
        batch: The batch that a Collation made, as a Pickle if it comes from a worker process.
    """

    chunk_id: int
    columns: list[Column]
    batch: Any = None
    times: StageTimes
    num_images_by_decoder: Counter[DecoderName]


@dataclass(kw_only=True, eq=False)
class Failed:
    """A failed chunk. A SampleError names the sample at fault; any other error may have a different cause."""

    chunk_id: int
    failure: Failure


Outcome = Made | Failed

_obstacles: dict[int, tuple[weakref.ref[Any], str | None]] = {}
"""The objects that were tried, by id because they may not be hashable, with the reason why each cannot be sent."""


def dump_setup(setup: WorkerSetup) -> bytes:
    """Return a setup as bytes."""
    return _dump(setup) if setup.runs_user_code else pickle.dumps(setup, protocol=5)


def load_setup(content: bytes | bytearray) -> WorkerSetup | Failure:
    """Return the setup, or the failure to load it in this process."""
    try:
        if b"torchvision" in content:
            from shardio.libraries import import_library

            import_library("torchvision")  # The import needs the same workaround as in the training process.
        setup: WorkerSetup = pickle.loads(content)
        return setup
    except Exception as error:  # User modules may raise anything.
        add_note(error, "while loading the dataset's transform in a worker process")
        return describe_failure(error)


def why_not_sendable(value: Any, what: str) -> str | None:
    """Return the reason why user code cannot be sent to worker processes; None if it can. Try each object only once.

    Args:
        value: A decoder that holds the code, or a user's callable.
        what: The name by which the reason refers to the value.
    """
    known = _obstacles.get(id(value))
    if known is None or known[0]() is not value:
        reason = None
        try:
            _dump(value)
        except Exception as error:  # User classes may raise anything.
            let_through(error)
            reason = f"the {what} cannot be pickled ({describe_error(error)})"
        try:
            known = weakref.ref(value, partial(_forget, id(value))), reason
        except TypeError:  # A few objects, such as methods written in C, cannot be weakly referenced.
            return reason
        _obstacles[id(value)] = known
    return known[1]


def _forget(key: int, _: object) -> None:
    _obstacles.pop(key, None)


def _dump(value: object) -> bytes:
    import cloudpickle  # The import takes 30 ms.

    content: bytes = cloudpickle.dumps(value, protocol=5)
    return content


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a batch or a chunk, returned in its place.

    Attributes:
        error: The error.
        traceback: The error's traceback in another process; empty if the error has its own traceback.
    """

    error: BaseException
    traceback: str = ""

    def restore(self) -> BaseException:
        """Return the error, with its traceback from the other process as its cause."""
        if self.traceback:  # Pickling drops the original traceback.
            self.error.__cause__ = RuntimeError(f"in a worker:\n{self.traceback}")
        return self.error

    def renewed(self) -> Failure:
        """Return the same failure with a copy of the error, so that the error can be raised several times.

        An error's traceback keeps alive every frame that the error passed through, and therefore also the loader that
        raised the error.
        """
        try:
            error = copy.copy(self.error)
        except Exception:  # Copying may fail in any way.
            error = _as_runtime_error(self.error)
        error.__cause__ = self.error.__cause__
        return Failure(error=error.with_traceback(self.error.__traceback__), traceback=self.traceback)


def describe_failure(error: BaseException) -> Failure:
    """Return a failure that can be sent to another process."""
    lines = traceback.format_exception(error)
    if sys.version_info < (3, 11):  # Later Python versions format the notes themselves.
        lines += [f"{note}\n" for note in getattr(error, "__notes__", [])]
    return Failure(error=_make_portable(error), traceback="".join(lines))


def _make_portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Pickling may fail in any way. Send at least the message.
        return _as_runtime_error(error)
    return error


def _as_runtime_error(error: BaseException) -> BaseException:
    portable = RuntimeError(f"{type(error).__name__}: {error}")
    copy_mark(error, portable)
    return portable
