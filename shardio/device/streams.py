"""Copy batches to a device: the copy stream, pinned memory, and the batches in flight.

This is the only module that uses CUDA streams and events, so tests can run the prefetcher on a simulated stream.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray


def choose_device(name: str | torch.device | None = None, *, num_ranks: int = 1) -> torch.device:
    """Return a device by name, or the best available device: CUDA, then MPS, then the CPU.

    Args:
        name: A device that torch supports, such as ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; None for the best available.
        num_ranks: The number of ranks that train together. Several ranks cannot share an MPS device.

    Raises:
        ValueError: If torch does not support the device or cannot use it.
    """
    if name is None:
        kinds = ("cuda", "mps") if num_ranks == 1 else ("cuda",)
        return torch.device(next(filter(_is_available, kinds), "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch supports, such as 'cuda' or 'cpu', got {name!r}") from error
    if not _is_available(device.type):
        raise ValueError(
            f"device {str(name)!r} is not available, because torch finds no {device.type.upper()} device: use 'cpu', "
            "or omit device to use the best available one"
        )
    return device


def _is_available(device_type: str) -> bool:
    if device_type == "cuda":  # Checked only on request: the check takes time and may print warnings.
        return torch.cuda.is_available()
    return device_type != "mps" or torch.backends.mps.is_available()


_MIN_BUFFER_BYTES = 512
"""The size of the smallest pinned buffer, in bytes."""

Check = Callable[[], None]
"""A function that raises an error if a batch that is ready must not be used."""

Prepare = Callable[[Any, "int | None", list[Check]], Any]
"""A function that makes the final batch from a batch on the device."""

OnTensor = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class Movable(Protocol):
    """An object that moves itself to a device, such as torch's PackedSequence."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any: ...


