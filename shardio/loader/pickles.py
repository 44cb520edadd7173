"""Pickles that send values of any type between processes, and keep the memory of tensors and arrays out of band.

As with the buffers of pickle protocol 5, the memory of tensors, arrays and storages stays outside the pickle, in
*pieces*. Unlike with protocol 5, tensors keep their strides, and tensors that share memory still share it.

A large piece is in a batch buffer, or in memory allocated only for this value. A small piece is sent with the pickle.

A loader's job is pickled once for all its worker processes. A job may hold anything that multiprocessing can send to a
new process: locks, queues, tensors in shared memory. Each worker maps the memory of the job's arrays, and
copies only the pages that it writes to.
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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data._utils.worker
from numpy.typing import NDArray
from torch.storage import TypedStorage

from shardio.errors import add_note
from shardio.loader.buffers import MIN_BYTES, make_memory, map_memory
from shardio.loader.fetch_job import FetchJob, make_failing_job
from shardio.loader.wire import MAX_DESCRIPTORS, receive_all, write_all
from shardio.process import let_through

ALIGNMENT = 64
"""The alignment of pieces in a buffer, in bytes: a multiple of the sizes of a cache line and of every dtype."""

Memory = NDArray[np.uint8]


def pack(value: Any, arena: Arena | None, make_memory: Callable[[int], Memory]) -> OutOfBandPickle:
    """Pickle a value, and place its pieces.

    Args:
        value: Any value that can be pickled.
        arena: A buffer for the large pieces, or None. Pieces that this buffer already holds are not copied.
        make_memory: Returns memory of n bytes, for pieces that do not fit into the arena.
    """
    pickled, memories = take_memory_out(value)
    pieces = [Piece(content=memory.tobytes() if len(memory) < MIN_BYTES else None) for memory in memories]
    large = [(piece, memory) for piece, memory in zip(pieces, memories, strict=True) if piece.content is None]
    num_bytes = sum(_align(len(memory)) for _, memory in large)
    is_in_buffer = arena is not None and _place(large, arena)
    if large and not is_in_buffer:
        _place(large, Arena(make_memory(num_bytes)))
    return OutOfBandPickle(pickle=pickled, pieces=pieces, num_bytes=num_bytes, is_in_buffer=is_in_buffer)


def unpack(pickled: OutOfBandPickle, memories: Sequence[Memory | None]) -> Any:
    """Return the value of a pickle.

    Args:
        pickled: The pickle.
        memories: The memory of each piece, uint8 [n]; None for pieces that were sent with the pickle.
    """
    pieces = [
        memory if piece.content is None else np.array(memoryview(piece.content), np.uint8)
        for piece, memory in zip(pickled.pieces, memories, strict=True)
    ]
    return put_memory_back(pickled.pickle, [torch.from_numpy(piece) for piece in pieces])


@dataclass(kw_only=True, eq=False)
class OutOfBandPickle:
    """A pickled value and its pieces, the large ones out of band.

    Attributes:
        pickle: The pickled value without its pieces.
        pieces: The pieces.
        num_bytes: The number of bytes that the large pieces need in a buffer.
        is_in_buffer: Whether the large pieces are in the given buffer; otherwise, they are in separate memory.
    """

    pickle: Pickle
    pieces: list[Piece]
    num_bytes: int
    is_in_buffer: bool


@dataclass(kw_only=True, eq=False)
class Piece:
    """The memory of a tensor, an array or a storage.

    Attributes:
        content: The bytes, if they are sent with the pickle.
        span: Otherwise, the start and the end (exclusive) of their place in the buffer, in bytes.
    """

    content: bytes | None = None
    span: tuple[int, int] = (0, 0)


class Arena:
    """The memory of a buffer, allocated piece by piece.

    Args:
        memory: uint8 [n].
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._stop = 0

    def take(self, num_bytes: int) -> Memory | None:
        """Return a piece of memory that is not in use yet; None if too little is left."""
        start = _align(self._stop)
        if start + num_bytes > len(self.memory):
            return None
        self._stop = start + num_bytes
        return self.memory[start : self._stop]

    def find(self, piece: Memory) -> tuple[int, int] | None:
        """Return the start and the end (exclusive) of a piece in this memory; None if the piece is elsewhere."""
        start: int = piece.ctypes.data - self.memory.ctypes.data
        return (start, start + len(piece)) if 0 <= start <= len(self.memory) - len(piece) else None


