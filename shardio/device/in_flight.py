"""Batches in flight: those being copied to the device, and the memory that they are copied from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardio.device.batches import Movable, map_tensors
from shardio.device.pinned import PinnedPool
from shardio.device.streams import CopyStream, SentBatch, StreamEvent
from shardio.device.waiting import WaitingTimes


class _Sent(NamedTuple):
    sent: SentBatch
    note: Any


class _Source(NamedTuple):
    """The source of a copy: memory that the loader may reuse after its release, and buffers.

    It has only the event, not the batch on the device, which the consumer may free at any time.
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
        prepare: A function that makes the final batch from the copied one and its rng key.
        times: Where the waiting of the device is added.
    """

    is_synchronous = False
    """Whether the only batch that is sent is the one that the user requests."""

    def __init__(
        self,
        stream: CopyStream,
        pool: PinnedPool,
        copy: Callable[[Any], Any],
        prepare: Callable[[Any, int | None], Any],
        times: WaitingTimes,
    ) -> None:
        self._stream, self._pool, self._times = stream, pool, times
        self._copy, self._prepare = copy, prepare
        self._sent: deque[_Sent] = deque()
        self._sources: deque[_Source] = deque()
        self._requests: deque[StreamEvent] = deque()

    def __len__(self) -> int:
        """Return the number of batches that were sent but not yet received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any, rng_key: int | None) -> None:
        """Send a batch. :meth:`receive` returns it together with ``note``."""
        self._release()
        buffers: list[torch.Tensor] = []

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
                return tensor
            if type(tensor) is not torch.Tensor:  # A copy of a subclass, such as a mask, would lose the subclass.
                return tensor
            pinned, buffer = self._pool.take(tensor)
            buffers.append(buffer)
            return pinned

        pinned = map_tensors(batch, pin, _pin_movable)
        sent = self._stream.send(lambda: self._copy(pinned), lambda copied: self._prepare(copied, rng_key))
        self._sources.append(_Source(sent.copied, pinned, buffers))
        self._sent.append(_Sent(sent, note))

    def receive(self) -> tuple[Any, Any]:
        """Return the next batch on the device, and its note."""
        sent, note = self._sent.popleft()
        batch = self._stream.receive(sent)
        self._times.add_wait(self._requests[-1], self._stream.record_event())
        return batch, note

    def is_consumer_idle(self) -> bool:
        """Return whether the device has done all that the consumer had queued when it requested the batch."""
        return self._requests[-1].query()

    def request(self, max_batches: int) -> None:
        """Note that the consumer requests a batch. Wait until the device has at most ``max_batches`` of its work left.

        Without this limit, a fast program runs ahead of its device, and each step ahead takes more
        memory.
        """
        self._requests.append(self._stream.record_event())
        if len(self._requests) > max_batches + 1:
            self._requests.popleft()
            self._requests[0].synchronize()

    def close(self) -> None:
        """Wait until all copies are done, and release everything."""
        for source in self._sources:
            source.copied.synchronize()
        self._release()
        self._sent.clear()
        self._requests.clear()

    def _release(self) -> None:
        """Release the memory of finished copies."""
        while self._sources and self._sources[0].copied.query():
            for buffer in self._sources.popleft().buffers:
                self._pool.put_back(buffer)


def _pin_movable(value: Movable) -> Any:
    """Pin an object that can pin itself, such as torch's PackedSequence, in memory that waits for its copies."""
    pin_memory = getattr(value, "pin_memory", None)
    return pin_memory() if callable(pin_memory) and torch.cuda.is_available() else value


class SynchronousBatches:
    """The same interface without a stream: each batch is copied and prepared when it is sent.

    Args:
        prepare: A function that copies a batch to the device and makes the final batch from it and its rng key.
    """

    is_synchronous = True

    def __init__(self, prepare: Callable[[Any, int | None], Any]) -> None:
        self._prepare = prepare
        self._sent: deque[tuple[Any, Any]] = deque()

    def __len__(self) -> int:
        """Return the number of batches that were sent but not yet received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any, rng_key: int | None) -> None:
        """Prepare a batch. :meth:`receive` returns it together with ``note``."""
        self._sent.append((self._prepare(batch, rng_key), note))

    def receive(self) -> tuple[Any, Any]:
        """Return the next batch and its note."""
        return self._sent.popleft()

    def is_consumer_idle(self) -> bool:
        """Return True: the consumer is the program, which waits."""
        return True

    def request(self, max_batches: int) -> None:
        """Do nothing: the consumer never runs ahead."""

    def close(self) -> None:
        """Release everything."""
        self._sent.clear()