def map_tensors(batch: Any, function: OnTensor, movable: Callable[[Movable], Any] | None = None) -> Any:
    """Apply a function to every tensor of a nested batch, and to every numeric array as a tensor.

    Args:
        batch: Tensors and numpy arrays in tuples, named tuples, lists, mappings and dataclasses. Other values are kept.
        function: The function for tensors.
        movable: The function for other objects with a method ``to``; if None, they are kept.

    Returns:
        A batch with new containers of the same types. The given batch is not changed.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if isinstance(value, np.ndarray) and (tensor := _as_tensor(value)) is not None:
            return function(tensor)
        if movable is not None and isinstance(value, Movable) and not isinstance(value, type):
            return movable(value)
        if isinstance(value, MutableMapping) and (isinstance(value, dict) or hasattr(value, "__copy__")):
            mapped = copy.copy(value)  # A copy keeps the mapping's class and settings, such as default_factory.
            for name, item in value.items():
                mapped[name] = walk(item)  # Counter.update() would add to the counts.
            return mapped
        if isinstance(value, Mapping):  # Without __copy__, a shallow copy may share its items with the original.
            return type(value)({name: walk(item) for name, item in value.items()})  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(walk, value))
        if isinstance(value, list | tuple):
            return type(value)(map(walk, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied: Any = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(copied, field.name, walk(getattr(value, field.name)))  # The class may be frozen.
            return copied
        return value

    return walk(batch)


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        return None
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # torch lacks this float type, or the array has negative strides.
        return None


class PinnedPool:
    """A pool of pinned buffers, which are reused because pinning memory takes much longer than copying it.

    Args:
        pin: A function that returns n bytes of pinned memory, uint8 [n].
    """

    def __init__(self, pin: Any = None) -> None:
        self._pin = pin or (lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a tensor into a buffer. Return the copy, in the same layout, and the buffer."""
        dense = torch.empty_like(tensor, device="meta")
        num_bytes = dense.numel() * dense.element_size()
        size = max(_MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _MIN_BUFFER_BYTES
        buffer = self._free[size].pop() if self._free[size] else self._pin(size)
        copied = buffer[:num_bytes].view(tensor.dtype).as_strided(dense.size(), dense.stride())
        return copied.copy_(tensor), buffer

    def put_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool after its copy to the device is done."""
        self._free[len(buffer)].append(buffer)

    def clear(self) -> None:
        """Free all unused buffers."""
        self._free.clear()


@dataclass(frozen=True, slots=True)
class Registration:
    """A function that pins memory in place until it is freed, unless it is already pinned or CUDA refuses.

    CUDA may refuse because the system limits pinned memory. Batches then go through a :class:`PinnedPool`.
    Registrations for the same device compare equal, so a loader keeps its memory for the next prefetcher.

    Args:
        device: The CUDA device that copies from the memory. No CUDA context is created for other devices.
    """

    device: torch.device

    def __call__(self, memory: NDArray[np.uint8]) -> None:
        """Pin memory, uint8 [n]."""
        address = memory.ctypes.data
        with torch.cuda.device(self.device):
            cudart = torch.cuda.cudart()
            if torch.from_numpy(memory).is_pinned():
                return
            if int(cudart.cudaHostRegister(address, memory.nbytes, 0)) == 0:
                weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
            else:
                with suppress(RuntimeError):  # This call clears the error, which a later call would otherwise raise.
                    torch.zeros(1, device=self.device)


class StreamEvent(Protocol):
    """A point in the work that is queued on a stream."""

    def query(self) -> bool:
        """Return whether the stream has reached this point."""

    def synchronize(self) -> None:
        """Wait until the stream reaches this point."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this point to a later one, after the stream has reached both points."""


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch on its way to the device.

    Attributes:
        copied: The event after which the device no longer reads the source memory.
        ready: The event after which the batch is ready on the device.
        batch: The batch on the device, in the form that the stream's ``receive`` expects.
    """

    copied: StreamEvent
    ready: StreamEvent
    batch: Any


class CopyStream(Protocol):
    """A stream for copies."""

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> SentBatch:
        """Queue a copy to the device and the preparation of the copied batch.

        The copy and the preparation run after all earlier sends, and after the work that is already queued on the
        caller's stream. Therefore, memory that the caller has freed is not overwritten while the device still reads it.
        """

    def receive(self, sent: SentBatch) -> Any:
        """Return the batch on the device. Later work on the caller's stream waits for the batch."""

    def record_event(self) -> StreamEvent:
        """Record an event after the work that is queued on the caller's stream, and return the event."""


class CudaStream:
    """A stream of a CUDA device. Waiting for the stream's events frees the processor core for the loader's workers.

    Args:
        device: The device, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # The next step needs this stream's results.

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> SentBatch:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied_batch = copy()
            copied = self._stream.record_event(torch.cuda.Event(blocking=True))
            batch = prepare(copied_batch)
            ready = self._stream.record_event(torch.cuda.Event(blocking=True))
        return SentBatch(copied=copied, ready=ready, batch=batch)

    def receive(self, sent: SentBatch) -> Any:
        consumer = torch.cuda.current_stream(self._device)
        consumer.wait_event(sent.ready)  # type: ignore[arg-type]  # send() recorded the event on CUDA.

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:  # After the tensor is freed, the allocator keeps its memory until the consumer is done.
                for part in _find_dense_parts(tensor):
                    part.record_stream(consumer)
            return tensor

        return map_tensors(sent.batch, record)

    def record_event(self) -> StreamEvent:
        event: StreamEvent = torch.cuda.current_stream(self._device).record_event(
            torch.cuda.Event(enable_timing=True, blocking=True)
        )
        return event


def _find_dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors in a sparse tensor, or the tensor itself. Only dense tensors can record a stream."""
    match tensor.layout:
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return [tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStats:
    """The counts and times of a DevicePrefetcher since it was created.

    Attributes:
        num_batches: Batches that the user received.
        loader_wait_s: Seconds that the program waited for the loader. While the device has work left, waiting costs
            nothing.
        data_stall_s: Seconds that the device waited for data, with nothing left to do. On CUDA, events on the device
            measure this time; the last few batches are not included yet. On other devices, the time equals
            ``loader_wait_s``.
    """

    num_batches: int
    loader_wait_s: float
    data_stall_s: float


class WaitingTimes:
    """The running totals of a prefetcher.

    Args:
        has_stream: Whether events measure the stalls of the device. Otherwise, the device is assumed to wait whenever
            the program waits.

    Attributes:
        num_batches: See :class:`PrefetchStats`.
        loader_wait_s: See :class:`PrefetchStats`.
    """

    def __init__(self, *, has_stream: bool) -> None:
        self.num_batches = 0
        self.loader_wait_s = 0.0
        self._measured_s = 0.0
        self._unread: deque[tuple[StreamEvent, StreamEvent]] = deque()
        self._has_stream = has_stream

    def add_wait(self, requested: StreamEvent, received: StreamEvent) -> None:
        """Add the time between two events to the total. The time is read when the device has reached both events.

        Args:
            requested: An event that follows all work queued before the batch was requested.
            received: An event that precedes all work queued after the batch was received.
        """
        self._unread.append((requested, received))
        self._read()

    def sum_up(self) -> PrefetchStats:
        """Return the totals."""
        self._read()
        return PrefetchStats(
            num_batches=self.num_batches,
            loader_wait_s=self.loader_wait_s,
            data_stall_s=self._measured_s if self._has_stream else self.loader_wait_s,
        )

    def _read(self) -> None:
        while self._unread and all(event.query() for event in self._unread[0]):
            requested, received = self._unread.popleft()
            self._measured_s += requested.elapsed_time(received) / 1000


class _Source(NamedTuple):
    """The source of a copy: buffers, and a batch whose memory the loader may reuse after this object is freed.

    The source holds the event but not the batch on the device, so the consumer can free that batch at any time.
    """

    copied: StreamEvent
    batch: Any
    buffers: list[torch.Tensor]


class InFlightBatches:
    """The batches of one epoch that are in flight on a stream.

    Args:
        stream: The stream for copies.
        pool: The buffers for tensors that are not in pinned memory.
        copy: A function that copies a batch to the device.
        prepare: A function that makes the final batch from the copied batch, its rng key and a list, to which the
            function adds the checks to call when the batch is ready.
        times: The totals to which the device's waiting time is added.
    """

    is_synchronous = False
    """Whether each batch is sent only when the user requests it."""

    def __init__(
        self, stream: CopyStream, pool: PinnedPool, copy: Callable[[Any], Any], prepare: Prepare, times: WaitingTimes
    ) -> None:
        self._stream, self._pool, self._times = stream, pool, times
        self._copy, self._prepare = copy, prepare
        self._sent: deque[tuple[SentBatch, Any, list[Check]]] = deque()
        self._sources: deque[_Source] = deque()
        self._requests: deque[StreamEvent] = deque()

    def __len__(self) -> int:
        """Return the number of batches that have been sent but not yet received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any, rng_key: int | None) -> None:
        """Send a batch. :meth:`receive` returns it together with ``note``."""
        self._release()
        buffers: list[torch.Tensor] = []

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
                return tensor
            if type(tensor) is not torch.Tensor:  # A Mask, for example, would lose its class in the copy.
                return tensor
            pinned, buffer = self._pool.take(tensor)
            buffers.append(buffer)
            return pinned

        pinned, checks = map_tensors(batch, pin, pin_movable), list[Check]()
        sent = self._stream.send(lambda: self._copy(pinned), lambda copied: self._prepare(copied, rng_key, checks))
        self._sources.append(_Source(sent.copied, pinned, buffers))
        self._sent.append((sent, note, checks))

    def receive(self) -> tuple[Any, Any, list[Check]]:
        """Return the next batch on the device, its note, and the checks to call before the batch is used."""
        sent, note, checks = self._sent.popleft()
        batch = self._stream.receive(sent)
        self._times.add_wait(self._requests[-1], self._stream.record_event())
        if checks:
            sent.ready.synchronize()
        return batch, note, checks

    def is_consumer_idle(self) -> bool:
        """Return whether the device has finished the work that the consumer had queued when it requested the batch."""
        return self._requests[-1].query()

    def request(self, max_batches: int) -> None:
        """Record a request by the consumer. Wait until the device has at most ``max_batches`` batches left to process.

        Without this limit, a fast program runs ahead of its device, and each step ahead takes more memory.
        """
        self._requests.append(self._stream.record_event())
        if len(self._requests) > max_batches + 1:
            self._requests.popleft()
            self._requests[0].synchronize()

    def close(self) -> None:
        """Wait until all copies are done, and release all tensors."""
        for source in self._sources:
            source.copied.synchronize()
        self._release()
        self._sent.clear()
        self._requests.clear()

    def _release(self) -> None:
        while self._sources and self._sources[0].copied.query():
            for buffer in self._sources.popleft().buffers:
                self._pool.put_back(buffer)


def pin_movable(value: Movable) -> Any:
    """Return a pinned copy of an object if it can pin itself, as torch's PackedSequence can; otherwise, the object."""
    pin_memory = getattr(value, "pin_memory", None)
    return pin_memory() if callable(pin_memory) and torch.cuda.is_available() else value


class SynchronousBatches:
    """The interface of InFlightBatches without a stream: each batch is copied and prepared when it is sent.

    Args:
        copy: A function that copies a batch to the device.
        prepare: A function that makes the final batch from the copied batch, its rng key and a list, to which the
            function adds the checks to call when the batch is ready.
    """

    is_synchronous = True

    def __init__(self, copy: Callable[[Any], Any], prepare: Prepare) -> None:
        self._copy, self._prepare = copy, prepare
        self._sent: deque[tuple[Any, Any, list[Check]]] = deque()

    def __len__(self) -> int:
        """Return the number of batches that have been sent but not yet received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any, rng_key: int | None) -> None:
        """Prepare a batch. :meth:`receive` returns it together with ``note``."""
        checks = list[Check]()
        self._sent.append((self._prepare(self._copy(batch), rng_key, checks), note, checks))

    def receive(self) -> tuple[Any, Any, list[Check]]:
        """Return the next batch, its note, and the checks to call before the batch is used."""
        return self._sent.popleft()

    def is_consumer_idle(self) -> bool:
        """Return True, because the consumer is the program, which is waiting."""
        return True

    def request(self, max_batches: int) -> None:
        """Do nothing, because the consumer never runs ahead."""

    def close(self) -> None:
        """Release everything."""
        self._sent.clear()