def _place(pieces: Sequence[tuple[Piece, Memory]], arena: Arena) -> bool:
    """Copy pieces into an arena, unless it already holds them; return whether they fit."""
    for piece, memory in pieces:
        if (span := arena.find(memory)) is None:
            taken = arena.take(len(memory))
            if taken is None:
                return False
            taken[...] = memory
            span = arena.find(taken)
            assert span is not None, "the piece was taken from the arena"
        piece.span = span
    return True


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def take_memory_out(value: Any) -> tuple[Pickle, list[Memory]]:
    """Pickle a value, leaving out the memory of its tensors, arrays and storages.

    Returns:
        The pickle, and its pieces, uint8 [n] each. The piece of a storage contains only the bytes that the value uses.

    Raises:
        RuntimeError: If the value contains a tensor that requires a gradient and is not a leaf. torch's queues also
            reject such tensors.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    storages = pickler.storages.values()
    pickled = Pickle(content=file.getvalue(), starts=[storage.start for storage in storages])
    return pickled, [storage.read() for storage in storages]


def put_memory_back(pickled: Pickle, pieces: Sequence[torch.Tensor]) -> Any:
    """Return the value of a pickle.

    Args:
        pickled: The pickle.
        pieces: Its pieces, uint8 [n] each. The value's tensors are views of the pieces; its arrays are copies.
    """
    return _Unpickler(pickled.content, _fill.__name__, partial(_fill_from, pickled.starts, pieces)).load()


@dataclass(kw_only=True, eq=False)
class Pickle:
    """A pickled value, without its out-of-band pieces.

    Attributes:
        content: The pickle.
        starts: The first byte of each piece, counted from the beginning of its storage.
    """

    content: bytes
    starts: list[int]


class _Gap(NamedTuple):
    """The place of a tensor, an array or a storage in a pickle.

    Attributes:
        piece_index: The index of the piece that the value uses.
        dtype: The name of torch's dtype, or numpy's for arrays; "" for a storage.
        is_array: Whether the value is an array.
        offset: The place of the value's first byte, counted from the beginning of the storage.
        shape: The value's shape.
        strides: The value's strides, in items for a tensor and in bytes for an array.
    """

    piece_index: int
    dtype: str = ""
    is_array: bool = False
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class _Storage:
    """The bytes of a storage, or of an array, that a value uses."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.start, self._stop = len(memory), 0

    def cover(self, start: int, stop: int) -> None:
        # Round the start down, so that the piece is aligned for every dtype.
        self.start, self._stop = min(self.start, start // ALIGNMENT * ALIGNMENT), max(self._stop, stop)

    def read(self) -> Memory:
        return self._memory[self.start : max(self._stop, self.start)]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        # The key is the address and size of a storage's memory, or the id of an array.
        self.storages: dict[tuple[int, ...], _Storage] = {}
        self._indices: dict[tuple[int, ...], int] = {}
        self._kept: list[Any] = []  # Otherwise, a new object might get the id or the address of an earlier one.

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction with which to pickle a value.

        Unlike ``persistent_id``, this method is not called for numbers, strings and containers.
        """
        kind, gap = type(value), None
        if kind is torch.Tensor:
            gap = self._take_tensor(value)
        elif kind is np.ndarray:
            gap = self._take_array(value)
        elif kind is TypedStorage:  # The storage of a special tensor, such as a Parameter.
            return _make_typed, (value._untyped_storage, value.dtype)  # The public method issues a warning.
        elif kind is torch.UntypedStorage and value.device.type == "cpu":
            gap = _Gap(piece_index=self._add(_identify(value), value, 0, value.nbytes()))
        return NotImplemented if gap is None else (_fill, gap)

    def _take_tensor(self, tensor: torch.Tensor) -> _Gap | None:
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "a tensor that needs a gradient and is not a leaf cannot be sent to another process: call detach() "
                "in the dataset or collate_fn"
            )
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
            return None
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            return None
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = int(reach) + 1 if tensor.numel() else 0
        return _Gap(
            piece_index=self._add(_identify(storage), storage, start, start + extent * size),
            dtype=str(tensor.dtype).removeprefix("torch."),
            offset=start,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )

    def _take_array(self, array: NDArray[Any]) -> _Gap | None:
        if array.nbytes < MIN_BYTES or array.dtype.kind not in "biufc" or not array.dtype.isnative:
            return None
        is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
        # Require a writable array, because memory that is sent alongside the pickle becomes a tensor.
        ordered = np.require(array.T if is_transposed else array, requirements=["C", "W"])
        index = self._add((id(array),), ordered, 0, array.nbytes)
        self._kept.append(array)
        return _Gap(
            piece_index=index,
            dtype=array.dtype.str,
            is_array=True,
            shape=array.shape,
            strides=(array if is_transposed else ordered).strides,
        )

    def _add(self, key: tuple[int, ...], owner: Any, start: int, stop: int) -> int:
        if key not in self.storages:
            memory = owner.reshape(-1).view(np.uint8) if isinstance(owner, np.ndarray) else _as_tensor(owner).numpy()
            self.storages[key] = _Storage(memory)
            self._indices[key] = len(self._indices)
            self._kept.append(owner)
        self.storages[key].cover(start, stop)
        return self._indices[key]


class _Unpickler(pickle.Unpickler):
    """An unpickler that calls ``stand_in`` in place of a function of this module.

    The unpickler holds the stand-in. If the stand-in were a method of the unpickler, their reference cycle would keep
    the memory until the garbage collector runs.
    """

    def __init__(
        self, content: bytes, name: str, stand_in: Callable[..., Any], buffers: Sequence[Memory] | None = None
    ) -> None:
        super().__init__(io.BytesIO(content), buffers=buffers)
        self._name, self._stand_in = name, stand_in

    def find_class(self, module: str, name: str) -> Any:
        return self._stand_in if (module, name) == (__name__, self._name) else super().find_class(module, name)


def _fill(*values: Any) -> Any:
    """Represent :func:`_fill_from` in pickles."""
    raise RuntimeError("only put_memory_back can read this pickle")


def _fill_from(starts: Sequence[int], pieces: Sequence[torch.Tensor], *values: Any) -> Any:
    gap = _Gap(*values)
    piece = pieces[gap.piece_index]
    if gap.is_array:
        # Copy the array: its slices would hold the buffer's memory without holding the array that the pool watches.
        ordered = piece.numpy().view(gap.dtype)
        return np.lib.stride_tricks.as_strided(ordered, gap.shape, gap.strides).copy(order="K")
    if not gap.dtype:
        return piece.untyped_storage()
    dtype = getattr(torch, gap.dtype)
    size = dtype.itemsize
    items = piece[: len(piece) // size * size].view(dtype) if len(piece) else torch.empty(0, dtype=dtype)
    return items.as_strided(gap.shape, gap.strides, (gap.offset - starts[gap.piece_index]) // size)


def _make_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _identify(storage: torch.UntypedStorage) -> tuple[int, int]:
    # Storages of arrays that begin at the same address may end at different addresses.
    return storage.data_ptr(), storage.nbytes()


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class SharedJob:
    """A job that worker processes can receive.

    Args:
        job: The job, which must live as long as this object.

    Raises:
        Exception: If the job cannot be pickled; the message names the attribute at fault.
    """

    def __init__(self, job: FetchJob) -> None:
        self._memory = make_memory(0)
        weakref.finalize(self, os.close, self._memory)
        self._stop = 0
        buffers = list[pickle.PickleBuffer]()
        with _sending() as sending:
            try:
                # As in Python's pickler, __init__ accepts only positional arguments.
                ForkingPickler(self, 5, True, buffers.append).dump(job)  # The pickler calls only write().
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
            send: Sends the process a message with open files.
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
        pickle_bytes: The size of the pickle, with which the memory begins.
        spans: The start and the end (exclusive) of each buffer in the memory.
        num_descriptors: The number of descriptors that follow, in :class:`MoreDescriptors`.
    """

    num_bytes: int
    pickle_bytes: int
    spans: list[tuple[int, int]]
    num_descriptors: int


@dataclass(kw_only=True, eq=False)
class MoreDescriptors:
    """A message with descriptors that the job needs."""


def receive_job(end: socket.socket, parent_id: int) -> FetchJob | None:
    """Return the job that was sent to this process; None if the other end is closed or the parent has ended.

    If the job cannot be loaded, return one that answers every request with the error.
    """
    messages = receive_all(end, parent_id)
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
    content = memory[: message.pickle_bytes].tobytes()
    buffers = [memory[slice(*span)] for span in message.spans]
    try:
        job: FetchJob = _Unpickler(content, _take.__name__, partial(_find, descriptors), buffers).load()
    except Exception as error:  # User modules may raise anything.
        let_through(error)
        add_note(error, "while loading the dataset in a worker process")
        return make_failing_job(error)
    return job


class _Sending:
    """A stand-in for a process that is being started. Multiprocessing's reductions add descriptors to the stand-in."""

    def __init__(self) -> None:
        self.descriptors = list[int]()

    def duplicate_for_child(self, descriptor: int) -> int:
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


def _take(number: int) -> _Received:
    """Represent a descriptor in pickles."""
    raise RuntimeError("only receive_job can read this pickle")


def _find(descriptors: Sequence[int], number: int) -> _Received:
    return _Received(descriptors[number])


@contextmanager
def _sending() -> Iterator[_Sending]:
    """In the block, pretend that a process is being started, because multiprocessing's reductions work only then."""
    sending = _Sending()
    context.set_spawning_popen(sending)  # type: ignore[arg-type]  # has all attributes that reductions use
    try:
        yield sending
    finally:
        context.set_spawning_popen(None)


def _name_attribute(error: Exception, job: FetchJob) -> None:
    for field in fields(FetchJob):
        if not _can_pickle(value := getattr(job, field.name)):
            path, found = _find_attribute(field.name, value)
            remedy = (
                f"{path} cannot be pickled, but worker processes that are not forked receive it as a pickle: define "
                f"functions and classes ({type(found).__name__}) at the top of a module, create other objects in the "
                "worker, or use worker_method='thread' or multiprocessing_context='fork'"
            )
            error.args = (f"{error} ({remedy})", *error.args[1:])
            return


def _find_attribute(path: str, value: Any) -> tuple[str, Any]:
    """Return the path and value of the innermost part that cannot be pickled."""
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
    nowhere: Callable[[pickle.PickleBuffer], None] = lambda _: None  # noqa: E731  # shorter than a def
    with _sending():
        try:
            ForkingPickler(io.BytesIO(), 5, True, nowhere).dump(value)
        except Exception as error:
            let_through(error)
            return False
    return True
